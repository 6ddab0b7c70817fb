"""The Protocol of a proposer of drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from baton_engine.scheduling.sequence import Sequence


class Proposer(Protocol):
    """Guesses the next tokens of sequences. What it keeps between calls is a function of the
    sequences' tokens, so nothing of it moves with a request to another node."""

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        """At most `most[i]` ids that may follow the tokens of `sequences[i]`, in order; none if it
        has no guess."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: nothing of it needs to be kept."""
        ...
