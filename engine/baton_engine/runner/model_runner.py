"""TorchRunner: computes one step of mixed rows on real weights (interface.Runner).

In: rows of tokens with their blocks. Out: sampled ids, and prompt logprobs for rows that ask for
them; the rows' KV is written to the pool. A plain decode step uses persistent arrays
(`input_batch`, `cuda_graphs`); any other step builds its inputs from scratch. Results are in the
order of the call.

On CUDA a launch does not wait for the device. Sampled ids stay on the device, where the next step
reads them, and results are copied to the host after the step.

Shapes: T tokens of the step, D hidden size, S sampled rows, N rows of prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from baton_engine.attention.interface import AttentionBackend
from baton_engine.interface import Launched, PromptAsk, Row, RowResult
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage
from baton_engine.models.decoder import Decoder
from baton_engine.runner.batch_layout import Ints, Layout, after_of, launched, plain_results
from baton_engine.runner.cuda_graphs import DecodeSteps
from baton_engine.runner.input_batch import Batch, BatchArrays
from baton_engine.sampling.logprobs import Logprobs, logprobs_of
from baton_engine.sampling.sampler import ChosenTokens, begin_sample
from baton_protocol.request import PositionLogprobs

# Number of prompt positions whose logits exist at a time: 128 rows of 150,000 floats are 77 MB.
PROMPT_ROWS = 128


class TorchRunner:
    def __init__(
        self,
        model: Decoder,
        memory: TorchMemory,
        attention: AttentionBackend,
        steps: DecodeSteps | None = None,
    ) -> None:
        """`steps` computes plain decode steps; the default has no padding and no CUDA graphs."""
        self.memory = memory
        self._clear = memory.clear
        self._model = model
        self._attention = attention
        self._device = memory.pool.device
        self._block_size = memory.layout.block_size
        self._steps = steps or DecodeSteps(model, memory, attention)
        self._arrays = BatchArrays(memory.layout.block_size)
        # Ids that the last step sampled, and the index in them of sample i of the call.
        self._sampled = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._place_of = np.zeros(0, np.int64)

    @property
    def exact(self) -> bool:
        """Whether the bits of a token's logits depend only on the tokens before it."""
        return bool(self._model.bits) and self._attention.exact

    @property
    def buckets(self) -> Sequence[int]:
        """Sizes of the decode steps that are padded and recorded; () if none are."""
        return self._steps.sizes

    @torch.inference_mode()
    def warm(self, bucket: int) -> None:
        """Record the decode step of this size. Call before the first launch. Changes no KV of any
        request."""
        self._steps.warm(bucket)

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launched:
        batch = self._arrays.take(rows) if self._steps.fit(len(rows)) else None
        return self._launch_mixed(rows) if batch is None else self._launch_plain(batch)

    def _launch_plain(self, batch: Batch) -> Launched:
        lines_R = batch.line_of_R
        after_R = self._places(batch.after_R)
        self._sampled = self._steps.run(batch, after_R, self._arrays.tables, self._sampled)
        self._place_of = lines_R
        there = self._sampled[: len(lines_R)].to("cpu", non_blocking=True).numpy()
        return launched(lambda: plain_results(there[lines_R].tolist()), self._device)

    def _launch_mixed(self, rows: Sequence[Row]) -> Launched:
        layout = Layout.of(rows)
        begun = layout.begun(self._block_size)
        if begun:
            # Attention reads the rest of these blocks with a weight of 0. NaN of an earlier request
            # would survive that.
            self._clear(begun)
        hidden_TD = self._forward(layout)
        chosen = self._sample(hidden_TD, layout)
        prompts = self._expect(hidden_TD, layout)
        self._place_of = layout.sample_places()
        if chosen is not None:
            self._sampled = chosen.ids_S
        read = None if chosen is None else chosen.to_host()
        step = MixedStep(layout, read, [each.to_host() for each in prompts])
        return launched(step.results, self._device)

    def _forward(self, layout: Layout) -> torch.Tensor:
        tokens_T = stage(layout.tokens(), self._device)
        after_R = self._places(after_of([row.after for row in layout.rows]))
        if after_R is not None:
            waits_R = after_R >= 0
            found = self._sampled[stage(after_R[waits_R], self._device)]
            tokens_T[stage(layout.ends_R[waits_R] - 1, self._device)] = found
        positions_T = stage(layout.positions(), self._device)
        return self._model.forward(tokens_T, positions_T, self._attention.begin(layout.rows))

    def _places(self, after_R: Ints | None) -> Ints | None:
        """Indexes in `_sampled` of the samples that rows await; -1 for none."""
        if after_R is None:
            return None
        return np.where(after_R >= 0, self._place_of[after_R], -1)

    def _sample(self, hidden_TD: torch.Tensor, layout: Layout) -> ChosenTokens | None:
        """Sample for all rows at once, one token per sample; None if no row has a sample."""
        groups = [row.samples for row in layout.rows]
        places = [place for place, group in enumerate(groups) if group]
        if not places:
            return None
        logits_SV = self._model.logits(hidden_TD[stage(layout.ends_R[places] - 1, self._device)])
        row_of = [number for number, place in enumerate(places) for _ in groups[place]]
        samples = [sample for group in groups for sample in group]
        return begin_sample(logits_SV, row_of, samples, self._model.ops.draw)

    def _expect(self, hidden_TD: torch.Tensor, layout: Layout) -> list[Logprobs]:
        """Prompt logprobs of the rows that ask for them, in parts of PROMPT_ROWS positions."""
        rows, ends = layout.rows, layout.ends_R
        asks = {place: row.prompt for place, row in enumerate(rows) if row.prompt is not None}
        if not asks:
            return []
        begins = [int(ends[place]) - len(rows[place].tokens) for place in asks]
        parts = zip(begins, asks.values(), strict=True)
        rows_N = np.concatenate([np.arange(at, at + len(ask.targets)) for at, ask in parts])
        targets_N = np.array([id for ask in asks.values() for id in ask.targets])
        tops = [ask.top for ask in asks.values() for _ in ask.targets]
        found = []
        for start in range(0, len(tops), PROMPT_ROWS):
            part = slice(start, start + PROMPT_ROWS)
            logits_NV = self._model.logits(hidden_TD[stage(rows_N[part], self._device)])
            ids_N = stage(targets_N[part], self._device)
            found.append(logprobs_of(logits_NV, ids_N, max(tops[part])))
        return found


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A mixed step whose results are being copied to the host. `prompts` has one entry per
    PROMPT_ROWS prompt positions."""

    layout: Layout
    chosen: ChosenTokens | None
    prompts: Sequence[Logprobs]

    def results(self) -> list[RowResult]:
        sampled = iter(() if self.chosen is None else self.chosen.read())
        expected = iter(self._expected())
        results = [RowResult()] * len(self.layout.rows)
        for row, index in zip(self.layout.rows, self.layout.order, strict=True):
            samples = tuple(islice(sampled, len(row.samples)))
            targets = () if row.prompt is None else row.prompt.targets
            results[index] = RowResult(samples, tuple(islice(expected, len(targets))))
        return results

    def _expected(self) -> list[PositionLogprobs]:
        asks: list[PromptAsk] = [row.prompt for row in self.layout.rows if row.prompt is not None]
        targets = [id for ask in asks for id in ask.targets]
        tops = [ask.top for ask in asks for _ in ask.targets]
        found: list[PositionLogprobs] = []
        for number, each in enumerate(self.prompts):
            part = slice(number * PROMPT_ROWS, (number + 1) * PROMPT_ROWS)
            found += each.read(targets[part], tops[part])
        return found
