"""The forward pass of a step, from its input to hidden states.

In: a StepInput. Out: the hidden states of its tokens. Sampling comes after it and is never part of
a graph, so the parameters of one request do not change how a step is computed.

On CUDA, the one-token lines of a step (see `lines`) are padded to one of a few sizes. Each size is
recorded once as a CUDA graph and then replayed, so one launch replaces hundreds. This needs an
attention backend that reads its inputs from buffers with fixed addresses (`recordable`). Longer
rows are a second pass of the model, without padding and without a graph. All rows of steps on other
backends are one such pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from baton_engine.attention.interface import AttentionBackend, StepArrays, StepBatch
from baton_engine.config.buckets import SHORT_ROW, buckets
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.models.model import Model
from baton_engine.runner.input_batch import HostArrays, StepInput
from baton_engine.runner.input_buffers import StepShape, idle, pad, to_device
from baton_engine.runner.lines import Lines, divide
from baton_engine.runner.staging_buffers import Staging, staging_for

Compute = Callable[[], torch.Tensor]
# The rows of a step: each one's numbers of new and of all tokens.
Lengths = Sequence[tuple[int, int]]


class Recorder(Protocol):
    def run(self, size: int, compute: Compute) -> torch.Tensor:
        """The result of `compute` for a step of `size` lines, valid until the next step.
        `compute` must use the same memory in every step of that size."""
        ...


class NoGraphs:
    """A Recorder without graphs: calls `compute`."""

    def run(self, size: int, compute: Compute) -> torch.Tensor:
        return compute()


class Graphs:
    """Records each size as a CUDA graph the first time it runs, and replays it afterwards. All
    graphs share one memory pool, because no two run at the same time."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def run(self, size: int, compute: Compute) -> torch.Tensor:
        recorded = self._graphs.get(size)
        if recorded is not None:
            graph, result = recorded
            graph.replay()
            return result
        # Compiles the kernels and does this step's work; recording computes nothing. The copy stays
        # valid while the size is recorded.
        done = compute().clone()
        torch.cuda.synchronize()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are checked: transfer threads may copy KV during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = compute()
        self._graphs[size] = graph, result
        return done


