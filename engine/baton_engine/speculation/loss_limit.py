"""LossLimit: how much time drafts may lose, as long as it is unknown whether they save any.

In: the seconds of steps, and those that drafts won or lost. Out: whether drafts may be made now.

A model that drafts must first compute the tokens that lack its KV, for example a whole prompt, and
each guess takes a step of it. If that does not pay, the time is lost. So drafts have a credit: a
small share of the time that the engine works, and what they win. It is limited, so that what they
once won does not let them lose as much later.
"""

from __future__ import annotations

SHARE = 0.02  # of the time of steps
MOST_S = 0.2  # the largest credit, and the first


class LossLimit:
    def __init__(self) -> None:
        self._credit = MOST_S

    @property
    def reached(self) -> bool:
        """Whether no drafts may be made now."""
        return self._credit <= 0

    def note_step(self, seconds: float) -> None:
        """A step took `seconds`."""
        self.note_won(SHARE * seconds)

    def note_won(self, seconds: float) -> None:
        """Drafts have won `seconds`, or lost them if negative."""
        self._credit = min(self._credit + seconds, MOST_S)
