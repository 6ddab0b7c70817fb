"""Proposers whose drafts are right as often as a test wants, or never."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_engine.scheduling.sequence import Sequence
from baton_engine.sim.model import mix
from baton_engine.speculation.draft_kv import DraftKV
from baton_engine.speculation.draft_model import DraftLimits, DraftModel
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.proposer import Proposer
from tests.support.engines.landing import sim

WRONG = 1  # an id that no test's answer has at the place where it is drafted


@dataclass(frozen=True)
class Guesses:
    """Drafts the known answer of each (request, choice); `right` of 10 drafts are right, and a
    draft after the answer's end is an id like any other."""

    answers: Mapping[tuple[str, int], Seq[int]]
    right: int = 10

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        return [
            self._after(sequence, length) for sequence, length in zip(sequences, most, strict=True)
        ]

    def _after(self, sequence: Sequence, length: int) -> list[int]:
        state, first = sequence.state, sequence.num_outputs
        answer = self.answers.get((state.request.id, sequence.choice), ())
        return [
            answer[place]
            if place < len(answer) and mix(state.arrival, sequence.choice, place) % 10 < self.right
            else WRONG
            for place in range(first, first + length)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class Fixed:
    """Always drafts the same ids, even more than it is asked for."""

    ids: Seq[int]

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        return [self.ids for _ in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def drafter(proposer: Proposer | None, most: int = 4, vocab_size: int = 259) -> Drafter:
    """A drafter that drafts at every step, whatever it costs."""
    return Drafter(proposer, most, vocab_size, adaptive=False)


def sim_draft_model(budget: int = 64, **changes: Any) -> DraftModel:
    """A draft model that samples what a sim engine with these changes does, as long as its own KV
    is right."""
    return draft_model_of(sim(**changes), budget)


def draft_model_of(second: EngineCore, budget: int = 64) -> DraftModel:
    """A draft model that computes with this engine's runner; the engine itself must not run."""
    info = second.info
    limits = DraftLimits(
        max_batched_tokens=budget, max_model_len=info.max_model_len, vocab_size=info.vocab_size
    )
    return DraftModel(second.runner, DraftKV(info.num_blocks, info.layout), limits)
