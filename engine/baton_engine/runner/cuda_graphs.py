"""Plain decode steps, from the input tokens to the sampled ids.

In: a Batch. Out: ids on the device, where the next step can read its input tokens.

On CUDA, if the attention kernels read their inputs from fixed buffers (`input_buffers`), a step is
padded to one of a few sizes. Each size is recorded once as a CUDA graph and then replayed, so one
launch replaces hundreds. Otherwise steps run without padding and without graphs.

Shapes: P lines including padding, R real lines, M maximum number of blocks of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.interface import AttentionBackend, KVSlots, StepAttention
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.models.decoder import Decoder
from baton_engine.runner.batch_layout import Ints
from baton_engine.runner.input_batch import Batch, BlockTables
from baton_engine.runner.input_buffers import (
    Inputs,
    Staging,
    fill,
    inputs_in,
    inputs_size,
    pad,
    staging_for,
)
from baton_engine.sampling.metadata import Draws
from baton_protocol.ids import BlockId

PADDING = Row([0], 0, [BlockId(0)])


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes in lines that steps are padded to, ascending. Small sizes are close together, because
    padding costs most there. The largest is `max_num_seqs`, so every step fits."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class Recorder(Protocol):
    def run(self, size: int, compute: Callable[[], None]) -> None:
        """Run `compute` for a step of `size` lines. `compute` must use the same memory in every
        step of that size."""
        ...


class NoGraphs:
    """A Recorder without graphs: calls `compute`."""

    def run(self, size: int, compute: Callable[[], None]) -> None:
        compute()


class Graphs:
    """Records each size as a CUDA graph the first time it runs, and replays it afterwards. All
    graphs share one memory pool, because no two run at the same time."""

    def __init__(self) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, size: int, compute: Callable[[], None]) -> None:
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
            return
        compute()  # compiles the kernels and does this step's work; recording computes nothing
        torch.cuda.synchronize()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are checked: transfer threads may copy KV during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            compute()
        self._graphs[size] = graph


@runtime_checkable
class StaticAttention(Protocol):
    """A backend that can attend over inputs in fixed buffers."""

    def over(
        self, slots_P: torch.Tensor, lengths_P: torch.Tensor, table_PM: torch.Tensor
    ) -> StepAttention:
        """Attention of P one-token rows: the slot of each row's KV (int64, -1: not stored), its
        number of tokens with the new one, and its blocks."""
        ...


class LazyAttention:
    """Calls `begin` at the first use by a layer, so the rows are laid out for attention only if a
    layer needs it."""

    def __init__(self, begin: Callable[[], StepAttention]) -> None:
        self._begin = begin
        self._step: StepAttention | None = None

    def _begun(self) -> StepAttention:
        if self._step is None:
            self._step = self._begin()
        return self._step

    def slots(self) -> KVSlots:
        return self._begun().slots()

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        stored: bool = False,
    ) -> torch.Tensor:
        return self._begun().attend(layer, q_TNH, k_TKH, v_TKH, stored=stored)


class DecodeSteps:
    """Runs plain decode steps.

    `sizes` are the numbers of lines that steps are padded to; () means no padding. `width` is M and
    is used only with a StaticAttention and sizes.
    """

    def __init__(
        self,
        model: Decoder,
        memory: TorchMemory,
        attention: AttentionBackend,
        *,
        sizes: Sequence[int] = (),
        width: int = 0,
        recorder: Recorder | None = None,
        make_staging: Callable[[int, torch.device], Staging] = staging_for,
    ) -> None:
        self.sizes = tuple(sizes)
        self._model = model
        self._clear = memory.clear
        self._attention = attention
        self._device = memory.pool.device
        self._static = attention if sizes and isinstance(attention, StaticAttention) else None
        self._width = width if self._static else 0
        self._recorder: Recorder = recorder or NoGraphs()
        self._make_staging = make_staging
        self._prepared: dict[int, tuple[Inputs[torch.Tensor], StepAttention | None]] = {}
        self._make_room(max(self.sizes, default=1))

    def fit(self, rows: int) -> bool:
        return not self.sizes or rows <= self.sizes[-1]

    def run(
        self, batch: Batch, after_R: Ints | None, tables: BlockTables, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Run a step and return its ids by line (int64 on the device). The first R are real, and
        the next step overwrites them.

        `sampled` has the ids of the previous step; `after_R` has indexes into it.
        """
        lines = self._lines_for(len(batch.rows))
        host = inputs_in(self._staging.next(), lines, self._width)
        fill(host, batch, after_R, tables if self._static else None)
        inputs = self._send(lines)
        if batch.begun and self._static is None:
            self._clear(batch.begun)
        waits = after_R is not None
        if waits and sampled is not self._ids:
            inputs.tokens_P.copy_(_with_sampled(inputs, sampled))
            inputs.after_P.fill_(-1)
        self._compute(host, lines, batch.rows, filtered=batch.filtered, waits=waits)
        return self._ids

    def warm(self, size: int) -> None:
        """Run, and thereby record, a step of `size` padding lines. Overwrites the ids that the last
        step sampled."""
        host = inputs_in(self._staging.next(), size, self._width)
        pad(host, 0)
        self._send(size)
        self._compute(host, size, [], filtered=True, waits=True)

    def _lines_for(self, rows: int) -> int:
        lines = next((size for size in self.sizes if size >= rows), rows)
        if lines > len(self._ids):
            self._make_room(lines)
        return lines

    def _send(self, lines: int) -> Inputs[torch.Tensor]:
        self._staging.send(inputs_size(lines, self._width))
        return self._prepare(lines)[0]

    def _compute(
        self,
        host: Inputs[npt.NDArray[Any]],
        lines: int,
        rows: Sequence[Row],
        *,
        filtered: bool,
        waits: bool,
    ) -> None:
        """Compute a step from the inputs on the device. With padding, all steps of a size do the
        same work, as a recorded graph requires."""
        inputs, attention = self._prepare(lines)
        step = attention or LazyAttention(
            lambda: self._attention.begin([*rows, *[PADDING] * (lines - len(rows))])
        )
        padded = bool(self.sizes)
        columns_6P = host.columns_6P.view(np.uint32)
        draws = Draws(columns_6P, inputs.columns_6P, filtered or padded)

        def compute() -> None:
            tokens_P = _with_sampled(inputs, self._ids) if waits or padded else inputs.tokens_P
            hidden_PD = self._model.forward(tokens_P, inputs.positions_P, step)
            ids_P = self._model.ops.draw(self._model.logits(hidden_PD), draws)
            self._ids[: len(ids_P)].copy_(ids_P)

        self._recorder.run(lines, compute)

    def _prepare(self, lines: int) -> tuple[Inputs[torch.Tensor], StepAttention | None]:
        found = self._prepared.get(lines)
        if found is None:
            inputs = inputs_in(self._staging.buffer, lines, self._width)
            step = None
            if self._static is not None:
                step = self._static.over(inputs.slots_P, inputs.lengths_P, inputs.table_PM)
            found = self._prepared[lines] = inputs, step
        return found

    def _make_room(self, lines: int) -> None:
        """Allocate buffers for steps of at least `lines` lines. Must not be called once a graph is
        recorded, because graphs hold the addresses of the buffers."""
        lines = max(lines, max(self.sizes, default=2 * lines))
        self._staging = self._make_staging(inputs_size(lines, self._width), self._device)
        self._ids = torch.zeros(lines, dtype=torch.int64, device=self._device)
        self._prepared.clear()


def _with_sampled(inputs: Inputs[torch.Tensor], sampled: torch.Tensor) -> torch.Tensor:
    """The step's tokens [P], with the awaited ones taken from the previous step's samples."""
    found_P = sampled.index_select(0, inputs.after_P.clamp(min=0))
    return torch.where(inputs.after_P >= 0, found_P, inputs.tokens_P)


def decode_steps(
    model: Decoder,
    memory: TorchMemory,
    attention: AttentionBackend,
    *,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool = False,
) -> DecodeSteps:
    """DecodeSteps with CUDA graphs if the device is CUDA and the backend is a StaticAttention,
    unless `enforce_eager`."""
    able = memory.pool.device.type == "cuda" and isinstance(attention, StaticAttention)
    if enforce_eager or not able:
        return DecodeSteps(model, memory, attention)
    return DecodeSteps(
        *(model, memory, attention),
        sizes=buckets(max_num_seqs),
        width=-(-max_model_len // memory.layout.block_size),
        recorder=Graphs(),
    )
