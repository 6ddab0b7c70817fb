"""TorchRunner: computes one step of rows on real weights (interface.Runner).

In: rows of tokens with their blocks. Out: sampled ids, and prompt logprobs for rows that ask for
them; the rows' KV is written to the pool. Results are in the order of the call.

A step is the same for prompts and decoding sequences: its input as arrays (`input_batch`), the
forward pass (`forward`), logits of the positions that are sampled, and samples. A row may have
samples after several of its tokens.

On CUDA a launch does not wait for the device. Sampled ids stay on the device, where the next step
reads them, and results are copied to the host after the step.

Rows of a pooling model have no samples: their answers are the numbers of their last tokens.

Shapes: T tokens of the step, D hidden size, S samples, N positions of prompts, V vocabulary, P rows
that ask for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from baton_engine.attention.interface import AttentionBackend
from baton_engine.config.engine_config import LogprobsMode
from baton_engine.config.step_sizes import PROMPT_ROWS
from baton_engine.errors import OutOfMemory
from baton_engine.interface import ComputedStep, Launched, Row, RowResult, Sampled
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage
from baton_engine.models.model import Model
from baton_engine.runner.forward import Forward
from baton_engine.runner.input_batch import InputBatch, StepInput
from baton_engine.sampling.logprobs import Logprobs, logprobs_of
from baton_engine.sampling.metadata import Draws
from baton_engine.sampling.sampler import ChosenTokens, choose
from baton_engine.vectors import answer_of
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.request import PositionLogprobs

# Times that a step is tried while the device lacks memory for it.
LAUNCHES = 2


class HiddenTap(Protocol):
    def take(self, step: StepInput, hidden_TC: torch.Tensor) -> None:
        """Called after each step with its input and the hidden states of its tokens, of which there
        may be more. They are valid until the next step. If a launch failed, the step comes
        again."""
        ...


def tried_twice(launch: Callable[[], Launched]) -> Launched:
    """Launch a step, again if the device lacks memory for it. Raises OutOfMemory."""
    why = ""
    for _ in range(LAUNCHES):
        try:
            return launch()
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
        # The error is gone here, and with it the tensors of the step.
        torch.cuda.empty_cache()
    raise OutOfMemory(why)


class TorchRunner:
    def __init__(
        self,
        model: Model,
        memory: TorchMemory,
        attention: AttentionBackend,
        forward: Forward | None = None,
    ) -> None:
        """The default `forward` has no padding and no CUDA graphs."""
        self.memory = memory
        self.tap: HiddenTap | None = None
        self.logprobs_mode: LogprobsMode = "raw_logprobs"
        self._model = model
        self._attention = attention
        self._device = memory.pool.device
        self._forward = forward or Forward(model, memory, attention)
        self._batch = InputBatch(memory.layout)
        # Ids that the last step sampled, and the index in them of sample i of the call.
        self._sampled = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._place_of = np.zeros(0, np.int64)

    @property
    def exact(self) -> bool:
        """Whether the bits of a token's logits depend only on the tokens before it."""
        return bool(self._model.bits) and self._attention.exact

    @property
    def buckets(self) -> Sequence[int]:
        """Sizes of the decode steps that are padded and recorded; () if none are."""
        return self._forward.sizes

    @torch.inference_mode()
    def warm(self, bucket: int) -> None:
        """Record the decode step of this size. Changes no KV of any request."""
        self._forward.warm(bucket)

    @torch.inference_mode()
    def warm_eager(self) -> None:
        """Compile the kernels of steps that are not recorded. Changes no KV of any request."""
        self._forward.warm_eager()

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launched:
        """Raises OutOfMemory if the device lacks memory for the step, also after torch has given
        back what it keeps for later. Nothing has changed then."""
        return tried_twice(lambda: self._launch(rows))

    def _launch(self, rows: Sequence[Row]) -> Launched:
        step = self._batch.take(rows, self._place_of)
        hidden_TD = self._forward.run(step, self._sampled)
        chosen = self._sample(hidden_TD, step)
        prompts = self._score_prompts(hidden_TD, step)
        answers = self._answer(hidden_TD, step)
        read = None if chosen is None else chosen.to_host()
        results = StepResults(step, read, [part.to_host() for part in prompts], answers)
        pending = launched(results.read, self._device)
        if self.tap is not None:
            self.tap.take(step, hidden_TD)
        # Last, because the next step depends on these: a launch that fails must not change them.
        self._place_of = step.sampling.place_of_S
        if chosen is not None:
            self._sampled = chosen.ids_S
        return pending

    def _sample(self, hidden_TD: torch.Tensor, step: StepInput) -> ChosenTokens | None:
        """Sample for all rows at once, one token per sample; None if no row has a sample."""
        sampling = step.sampling
        if not sampling.samples:
            return None
        if sampling.one_each and step.max_query_len == 1:
            logits_SV = self._model.logits(hidden_TD[: len(step.rows)])
        else:
            # Several choices may share a position.
            at_P, row_of_S = np.unique(sampling.hidden_S, return_inverse=True)
            logits_SV = self._model.logits(hidden_TD[stage(at_P, self._device)])
            if len(at_P) < len(row_of_S):
                logits_SV = logits_SV[stage(row_of_S, self._device)]
        columns_6S = stage(sampling.columns_6S.view(np.int32), self._device)
        return choose(
            *(logits_SV, sampling.samples),
            Draws(sampling.columns_6S, columns_6S, sampling.filtered),
            self._model.ops.draw,
            changed=sampling.changed,
            asking=sampling.asking,
            mode=self.logprobs_mode,
        )

    def _answer(self, hidden_TD: torch.Tensor, step: StepInput) -> Answers | None:
        """A pooling model's answers to the rows that end with their request's last token."""
        asks = {line: row.pooling for line, row in enumerate(step.rows) if row.pooling is not None}
        if not asks:
            return None
        last_P = step.arrays.query_starts_R1[1:][list(asks)] - 1
        numbers = self._model.answers(hidden_TD[stage(last_P.astype(np.int64), self._device)])
        return Answers(self._model.config.pooling, asks, numbers.to("cpu", non_blocking=True))

    def _score_prompts(self, hidden_TD: torch.Tensor, step: StepInput) -> list[Logprobs]:
        """Prompt logprobs of the rows that ask for them, in parts of PROMPT_ROWS positions."""
        if not [row for row in step.rows if row.prompt is not None]:
            return []
        begins = step.arrays.query_starts_R1.tolist()
        asks = [
            (begin, row.prompt)
            for begin, row in zip(begins, step.rows, strict=False)
            if row.prompt is not None
        ]
        rows_N = np.concatenate([np.arange(at, at + len(ask.targets)) for at, ask in asks])
        targets_N = np.array([id for _, ask in asks for id in ask.targets])
        tops = [ask.top for _, ask in asks for _ in ask.targets]
        parts_read = []
        for start in range(0, len(tops), PROMPT_ROWS):
            part = slice(start, start + PROMPT_ROWS)
            logits_NV = self._model.logits(hidden_TD[stage(rows_N[part], self._device)])
            ids_N = stage(targets_N[part], self._device)
            parts_read.append(logprobs_of(logits_NV, ids_N, max(tops[part])))
        return parts_read


