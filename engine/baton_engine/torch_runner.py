"""TorchRunner: computes one step of mixed rows on real weights (api.Runner).

In: rows of tokens with their blocks. Out: samples, and how likely prompts are where that is asked;
the rows' KV stands in the pool. Rows are laid out one-token rows first, by length, so that the
attention backend finds those of similar length side by side; results are returned in the order of
the call.

Shapes: T tokens of the step, D hidden size, S sampled rows, N rows of prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.api import Ready, Row, RowResult, Sample, Sampled
from baton_engine.attention import AttentionBackend
from baton_engine.logprobs import position_logprobs
from baton_engine.models.decoder import Decoder
from baton_engine.sampling import sample
from baton_engine.torch_memory import TorchMemory, stage
from baton_protocol.ids import BlockId
from baton_protocol.request import PositionLogprobs

# Prompt positions whose logits exist at one time: 128 rows of 150,000 floats are 77 MB.
PROMPT_ROWS = 128

Indices = npt.NDArray[np.int64]


class TorchRunner:
    def __init__(self, model: Decoder, memory: TorchMemory, attention: AttentionBackend) -> None:
        self.memory = memory
        self._clear = memory.clear
        self._model = model
        self._attention = attention
        self._device = memory.pool.device
        self._block_size = memory.layout.block_size

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Ready:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, -rows[i].start, i))
        laid_out = [rows[index] for index in order]
        started = [block for row in laid_out for block in self._started_block(row)]
        if started:
            self._clear(started)
        hidden_TD = self._forward(laid_out)
        ends = np.cumsum([len(row.tokens) for row in laid_out])
        sampled = self._sample(hidden_TD, laid_out, ends)
        prompts = self._expect(hidden_TD, laid_out, ends)
        if not sampled and self._device.type != "cpu":
            torch.cuda.synchronize(self._device)  # a caller may read the KV now
        results = [RowResult()] * len(rows)
        for place, index in enumerate(order):
            results[index] = RowResult(sampled.get(place, ()), prompts.get(place, ()))
        return Ready(results)

    def _sample(
        self, hidden_TD: torch.Tensor, rows: Sequence[Row], ends: Indices
    ) -> dict[int, tuple[Sampled, ...]]:
        """Samples of the rows that ask for some, by their place."""
        places = [place for place, row in enumerate(rows) if row.samples]
        if not places:
            return {}
        logits_SV = self._model.logits(hidden_TD[stage(ends[places] - 1, self._device)])
        groups = self._sample_groups(logits_SV, [rows[place].samples for place in places])
        return dict(zip(places, groups, strict=True))

    def _expect(
        self, hidden_TD: torch.Tensor, rows: Sequence[Row], ends: Indices
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        """How likely the prompts of the rows that ask are, by their place. Only their logits are
        computed, and not all at a time."""
        asks = {place: row.prompt for place, row in enumerate(rows) if row.prompt is not None}
        if not asks:
            return {}
        begins = [int(ends[place]) - len(rows[place].tokens) for place in asks]
        parts = zip(begins, asks.values(), strict=True)
        rows_N = np.concatenate([np.arange(at, at + len(ask.targets)) for at, ask in parts])
        targets = [id for ask in asks.values() for id in ask.targets]
        tops = [ask.top for ask in asks.values() for _ in ask.targets]
        found: list[PositionLogprobs] = []
        for start in range(0, len(targets), PROMPT_ROWS):
            part = slice(start, start + PROMPT_ROWS)
            logits_NV = self._model.logits(hidden_TD[stage(rows_N[part], self._device)])
            found += position_logprobs(logits_NV, targets[part], tops[part])
        rest = iter(found)
        return {place: tuple(islice(rest, len(ask.targets))) for place, ask in asks.items()}

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        tokens_T = np.concatenate([np.asarray(row.tokens, np.int64) for row in rows])
        positions_T = np.concatenate(
            [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        )
        return self._model.forward(
            stage(tokens_T, self._device),
            stage(positions_T, self._device),
            self._attention.begin(rows),
        )

    def _sample_groups(
        self, logits_SV: torch.Tensor, groups: Sequence[tuple[Sample, ...]]
    ) -> list[tuple[Sampled, ...]]:
        """Sample all rows at once; a row gives as many tokens as it has samples."""
        row_of = [row for row, group in enumerate(groups) for _ in group]
        samples = [each for group in groups for each in group]
        tokens = sample(logits_SV, row_of, samples, self._model.ops.choose)
        parts, begin = [], 0
        for group in groups:
            parts.append(tuple(tokens[begin : begin + len(group)]))
            begin += len(group)
        return parts

    def _started_block(self, row: Row) -> tuple[BlockId, ...]:
        """The block that this row begins to fill and leaves partly empty, if there is one. Its rest
        is read under a mask, and a NaN left there by somebody else would survive a zero weight."""
        end = row.start + len(row.tokens)
        index = (end - 1) // self._block_size
        begins_here = index * self._block_size >= row.start
        return (row.blocks[index],) if begins_here and end % self._block_size else ()
