"""The sent deltas of one choice, kept for a router whose link breaks before it receives them.

In: deltas as they are sent, one per token. Out: the deltas from an offset on, or None if they are
not kept any more. Whole deltas are kept, with their text, so that nothing is detokenized twice.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from baton_protocol.link import Delta

# Sizes of a delta with one token, and of each candidate in its logprobs: measured with
# sys.getsizeof on CPython 3.11, rounded up.
DELTA_BYTES = 300
CANDIDATE_BYTES = 250


def size_of(delta: Delta) -> int:
    """Return about how many bytes of memory a delta of one token, or with a vector, takes."""
    if not delta.logprobs and not delta.prompt_logprobs:
        return DELTA_BYTES + len(delta.vector)
    candidates = 0
    for position in (*delta.logprobs, *delta.prompt_logprobs):
        candidates += 1 + len(position.top)
    return DELTA_BYTES + CANDIDATE_BYTES * candidates


class DeltaHistory:
    """Deltas of one choice, oldest first. `first` is the number of the choice's ids that the router
    had when the job arrived; the first delta added has that offset."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._deltas: deque[Delta] = deque()
        self.bytes = 0

    def add_delta(self, delta: Delta, limit: int) -> None:
        """Keep a delta, then drop the oldest until all together take at most `limit` bytes."""
        self._deltas.append(delta)
        self.bytes += size_of(delta)
        while self.bytes > limit and self._deltas:
            self.bytes -= size_of(self._deltas.popleft())
            self._first += 1

    def deltas_since(self, offset: int) -> list[Delta] | None:
        """Return the deltas of all ids from index `offset` on, or None if the first of them was
        dropped."""
        if offset < self._first:
            return None
        return list(islice(self._deltas, offset - self._first, None))
