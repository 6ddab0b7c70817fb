"""Whether a tree of drafts would yield more tokens per second than a chain.

In: how often each of a head's candidates is right at each position, and seconds of steps. Out: the
best chain and the best tree.

A draft of a tree is right if all candidates on the way to it are. With q(d, r) as the share of
cases in which candidate r of position d is the next token, given that all before it are right, and
the same at each branch:

    chance of a draft = q(1, r1) q(2, r2) ... q(d, rd)
    tokens of a step  = 1 + sum of the chances of its drafts
    seconds of a step = target's step of 1 + N rows + D steps of the head

for N drafts, of which the deepest are at position D. All drafts of one position take one step of
the head, as if its further rows were free, which favours trees. A chain has r = 1 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class StepSeconds:
    """`target[n]` are the seconds of a step of 1 + n rows, and `head` those of a draft."""

    target: Sequence[float]
    head: float


@dataclass(frozen=True)
class Shape:
    """Drafts of a step: how many, up to which position, and the expected tokens and seconds."""

    drafts: int
    depth: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.drafts} drafts up to position {self.depth}: {self.tokens:.2f} tokens in"
            f" {1e3 * self.seconds:.1f} ms, {self.speed:.0f} tokens/s"
        )


def best_chain(rates_DR: Sequence[Sequence[float]], seconds: StepSeconds) -> Shape:
    """The fastest chain, or no drafts at all."""
    return best_tree([rates[:1] for rates in rates_DR], seconds)


def best_tree(rates_DR: Sequence[Sequence[float]], seconds: StepSeconds) -> Shape:
    """The fastest tree of at most as many drafts as `seconds` has."""
    shapes = [
        shape for depth in range(len(rates_DR) + 1) for shape in _trees(rates_DR[:depth], seconds)
    ]
    return max(shapes, key=lambda shape: shape.speed)


def _trees(rates_DR: Sequence[Sequence[float]], seconds: StepSeconds) -> Iterator[Shape]:
    """The best tree of each size, with drafts up to the last of these positions: the drafts with
    the largest chances. A draft has no larger chance than the one before it, so they are a tree."""
    depth, tokens = len(rates_DR), 1.0
    drafts = [(-1.0, 0)]  # minus the chance, and the position, of those whose next ones may follow
    waiting: list[tuple[float, int]] = []
    for count, step in enumerate(seconds.target):
        yield Shape(count, depth, tokens, step + depth * seconds.head)
        for minus_chance, position in drafts:
            if position < depth:
                for rate in rates_DR[position]:
                    heappush(waiting, (minus_chance * rate, position + 1))
        if not waiting:
            return
        drafts = [heappop(waiting)]
        tokens -= drafts[0][0]
