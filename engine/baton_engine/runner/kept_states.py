"""KeptStates: what heads need of positions whose KV of their own they have not computed.

In: the rows of each step of the target, and the states of their tokens. Out: per sequence the
states of its last positions. Positions that other nodes or other requests computed have none.

Rows belong to the same sequence as long as they have the same `blocks_id`, so a preempted sequence
begins again. One whose positions do not follow each other, because KV of some has landed, begins
again after the gap.

Shapes: T tokens of a step, D size of a state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np
import torch

from baton_engine.config.step_sizes import KEPT_POSITIONS
from baton_engine.interface import Row
from baton_engine.kv.staging import stage
from baton_engine.scheduling.sequence import Sequence

# In place of a token that is not known yet.
AWAITED = -1


class States:
    """The states of positions [begin, end), each as a row of a tensor, and their tokens, as far as
    these are known. `first` is a multiple of the block size: the context of the head begins there,
    and positions [first, done) have the head's KV. The head's KV of `named` spans has a name, or -1
    before the sequence was first asked for."""

    __slots__ = ("_places", "_tokens", "begin", "done", "first", "named")

    def __init__(self, first: int) -> None:
        self.first = self.begin = self.done = first
        self.named = -1
        self._places: list[tuple[torch.Tensor, int]] = []
        self._tokens: list[int] = []

    @property
    def end(self) -> int:
        return self.begin + len(self._places)

    def cut(self, start: int) -> None:
        """Forget positions from `start` on, which are computed again."""
        del self._places[max(0, start - self.begin) :]
        del self._tokens[max(0, start - self.begin) :]
        self.done = max(self.first, min(self.done, start))

    def drop(self, position: int) -> None:
        """Forget the positions before this one."""
        del self._places[: max(0, position - self.begin)]
        del self._tokens[: max(0, position - self.begin)]
        self.begin = max(self.begin, position)

    def add(self, states_TD: torch.Tensor, begin: int, tokens: Seq[int]) -> None:
        """The next positions have the rows of a tensor from `begin` on, and these tokens."""
        self._places += ((states_TD, row) for row in range(begin, begin + len(tokens)))
        self._tokens += tokens

    def tokens(self, begin: int, end: int) -> list[int]:
        """The tokens of these positions."""
        return self._tokens[max(0, begin - self.begin) : max(0, end - self.begin)]

    def pieces(self, begin: int, end: int) -> list[tuple[torch.Tensor, int]]:
        """The states of these positions."""
        return self._places[begin - self.begin : end - self.begin]


class KeptStates:
    """The States of each sequence, by the `blocks_id` of its rows; of at most `most` sequences,
    the least recently computed ones forgotten first."""

    def __init__(self, block_size: int, most: int) -> None:
        self._block_size = block_size
        self._most = most
        self._kept: OrderedDict[int, States] = OrderedDict()
        # The `blocks_id` under which each sequence was last asked for, by its key.
        self._last: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, sequence: Sequence) -> States | None:
        before = self._last.get(sequence.key)
        if before != sequence.blocks_id:
            if before is not None:
                self._kept.pop(before, None)
            self._last[sequence.key] = sequence.blocks_id
        return self._kept.get(sequence.blocks_id)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        for blocks_id in (self._last.pop(sequence.key, 0), sequence.blocks_id):
            self._kept.pop(blocks_id, None)

    def begin_row(self, row: Row) -> tuple[States, int]:
        """The sequence's states, without those of positions that the row computes, and the first
        position of the row whose state follows them: the end of the row if none does."""
        states = self._kept.get(row.blocks_id)
        if states is not None:
            states.cut(row.start)
            full = states.end - states.begin > KEPT_POSITIONS
            if full or max(row.start, states.first) > states.end:
                states = None
        if states is None:
            states = States(-(-row.start // self._block_size) * self._block_size)
            self._kept[row.blocks_id] = states
        self._kept.move_to_end(row.blocks_id)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        position = min(max(row.start, states.first), row.start + len(row.tokens))
        if states.end == states.begin and position < states.begin:
            states.begin = max(position, states.first)
        return states, position


def known_tokens(row: Row) -> int:
    """How many of the row's tokens are known. The others are drafts, or the last is awaited."""
    count = len(row.tokens)
    if row.awaited_sample is not None:
        return count - 1
    if row.samples:
        count -= row.samples[-1].position - row.samples[0].position
    return count


def gathered(pieces: Seq[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """The states of several positions, [T, D]. Neighbours in one tensor are copied at once."""
    parts: list[torch.Tensor] = []
    run: list[int] = []
    for number, (tensor_TD, row) in enumerate(pieces):
        run.append(row)
        if number + 1 == len(pieces) or pieces[number + 1][0] is not tensor_TD:
            parts.append(tensor_TD[stage(np.array(run), tensor_TD.device)])
            run = []
    return parts[0] if len(parts) == 1 else torch.cat(parts)
