"""TorchAttention against attention computed token by token in float64, and to the last bit against
itself: a query's output does not depend on what is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from baton_engine.attention.exact import decode_rows
from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.exact.pages import SIZES, Sizes
from baton_engine.attention.exact.splits import Splits
from baton_engine.config.model_config import AttentionSpec
from baton_engine.config.step_sizes import SPLIT_KEYS
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import LATENT, KVField, KVLayout
from tests.support.engines.attention_specs import batch_of, sinks_of, specs_of
from tests.support.engines.small_pool import (
    BLOCK,
    DIM,
    LAYERS,
    POOL,
    attention_of,
    expected_of,
    kv_of,
    memory_of,
)


@pytest.fixture(params=["in place", "copied"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How one-token rows get K and V: from the blocks of the pool, or from copies."""
    if request.param == "copied":
        monkeypatch.setattr(decode_rows, "can_compute", lambda *shape: False)


def rows_of(spans: Sequence[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Rows from spans (start, tokens), each with its own blocks, scattered over the pool."""
    free = list(range(1, POOL + 1))
    random.Random(seed).shuffle(free)
    rows = []
    for start, tokens in spans:
        count = -(-(start + tokens) // BLOCK)
        rows.append(Row([0] * tokens, start, [BlockId(free.pop()) for _ in range(count)]))
    return rows


SPANS = {
    "one token": [(0, 1)],
    "decode rows of one length": [(11, 1)] * 3,
    "decode rows of many lengths": [(200, 1), (90, 1), (70, 1), (13, 1), (4, 1), (0, 1)],
    "a prompt": [(0, 13)],
    "chunked prefill": [(3, 7), (16, 5), (40, 4)],
    "mixed": [(33, 1), (5, 1), (0, 9), (8, 7), (7, 2)],
}


# The sliding window of each layer: none at all, all layers, one layer, and two sizes. With a window
# of 1 a token sees only itself.
WINDOWS: list[tuple[int | None, ...]] = [(), (6, 6), (None, 16), (1, 40)]


# Few keys and scores at a time: one row's keys; some tokens of one kv head. No prompt is computed
# like one-token rows.
SMALL_PARTS = Sizes(max_copied=1, max_scores=5 * SPLIT_KEYS, max_pairs=0, few_tokens=0)


@pytest.mark.pairwise
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("sizes", [SIZES, SMALL_PARTS], ids=["default sizes", "small parts"])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("name", SPANS)
def test_attention_equals_the_definition(
    name: str,
    heads: tuple[int, int],
    sinks: bool,
    windows: tuple[int | None, ...],
    dtype: str,
    near: float,
    sizes: Sizes,
) -> None:
    num_heads, kv_heads = heads
    memory, rows = memory_of(kv_heads, dtype), rows_of(SPANS[name])
    before = kv_of(memory).clone()
    tokens = sum(len(row.tokens) for row in rows)
    noise = torch.Generator().manual_seed(2)
    specs = specs_of(memory.layout, num_heads, windows, sinks=sinks)
    sinks_N = sinks_of(num_heads) if sinks else None
    step = TorchAttention(memory, specs, sizes).begin(batch_of(rows, memory.layout))
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(tokens, count, DIM, generator=noise).to(memory.fields["k"].dtype)
            for count in (num_heads, kv_heads, kv_heads)
        )
        out_TNH = step.attend(layer, q, k, v, sinks_N=sinks_N)
        begin = 0
        for row in rows:
            end = begin + len(row.tokens)
            window = windows[layer] if windows else None
            expected = expected_of(memory, layer, row, q[begin:end], window, sinks_N)
            actual = out_TNH[begin:end].double()
            torch.testing.assert_close(actual, expected, rtol=near, atol=near)
            for index, position in enumerate(range(row.start, row.start + len(row.tokens))):
                block, slot = row.blocks[position // BLOCK], position % BLOCK
                assert torch.equal(kv_of(memory)[block, layer, 0, :, slot], k[begin + index])
                assert torch.equal(kv_of(memory)[block, layer, 1, :, slot], v[begin + index])
                before[block, :, :, :, slot] = kv_of(memory)[block, :, :, :, slot]
            begin = end
    assert torch.equal(kv_of(memory), before)  # no other slot was written


@dataclass(frozen=True)
class Heads:
    """Query heads, kv heads, numbers of a head of k and of v, and whether v are the first of k."""

    queries: int
    kv: int
    dim: int
    value_dim: int
    latent: bool = False

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.queries,
            num_kv_heads=self.kv,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            value_dim=self.value_dim,
            latent=self.latent,
        )

    def memory(self, dtype: str) -> TorchMemory:
        """A pool of one layer, full of noise."""
        fields = [
            KVField("k", self.kv, self.dim, dtype),
            KVField("v", self.kv, self.value_dim, dtype),
        ]
        if self.latent:
            fields = [KVField(LATENT, self.kv, self.dim, dtype)]
        layout = KVLayout.of_fields(tuple(fields), num_layers=1, block_size=BLOCK, chunk_blocks=1)
        memory = TorchMemory(layout, POOL, torch.device("cpu"))
        for field in memory.fields.values():
            field.copy_(torch.randn(field.shape, generator=torch.Generator().manual_seed(1)))
        return memory

    def qkv(self, tokens: int, dtype: str, seed: int) -> list[torch.Tensor | None]:
        noise = torch.Generator().manual_seed(seed)
        shapes = (self.queries, self.dim), (self.kv, self.dim), (self.kv, self.value_dim)
        q, k, v = (
            torch.randn(tokens, *shape, generator=noise).to(TORCH_DTYPES[dtype]) for shape in shapes
        )
        return [q, k, None if self.latent else v]


# Kernels read the first and the third in place.
HEADS = {
    "v larger than k": Heads(4, 2, 32, 64),
    "v smaller than k, odd sizes": Heads(6, 2, 40, 24),
    "latent rows": Heads(6, 1, 96, 64, latent=True),
    "latent rows, odd sizes": Heads(4, 1, 40, 24, latent=True),
}


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("name", HEADS)
def test_attention_with_v_of_another_size_equals_the_definition(
    name: str, dtype: str, near: float
) -> None:
    heads, rows = HEADS[name], rows_of(SPANS["mixed"] + [(120, 1), (30, 70)])
    memory = heads.memory(dtype)
    q, k, v = heads.qkv(sum(len(row.tokens) for row in rows), dtype, seed=2)
    assert q is not None
    assert k is not None
    step = TorchAttention(memory, [heads.spec]).begin(batch_of(rows, memory.layout))
    out_TNV, slots, begin = step.attend(0, q, k, v), step.slots(0), 0
    for row in rows:
        end = begin + len(row.tokens)
        blocks = list(row.blocks)
        k_KSH, v_KSV = (
            pages[blocks].transpose(0, 1).flatten(1, 2) for pages in (slots.k_PKBH, slots.v_PKBV)
        )
        expected = attention_of(q[begin:end], k_KSH, v_KSV, row.start, None)
        torch.testing.assert_close(out_TNV[begin:end].double(), expected, rtol=near, atol=near)
        stored = slice(row.start, row.start + len(row.tokens))
        assert torch.equal(k_KSH[:, stored].transpose(0, 1), k[begin:end])
        if v is not None:
            assert torch.equal(v_KSV[:, stored].transpose(0, 1), v[begin:end])
        begin = end


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_the_bits_with_v_of_another_size_do_not_depend_on_the_pieces(name: str, dtype: str) -> None:
    heads, outputs = HEADS[name], []
    qkv = heads.qkv(100, dtype, seed=3)
    for cut in ([100], [60, *[1] * 40], [33, 33, 34]):
        start, parts = 0, []
        memory = heads.memory(dtype)
        attention = TorchAttention(memory, [heads.spec])
        for count in cut:
            row = Row([0] * count, start, [BlockId(index) for index in range(1, 26)])
            step = attention.begin(batch_of([row], memory.layout))
            some = slice(start, start + count)
            q, k, v = (None if each is None else each[some] for each in qkv)
            assert q is not None
            assert k is not None
            parts.append(step.attend(0, q, k, v))
            start += count
        outputs.append(torch.cat(parts))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_rows_that_share_blocks_get_the_bits_that_each_gets_alone(
    dtype: str, threads: int
) -> None:
    """On two threads, the heads of shared blocks, and those of a row alone, are divided."""
    heads = Heads(8, 1, 96, 64, latent=True)
    memory, shared = heads.memory(dtype), [BlockId(index) for index in range(1, 9)]
    rows = [Row([0], 128 + own, [*shared, BlockId(9 + own)]) for own in (0, 5, 15)]
    rows.append(Row([0], 170, [BlockId(index) for index in range(30, 41)]))
    q, k, v = heads.qkv(len(rows), dtype, seed=4)
    assert q is not None
    assert k is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        attention = TorchAttention(memory, [heads.spec])
        together = attention.begin(batch_of(rows, memory.layout)).attend(0, q, k, v)
        torch.set_num_threads(1)
        for index, row in enumerate(rows):
            some = slice(index, index + 1)
            step = attention.begin(batch_of([row], memory.layout))
            assert torch.equal(step.attend(0, q[some], k[some], v), together[some])
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_row_reads_only_the_keys_that_it_attends_to(dtype: str) -> None:
    """Other slots may hold anything from earlier requests; this test fills them with NaN. Block 0
    is padding, which is never written."""
    memory, rows = memory_of(2, dtype), rows_of(SPANS["decode rows of many lengths"])
    for layer, window in enumerate(windows := (None, 16)):
        seen = torch.zeros(POOL + 1, BLOCK, dtype=torch.bool)
        seen[0] = True
        for row in rows:
            first = max(0, row.start + 1 - window) if window else 0
            for position in range(first, row.start + 1):
                seen[row.blocks[position // BLOCK], position % BLOCK] = True
        kv_of(memory)[:, layer].masked_fill_(~seen[:, None, None, :, None], torch.nan)
    step = TorchAttention(memory, specs_of(memory.layout, 4, windows)).begin(
        batch_of(rows, memory.layout)
    )
    noise = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(len(rows), count, DIM, generator=noise).to(memory.fields["k"].dtype)
            for count in (4, 2, 2)
        )
        assert step.attend(layer, q, k, v).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_piece_reads_only_the_keys_that_it_attends_to(dtype: str) -> None:
    memory, rows = memory_of(2, dtype), rows_of(SPANS["chunked prefill"])
    for layer, window in enumerate(windows := (None, 16)):
        seen = torch.zeros(POOL + 1, BLOCK, dtype=torch.bool)
        for row in rows:
            first = max(0, row.start + 1 - window) if window else 0
            for position in range(first, row.start + len(row.tokens)):
                seen[row.blocks[position // BLOCK], position % BLOCK] = True
        kv_of(memory)[:, layer].masked_fill_(~seen[:, None, None, :, None], torch.nan)
    step = TorchAttention(memory, specs_of(memory.layout, 4, windows)).begin(
        batch_of(rows, memory.layout)
    )
    tokens = sum(len(row.tokens) for row in rows)
    for layer in range(LAYERS):
        q, k, v = (
            torch.ones(tokens, count, DIM).to(memory.fields["k"].dtype) for count in (4, 2, 2)
        )
        assert step.attend(layer, q, k, v).isfinite().all()


@pytest.mark.parametrize(
    ("block_size", "keys"),
    [(1, 64), (4, 64), (7, 112), (12, 48), (16, 64), (24, 48), (64, 64), (65, 1040), (128, 128)],
)
def test_the_keys_of_a_split_fill_whole_vector_registers(block_size: int, keys: int) -> None:
    assert Splits(block_size, None).keys == keys


# --- the same bits --------------------------------------------------------------------------------

# How the 300 tokens of a sequence are cut into pieces, and the spans (start, tokens) of other rows
# in each step.
CUTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "pieces of 256": ([256, 44], []),
    "pieces of 16": ([16] * 18 + [12], []),
    "pieces of 7": ([7] * 42 + [6], []),
    "one token at a time": ([1] * 300, []),
    "decode after a prompt": ([220] + [1] * 80, []),
    "decode among other rows": ([220] + [1] * 80, [(0, 1), (63, 1), (64, 1), (200, 1), (90, 5)]),
    "pieces among other rows": ([100, 100, 100], [(70, 1), (0, 33), (130, 1)]),
}


def sequence_outputs(
    cut: Sequence[int],
    others: Sequence[tuple[int, int]],
    *,
    dtype: str,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
) -> torch.Tensor:
    """Outputs of a sequence's 300 tokens, computed in pieces among rows with random q, k and v."""
    memory = memory_of(heads[1], dtype)
    windows = [window] * LAYERS
    specs = [
        replace(spec, soft_cap=soft_cap)
        for spec in specs_of(memory.layout, heads[0], windows, sinks=sinks)
    ]
    sinks_N = sinks_of(heads[0]) if sinks else None
    attention = TorchAttention(memory, specs)
    noise = torch.Generator().manual_seed(4)
    whole = [torch.randn(300, count, DIM, generator=noise) for count in (heads[0], *heads[1:] * 2)]
    blocks = [BlockId(index) for index in range(1, 76)]
    outputs, start = [], 0
    for count in cut:
        rows = [Row([0] * tokens, first, range_of(first + tokens)) for first, tokens in others]
        place = len(rows) // 2
        rows.insert(place, Row([0] * count, start, blocks))
        begin = sum(len(row.tokens) for row in rows[:place])
        total = sum(len(row.tokens) for row in rows)
        qkv = []
        for each in whole:
            mixed = torch.randn(total, *each.shape[1:], generator=noise)
            mixed[begin : begin + count] = each[start : start + count]
            qkv.append(mixed.to(memory.fields["k"].dtype))
        step = attention.begin(batch_of(rows, memory.layout))
        outputs.append(step.attend(0, *qkv, sinks_N=sinks_N)[begin : begin + count])
        start += count
    return torch.cat(outputs)


def range_of(tokens: int) -> list[BlockId]:
    return [BlockId(100 + index) for index in range(-(-tokens // BLOCK))]


@pytest.mark.pairwise
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (None, 20.0)])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("name", CUTS)
def test_the_bits_do_not_depend_on_the_pieces_or_on_other_rows(
    name: str,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
    dtype: str,
) -> None:
    def outputs(cut: Sequence[int], others: Sequence[tuple[int, int]]) -> torch.Tensor:
        return sequence_outputs(
            cut, others, dtype=dtype, heads=heads, window=window, soft_cap=soft_cap, sinks=sinks
        )

    assert torch.equal(outputs(*CUTS[name]), outputs([300], []))