@dataclass(frozen=True, slots=True)
class Answers:
    """A pooling model's answers, by the line of the row that asks, while their numbers are being
    copied to the host."""

    pooling: Pooling
    asks: Mapping[int, PoolingParams]
    numbers_PN: torch.Tensor

    def read(self) -> dict[int, bytes]:
        rows = zip(self.asks.items(), self.numbers_PN.numpy(), strict=True)
        return {line: answer_of(row_N, self.pooling, params) for (line, params), row_N in rows}


@dataclass(frozen=True, slots=True)
class StepResults:
    """A step whose results are being copied to the host. `prompts` has one entry per PROMPT_ROWS
    prompt positions."""

    step: StepInput
    chosen: ChosenTokens | None
    prompts: Sequence[Logprobs]
    answers: Answers | None = None

    def read(self) -> list[RowResult]:
        """The results in the order of the call."""
        lines = self.step.line_of_R.tolist()
        sampling, tokens = self.step.sampling, [] if self.chosen is None else self.chosen.read()
        if sampling.one_each and not self.prompts:
            return [RowResult((tokens[line],)) for line in lines]
        by_line = list(self._by_line(tokens))
        return [by_line[line] for line in lines]

    def _by_line(self, tokens: Sequence[Sampled]) -> Iterator[RowResult]:
        sampled, expected = iter(tokens), iter(self._expected())
        vectors = {} if self.answers is None else self.answers.read()
        for line, row in enumerate(self.step.rows):
            samples = tuple(islice(sampled, len(row.samples)))
            targets = () if row.prompt is None else row.prompt.targets
            prompt = tuple(islice(expected, len(targets)))
            yield RowResult(samples, prompt, vectors.get(line, b""))

    def _expected(self) -> list[PositionLogprobs]:
        asks = [row.prompt for row in self.step.rows if row.prompt is not None]
        targets = [id for ask in asks for id in ask.targets]
        tops = [ask.top for ask in asks for _ in ask.targets]
        logprobs: list[PositionLogprobs] = []
        for number, part_logprobs in enumerate(self.prompts):
            part = slice(number * PROMPT_ROWS, (number + 1) * PROMPT_ROWS)
            logprobs += part_logprobs.read(targets[part], tops[part])
        return logprobs


class PendingStep:
    """A step in flight on CUDA. read() waits until the work queued so far on the stream is done,
    then calls `finish`."""

    def __init__(self, finish: Callable[[], list[RowResult]], device: torch.device) -> None:
        self._finish = finish
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(device))

    def read(self) -> list[RowResult]:
        self._done.synchronize()
        return self._finish()


def launched(finish: Callable[[], list[RowResult]], device: torch.device) -> Launched:
    """The handle of a launched step. On a CPU the step is already computed, so its results are read
    at once, before the next step reuses the memory."""
    return ComputedStep(finish()) if device.type == "cpu" else PendingStep(finish, device)
