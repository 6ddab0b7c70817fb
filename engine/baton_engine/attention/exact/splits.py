"""Splits of keys: which blocks and keys they have, and which keys a query sees.

In: rows, positions and a window. Out: block tables of splits, masks, and attention weights by
split.

Shapes: R rows, M queries of a row (or rows of a product), S keys of a split, C splits, L = C S
keys, X matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.exact.pages import Positions, Table, Visible
from baton_engine.attention.interface import TableRow
from baton_engine.config.step_sizes import split_blocks
from baton_engine.cpu_kernels.softmax import SplitFactors, softmax_, split_weights_
from baton_engine.kv.staging import stage


class Splits:
    """The splits of all layers with the same `window` (see ModelConfig.windows)."""

    def __init__(self, block_size: int, window: int | None) -> None:
        self.blocks = split_blocks(block_size)
        self.keys = self.blocks * block_size
        self.window = window
        self._block_size = block_size

    def of(self, position: Any) -> Any:
        """The split of a position (an int or an array)."""
        return position // self.keys

    def lowest(self, position: Any) -> Any:
        """The first split of which the query at `position` (an int or an array) sees a key."""
        if self.window is None:
            return position * 0
        return np.maximum(0, position + 1 - self.window) // self.keys

    def hidden(self, queries: Positions, keys: Positions) -> Visible:
        """Whether each query does not see each key. Both are positions and broadcast."""
        hidden: Visible = keys > queries
        return hidden if self.window is None else hidden | (keys <= queries - self.window)

    def seen(self, queries: Positions, first: int) -> npt.NDArray[np.int64]:
        """The keys [begin, end) that each query sees, counted from split `first` on: [M, 2]."""
        begin = queries * 0 if self.window is None else queries + 1 - self.window
        return np.stack((begin, queries + 1), 1).clip(min=first * self.keys) - first * self.keys

    def table(self, rows: Sequence[TableRow], first: Sequence[int], count: int) -> Table:
        """The blocks of `count` splits of each row, from its split `first` on. Where a row has no
        block, the table has block 0, whose KV is finite."""
        table_RM = np.zeros((len(rows), count * self.blocks), np.int64)
        for line, (row, split) in enumerate(zip(rows, first, strict=True)):
            end = -(-(row.start + row.count) // self._block_size)
            begin = split * self.blocks
            used = row.blocks[begin : min(end, begin + table_RM.shape[1])]
            table_RM[line, : len(used)] = used
        return table_RM

    def weights(
        self,
        scores_XML: torch.Tensor,
        sinks_XM: torch.Tensor | None = None,
        factors: SplitFactors | None = None,
    ) -> torch.Tensor:
        """Attention weights [X, M, C, S] from the scores of all keys that each query sees, which
        are overwritten on a CPU. A query's sink is one more score, whose weight is left out. With
        `factors`, which are filled, they are weights by split (see cpu_kernels.softmax)."""
        if factors is not None:
            split_weights_(scores_XML, self.keys, factors)
        elif scores_XML.device.type == "cpu":
            softmax_(scores_XML.flatten(0, 1), None if sinks_XM is None else sinks_XM.flatten())
        elif sinks_XM is not None:
            scores_XML = torch.cat((scores_XML, sinks_XM[..., None]), -1).softmax(-1)[..., :-1]
        else:
            scores_XML = scores_XML.softmax(-1)
        return scores_XML.view(*scores_XML.shape[:2], -1, self.keys)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Keys that some queries do not see. `mask_XML` is True where a query does not see a key, and
    begins at key `first`. Its first two dimensions may be 1."""

    first: int
    mask_XML: torch.Tensor

    @classmethod
    def of(cls, hidden_XML: Visible, device: torch.device) -> Hidden | None:
        """None if every query sees every key."""
        some_L = hidden_XML.any((0, 1))
        if not some_L.any():
            return None
        first = int(some_L.argmax())
        return cls(first, stage(hidden_XML[:, :, first:], device))

    def hide(self, scores_XML: torch.Tensor) -> None:
        """Set the scores of hidden keys to -inf. Memory that no token has written may hold NaN, so
        scores are replaced, not added to."""
        scores_XML[:, :, self.first :].masked_fill_(self.mask_XML, -torch.inf)

    def clear(self, v_XLH: torch.Tensor, matrices: slice, keys: slice) -> None:
        """Set hidden values of some matrices to 0, for a range of `keys`: a weight of 0 does not
        remove NaN. `v_XLH` begins at the first of them. Only for matrices with one query each."""
        first = max(self.first, keys.start)
        some = slice(first - self.first, keys.stop - self.first)
        mask_XL1 = self.mask_XML[matrices, :, some].transpose(1, 2)
        v_XLH[:, first - keys.start : keys.stop - keys.start].masked_fill_(mask_XL1, 0.0)
