"""The parts of `make gpu`, in the order of what they tell.

A part is a module with `run(findings)`. It runs in a process of its own, and writes what it finds
at once (see `findings`). Later parts refer to what `card` measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`seconds` is what the part needs on a card; the time that is left is shared out in proportion
    to it. `tells` is what the part is for, in a few words."""

    name: str
    module: str
    seconds: float
    tells: str


CARD = "card"
PARTS = (
    Part(
        name=CARD,
        module="benchmarks.gpu.card",
        seconds=20,
        tells="what this card can do: the bounds that later shares refer to",
    ),
    Part(
        name="kernels",
        module="benchmarks.gpu.kernels",
        seconds=90,
        tells="each kernel beside its torch twin, and its share of the bound",
    ),
    Part(
        name="tests",
        module="benchmarks.gpu.marked_tests",
        seconds=70,
        tells="the tests of kernels, and all tests that are marked `gpu`",
    ),
    Part(
        name="answers",
        module="benchmarks.gpu.answers",
        seconds=105,
        tells="whether all paths of the engine give the same ids as transformers",
    ),
    Part(
        name="speed",
        module="benchmarks.gpu.speed",
        seconds=180,
        tells="tokens per second beside transformers, steps, start-up, KV transfers",
    ),
    Part(
        name="ablations",
        module="benchmarks.gpu.ablations",
        seconds=75,
        tells="what graphs, overlap and sizes are worth",
    ),
)
