"""The ticket of a prompt that admission let in.

In: what the dispatcher reports of the prompt. Out: calls to admission, which counts what runs.
"""

from __future__ import annotations

from collections.abc import Callable


class Ticket:
    """Admission of one prompt with `sequences` choices. The dispatcher reports when the prompt is
    placed and when choices end; the ticket passes both on to `placed` and `free`."""

    def __init__(
        self,
        sequences: int,
        placed: Callable[[], None] = lambda: None,
        free: Callable[[int], None] = lambda sequences: None,
    ) -> None:
        self._sequences = sequences
        self._placed: Callable[[], None] | None = placed
        self._free = free

    def report_placed(self) -> None:
        """The prompt is booked on nodes, waits for nodes, or was given up. Idempotent."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed()

    def free_choices(self, sequences: int) -> None:
        """Free the sequences of this many choices, which are complete."""
        self._sequences -= sequences
        self._free(sequences)

    def release(self) -> None:
        """End the ticket and free the remaining sequences, whatever the outcome. Idempotent."""
        self.report_placed()
        if self._sequences:
            self.free_choices(self._sequences)