class Forward:
    """Computes the forward pass of steps.

    `sizes` are the numbers of lines that steps are padded to; () means that all rows of a step are
    one pass. `width` is the maximum number of blocks of a row and is used only with sizes. `eager`
    are the steps that warm_eager() runs.
    """

    def __init__(
        self,
        model: Model,
        memory: TorchMemory,
        attention: AttentionBackend,
        *,
        sizes: Sequence[int] = (),
        width: int = 0,
        eager: Sequence[Lengths] = (),
        recorder: Recorder | None = None,
        make_staging: Callable[[int, torch.device], Staging] = staging_for,
    ) -> None:
        self.sizes = tuple(sizes)
        self._eager_steps = eager
        self._model = model
        self._clear = memory.clear
        self._attention = attention
        self._device = memory.pool.device
        self._recorder: Recorder = recorder or NoGraphs()
        self._block_size, self._groups = memory.layout.block_size, memory.layout.num_groups
        self._limit = width * self._block_size
        self._shapes = {size: StepShape(size, size, width, self._groups) for size in self.sizes}
        self._inputs: dict[int, StepArrays[torch.Tensor]] = {}
        if sizes:
            self._staging = make_staging(self._shapes[self.sizes[-1]].size, self._device)
            for size, shape in self._shapes.items():
                self._inputs[size] = shape.arrays_in(self._staging.buffer)

    def run(self, step: StepInput, sampled: torch.Tensor) -> torch.Tensor:
        """The hidden states of the step's tokens, [T, D] or more. `sampled` has the ids of the
        previous step (int64)."""
        if step.begun and not self._attention.recordable:
            # Attention reads the rest of these blocks with a weight of 0. NaN of an earlier request
            # would survive that.
            self._clear(step.begun)
        awaited = sampled if step.awaits else None
        if not self.sizes:
            return self._eager(step.arrays, awaited)
        lines, rest = divide(step, self.sizes[-1], self._block_size)
        if lines is None:
            return self._eager(step.arrays, awaited)
        hidden_LD = self._padded(lines, awaited)
        if rest is None:
            return hidden_LD
        # Second, so that the device computes the lines while the host launches this pass.
        return torch.cat((hidden_LD[: len(lines)], self._eager(rest, awaited)))

    def _eager(self, arrays: HostArrays, awaited: torch.Tensor | None) -> torch.Tensor:
        device = to_device(arrays, self._device)
        if awaited is not None:
            self._model.ops.put_sampled(device.tokens_T, device.awaits_T, awaited)
        longest = int(np.diff(arrays.query_starts_R1).max()), int(arrays.seq_lens_R.max())
        attention = self._attention.begin(StepBatch(arrays, device, *longest))
        return self._model.forward(device.tokens_T, device.positions_T, attention)

    def _padded(self, lines: Lines, awaited: torch.Tensor | None) -> torch.Tensor:
        size = next(size for size in self.sizes if size >= len(lines))
        host = self._shapes[size].arrays_in(self._staging.next())
        lines.fill(host)
        inputs = self._send(size, lines.arrays.groups[0].table_RM.shape[1])
        if awaited is not None:
            self._model.ops.put_sampled(inputs.tokens_T, inputs.awaits_T, awaited)
        return self._compute(size, host)

    def _send(self, size: int, width: int) -> StepArrays[torch.Tensor]:
        """Send the inputs of a step of `size` lines, of which the longest has `width` blocks."""
        self._staging.send(self._shapes[size].used(width))
        return self._inputs[size]

    def _compute(self, size: int, host: HostArrays) -> torch.Tensor:
        inputs = self._inputs[size]

        def compute() -> torch.Tensor:
            step = self._attention.begin(StepBatch(host, inputs, 1, self._limit))
            return self._model.forward(inputs.tokens_T, inputs.positions_T, step)

        return self._recorder.run(size, compute)

    def warm(self, size: int) -> None:
        """Run, and thereby record, a step of `size` padding lines."""
        host = self._shapes[size].arrays_in(self._staging.next())
        pad(host, 0)
        self._send(size, 1)
        self._compute(size, host)

    def warm_eager(self) -> None:
        """Compile every kernel that steps without a graph may need, by running some."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        for rows in self._eager_steps:
            self._eager(idle(rows, self._block_size, self._groups), nothing)


def eager_steps(max_model_len: int, *, graphs: bool) -> list[Lengths]:
    """Steps of which one or another launches each variant of a kernel that steps without a graph
    need, up to this length. Beside graphs these have no one-token row. Without graphs they do, and
    the number of programs for the keys of such a row follows from the step's longest row and is
    largest for few rows."""
    several = min(max_model_len, SHORT_ROW + 1)
    steps: list[Lengths] = [[(several, several)]]
    if not graphs:
        lengths = [1 << power for power in range(max_model_len.bit_length())]
        for length in (*lengths, max_model_len):
            steps += [(1, length)], [(1, length), (several, several)]
    return steps


def forward_steps(
    model: Model,
    memory: TorchMemory,
    attention: AttentionBackend,
    *,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool = False,
) -> Forward:
    """Forward with CUDA graphs if the device is CUDA and the backend can be recorded, unless
    `enforce_eager`."""
    width = -(-max_model_len // memory.layout.block_size)
    if memory.pool.device.type == "cuda":
        model.keep_rope(width * memory.layout.block_size)
    if memory.pool.device.type != "cuda" or not attention.recordable:
        return Forward(model, memory, attention)
    eager = eager_steps(max_model_len, graphs=not enforce_eager)
    if enforce_eager:
        return Forward(model, memory, attention, eager=eager)
    return Forward(
        *(model, memory, attention),
        sizes=buckets(max_num_seqs),
        width=width,
        eager=eager,
        recorder=Graphs(),
    )
