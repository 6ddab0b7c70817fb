"""The Protocol of what drafts the next tokens of a schedule (see `baton_engine.speculation`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from baton_engine.scheduling.sequence import Sequence


class DraftSource(Protocol):
    def draft(self, sequences: Seq[Sequence]) -> list[Seq[int]]:
        """For each sequence the ids to compute after its last known token, often none. One known
        token of each sequence is not computed, and no token is awaited."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

    def clock(self) -> float:
        """Seconds, for note_step()."""
        ...

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone, with `tokens` tokens, took `seconds`."""
        ...

    def note_drafts(self, sequences: int, drafted: int, accepted: int) -> float:
        """Of the `drafted` drafts of a step of `sequences` sequences, `accepted` were the next
        tokens. Returns the estimated seconds that drafts have saved since the last call; negative
        if they have lost them, 0.0 if unknown."""
        ...
