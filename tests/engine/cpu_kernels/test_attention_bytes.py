"""The bytes of K and V that a decode step on a CPU reads from memory: of the keys that a row sees,
once.

The kernels are compiled with loads that count. A cache that holds fewer keys than a row has stands
for the CPU's: a cache line that it does not hold is read from memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import ir
from numba.extending import intrinsic

from baton_engine.attention.exact import paged_products
from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.config.model_config import AttentionSpec
from baton_engine.config.step_sizes import SPLIT_KEYS
from baton_engine.cpu_kernels import attention_products, paged_attention, vectors
from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.openmp import Task, inlined
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import LATENT, KVField, KVLayout
from tests.support.engines.attention_specs import batch_of

BLOCK, DIM, HEADS = 16, 64, 8
KEYS = 1030  # of a row
LINE = paged_attention.CACHE_LINE
ROW_BYTES = DIM * 4
NUMBERS_BYTES = attention_products.UNITS * LANES * 4  # of a value, that are added together
# Those of 384 keys: two splits of 64, K and V, and what is read ahead.
CACHE_LINES = 384 * ROW_BYTES // LINE
# Places in the counts: the pool's first byte and its end, the number of lines that were read from
# memory, and from there on for each line that number when the line was last used.
BEGIN, END, READ, USED = 0, 8, 16, 24

LATENT_SPEC = AttentionSpec(
    num_heads=HEADS,
    num_kv_heads=1,
    head_dim=DIM,
    scale=0.1,
    value_dim=32,
    latent=True,
)
SPEC = replace(LATENT_SPEC, value_dim=DIM, latent=False)


@dataclass(frozen=True)
class Counting:
    """Kernels whose loads count."""

    counts: npt.NDArray[np.int64]
    kernels: ModuleType
    compiled: dict[str, Any] = field(default_factory=dict)

    def run(self, function: Callable[[Any], None], task: Task, parts: int) -> None:
        """run_kernel() without threads and without numba's cache, which would take these kernels
        for the engine's."""
        name = function.__name__
        if name not in self.compiled:
            signature = numba.types.void(numba.types.CPointer(numba.from_dtype(task.record)))
            self.compiled[name] = numba.cfunc(signature)(getattr(self.kernels, name))
        address = self.compiled[name].address
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(task))

    def bytes_read(self, run: Callable[[], object], pool: torch.Tensor) -> int:
        self.counts[:] = 0
        begin = pool.data_ptr()
        self.counts[:2] = begin, begin + pool.numel()
        run()
        return int(self.counts[READ // 8]) * LINE


@pytest.fixture(scope="module")
def counting() -> Counting:
    counts = np.zeros(1 << 16, np.int64)
    at = counts.ctypes.data

    def note_line(place: int) -> None:
        begin = vectors.load_address(at + BEGIN)
        if begin <= place and place < vectors.load_address(at + END):
            line = at + USED + (place - begin) // LINE * 8
            read, used = vectors.load_address(at + READ), vectors.load_address(line)
            if used == 0 or read - used >= CACHE_LINES:
                read += 1
                vectors.store_address(at + READ, read)
            vectors.store_address(line, read)

    line_noted = numba.cfunc(numba.types.void(numba.types.int64))(note_line)

    def call_it(typing: Any, place: Any) -> Any:
        """Call note_line(). Code in place of each call would take a minute to compile."""

        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            target = ir.Constant(ir.IntType(64), line_noted.address)
            builder.call(builder.inttoptr(target, kind.as_pointer()), given)
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64), emit

    note = intrinsic(call_it)

    def noting(operation: Callable[[int], Any]) -> Any:
        def noted(place: int) -> Any:
            note(place)
            return operation(place)

        return inlined(noted)

    def store_transposed(place: int, row_bytes: int, target: int) -> None:
        for row in range(LANES):
            note(place + row * row_bytes)
        vectors.store_transposed(place, row_bytes, target)

    def note_lines(places: int, later: int, count: int, offset: int, step: int, size: int) -> None:
        for key in range(count * LANES):
            source = vectors.load_address(places + 8 * (key // LANES)) + offset
            ahead = vectors.load_address(later + 8 * (key // LANES)) + offset
            for line in range(0, size, LINE):
                note(source + key % LANES * step + line)
                note(ahead + key % LANES * step + line)

    note_values: Any = inlined(note_lines)

    def sum_values(
        rows: int,
        places: int,
        later: int,
        count: int,
        offset: int,
        step: int,
        weights: int,
        weight_step: int,
        sums: int,
        bf16: bool,
    ) -> None:
        note_values(places, later, count, offset, step, NUMBERS_BYTES)
        attention_products.sum_values(
            rows, places, later, count, offset, step, weights, weight_step, sums, bf16
        )

    def sum_few_values(
        places: int,
        later: int,
        count: int,
        offset: int,
        step: int,
        weights: int,
        weight_step: int,
        sums: int,
        bf16: bool,
    ) -> None:
        note_values(places, later, count, offset, step, NUMBERS_BYTES // 2)
        attention_products.sum_few_values(
            places, later, count, offset, step, weights, weight_step, sums, bf16
        )

    found = importlib.util.find_spec(paged_attention.__name__)
    assert found is not None
    assert found.loader is not None
    kernels = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    # numba compiles at the first call, with what the names stand for then.
    for name in ("load", "load_words", "prefetch"):
        setattr(kernels, name, noting(getattr(vectors, name)))
    for function in (store_transposed, sum_values, sum_few_values):
        setattr(kernels, function.__name__, inlined(function))
    return Counting(counts, kernels)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bytes_of_a_step(
    counting: Counting, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, *, by_split: bool
) -> int:
    """Bytes that a step of one row with KEYS keys reads from the pool."""
    names = (LATENT,) if spec.latent else ("k", "v")
    fields = tuple(KVField(name, 1, DIM, "float32") for name in names)
    layout = KVLayout.of_fields(fields, num_layers=1, block_size=BLOCK, chunk_blocks=1)
    memory = TorchMemory(layout, 80, torch.device("cpu"))
    for numbers in memory.fields.values():
        numbers.fill_(1.0)
    attention = TorchAttention(memory, [spec])
    assert attention._layers[0].kv.by_split == spec.latent
    attention._layers[0].kv.by_split = by_split
    row = Row([0], KEYS - 1, [BlockId(1 + index) for index in range(-(-KEYS // BLOCK))])
    step = attention.begin(batch_of([row], layout))
    q_TNH, k_TKH = torch.ones(1, HEADS, DIM), torch.ones(1, 1, DIM)
    v_TKV = None if spec.latent else k_TKH
    monkeypatch.setattr(paged_products, "run_kernel", counting.run)
    return counting.bytes_read(
        lambda: step.attend(0, q_TNH, k_TKH, v_TKV, stored=True), memory.pool
    )


def test_a_latent_layer_reads_each_row_once(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last block, all rows. With the softmax of all scores it reads a row for its score, and
    once more for the sums, if there are more rows than the cache holds."""
    rows = -(-KEYS // BLOCK) * BLOCK
    read = bytes_of_a_step(counting, LATENT_SPEC, monkeypatch, by_split=True)
    assert read == rows * ROW_BYTES
    twice = bytes_of_a_step(counting, LATENT_SPEC, monkeypatch, by_split=False)
    assert 1.5 * read < twice <= 2 * read


@pytest.mark.parametrize("window", [None, 100, 300])
def test_a_layer_reads_the_blocks_of_its_window_once(
    window: int | None, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (KEYS - window) // BLOCK if window else 0
    blocks = -(-KEYS // BLOCK) - first
    spec = replace(SPEC, window=window)
    read = bytes_of_a_step(counting, spec, monkeypatch, by_split=False)
    # V of the first split is read ahead, and once more if there are many keys.
    ahead = read - blocks * BLOCK * 2 * ROW_BYTES
    assert 0 <= ahead <= SPLIT_KEYS * ROW_BYTES
