"""TorchRunner: computes one step of mixed rows on real weights (api.Runner).

In: rows of tokens with their blocks. Out: samples; the rows' KV stands in the pool. Rows are laid
out one-token rows first, by length, so that the attention backend finds those of similar length
side by side; results are returned in the order of the call.

Shapes: T tokens of the step, D hidden size, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_engine.api import KVMemory, Row, Sample, Sampled
from baton_engine.attention import AttentionBackend
from baton_engine.models.decoder import Decoder
from baton_engine.sampling import sample
from baton_engine.torch_memory import TorchMemory, stage
from baton_protocol.ids import BlockId


class TorchRunner:
    def __init__(self, model: Decoder, memory: TorchMemory, attention: AttentionBackend) -> None:
        self.memory: KVMemory = memory
        self._clear = memory.clear
        self._model = model
        self._attention = attention
        self._device = memory.pool.device
        self._block_size = memory.layout.block_size

    @torch.inference_mode()
    def execute(self, rows: Sequence[Row]) -> list[tuple[Sampled, ...]]:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, -rows[i].start, i))
        laid_out = [rows[index] for index in order]
        started = [block for row in laid_out for block in self._started_block(row)]
        if started:
            self._clear(started)
        hidden_TD = self._forward(laid_out)
        results: list[tuple[Sampled, ...]] = [()] * len(rows)
        ends = np.cumsum([len(row.tokens) for row in laid_out])
        sampled = [place for place, row in enumerate(laid_out) if row.samples]
        if sampled:
            last_S = stage(ends[sampled] - 1, self._device)
            logits_SV = self._model.logits(hidden_TD[last_S])
            groups = [laid_out[place].samples for place in sampled]
            for place, group in zip(sampled, _sample_groups(logits_SV, groups), strict=True):
                results[order[place]] = group
        elif self._device.type != "cpu":
            torch.cuda.synchronize(self._device)  # a caller may read the KV now
        return results

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

    def _started_block(self, row: Row) -> tuple[BlockId, ...]:
        """The block that this row begins to fill and leaves partly empty, if there is one. Its rest
        is read under a mask, and a NaN left there by somebody else would survive a zero weight."""
        end = row.start + len(row.tokens)
        index = (end - 1) // self._block_size
        begins_here = index * self._block_size >= row.start
        return (row.blocks[index],) if begins_here and end % self._block_size else ()


def _sample_groups(
    logits_SV: torch.Tensor, groups: Sequence[tuple[Sample, ...]]
) -> list[tuple[Sampled, ...]]:
    """Sample all rows at once; a row gives as many tokens as it has samples."""
    row_of = [row for row, group in enumerate(groups) for _ in group]
    tokens = sample(logits_SV, row_of, [each for group in groups for each in group])
    parts, begin = [], 0
    for group in groups:
        parts.append(tuple(tokens[begin : begin + len(group)]))
        begin += len(group)
    return parts
