"""How long the same answers would take in static batches, to compare with continuous batching.

In: the number of tokens of each answer, in the order of the requests, and the size of a batch. Out:
for each batch when it begins and ends, counted in steps of one token per sequence. A batch begins
when the one before has ended, and all its answers return together, at the end of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """The batch whose first step is `begin`, with the lengths of its answers."""

    begin: int
    outputs: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + max(self.outputs)

    @property
    def idle(self) -> tuple[int, ...]:
        """For each answer, the steps for which its slot is empty while the batch goes on."""
        return tuple(max(self.outputs) - each for each in self.outputs)


def static_batches(outputs: Sequence[int], size: int) -> list[StaticBatch]:
    batches: list[StaticBatch] = []
    for first in range(0, len(outputs), size):
        begin = batches[-1].end if batches else 0
        batches.append(StaticBatch(begin, tuple(outputs[first : first + size])))
    return batches


def useful_share(batches: Sequence[StaticBatch]) -> float:
    """The share of the batches' slots that compute a token."""
    slots = sum(len(batch.outputs) * max(batch.outputs) for batch in batches)
    return sum(sum(batch.outputs) for batch in batches) / slots
