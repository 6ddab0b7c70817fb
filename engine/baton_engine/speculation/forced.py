"""A proposer of the tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """The tokens that a sequence's grammar allows alone; for other sequences, and where a grammar
    allows more than one, the drafts of `others`."""

    others: Proposer | None = None

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        drafts = [
            () if sequence.matcher is None else sequence.matcher.forced()[:length]
            for sequence, length in zip(sequences, most, strict=True)
        ]
        free = [place for place, ids in enumerate(drafts) if not ids]
        if self.others is not None and free:
            proposals = self.others.propose(
                [sequences[place] for place in free], [most[place] for place in free]
            )
            for place, ids in zip(free, proposals, strict=True):
                drafts[place] = ids
        return drafts

    def forget(self, sequence: Sequence) -> None:
        if self.others is not None:
            self.others.forget(sequence)
