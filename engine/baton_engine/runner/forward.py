"""The forward pass of a step, from its input to hidden states.

In: a StepInput. Out: the hidden states of its tokens. Sampling comes after it and is never part of
a graph, so the parameters of one request do not change how a step is computed.

On CUDA, a step of one-token rows is padded to one of a few sizes. Each size is recorded once as a
CUDA graph and then replayed, so one launch replaces hundreds. This needs an attention backend that
reads its inputs from buffers with fixed addresses (`recordable`). Steps with longer rows, and all
steps on other backends, run without padding and without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from baton_engine.attention.interface import AttentionBackend, StepArrays, StepBatch
from baton_engine.config.buckets import buckets
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.models.decoder import Decoder
from baton_engine.runner.input_batch import HostArrays, StepInput
from baton_engine.runner.input_buffers import (
    Staging,
    StepShape,
    fill,
    pad,
    staging_for,
    to_device,
)

Compute = Callable[[], torch.Tensor]


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
        found = self._graphs.get(size)
        if found is not None:
            graph, result = found
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

    `sizes` are the numbers of lines that steps of one-token rows are padded to; () means no
    padding. `width` is the maximum number of blocks of a row and is used only with sizes.
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
        self._recorder: Recorder = recorder or NoGraphs()
        self._limit = width * memory.layout.block_size
        groups = memory.layout.num_groups
        self._shapes = {size: StepShape(size, size, width, groups) for size in self.sizes}
        self._inputs: dict[int, StepArrays[torch.Tensor]] = {}
        if sizes:
            self._staging = make_staging(self._shapes[self.sizes[-1]].size, self._device)
            for size, shape in self._shapes.items():
                self._inputs[size] = shape.arrays_in(self._staging.buffer)

    def run(self, step: StepInput, sampled: torch.Tensor) -> torch.Tensor:
        """The hidden states of the step's tokens, [T, D] or more. `sampled` has the ids of the
        previous step."""
        if step.begun and not self._attention.recordable:
            # Attention reads the rest of these blocks with a weight of 0. NaN of an earlier request
            # would survive that.
            self._clear(step.begun)
        if self.sizes and step.max_query_len == 1 and len(step.rows) <= self.sizes[-1]:
            return self._padded(step, sampled)
        device = to_device(step.arrays, self._device)
        tokens_T = _with_sampled(device, sampled) if step.awaits else device.tokens_T
        batch = StepBatch(step.arrays, device, step.max_query_len, step.max_seq_len)
        return self._model.forward(tokens_T, device.positions_T, self._attention.begin(batch))

    def _padded(self, step: StepInput, sampled: torch.Tensor) -> torch.Tensor:
        size = next(size for size in self.sizes if size >= len(step.rows))
        host = self._shapes[size].arrays_in(self._staging.next())
        fill(host, step.arrays)
        inputs = self._send(size)
        if step.awaits:
            inputs.tokens_T.copy_(_with_sampled(inputs, sampled))
        return self._compute(size, host)

    def _send(self, size: int) -> StepArrays[torch.Tensor]:
        self._staging.send(self._shapes[size].size)
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
        self._send(size)
        self._compute(size, host)


def _with_sampled(arrays: StepArrays[torch.Tensor], sampled: torch.Tensor) -> torch.Tensor:
    """The step's tokens [T], with the awaited ones taken from the previous step's samples."""
    found_T = sampled.index_select(0, arrays.awaits_T.clamp(min=0))
    return torch.where(arrays.awaits_T >= 0, found_T, arrays.tokens_T).to(arrays.tokens_T.dtype)


def forward_steps(
    model: Decoder,
    memory: TorchMemory,
    attention: AttentionBackend,
    *,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool = False,
) -> Forward:
    """Forward with CUDA graphs if the device is CUDA and the backend can be recorded, unless
    `enforce_eager`."""
    able = memory.pool.device.type == "cuda" and attention.recordable
    if enforce_eager or not able:
        return Forward(model, memory, attention)
    return Forward(
        *(model, memory, attention),
        sizes=buckets(max_num_seqs),
        width=-(-max_model_len // memory.layout.block_size),
        recorder=Graphs(),
    )
