"""What was sent of one choice, for a router whose link broke with some of it on the way.

In: deltas as they go out, one per token. Out: those from an offset on, or None where they are not
kept any more. Whole deltas are kept, texts included: what a delta says was worked out once.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from baton_protocol.link import Delta

# Measured with sys.getsizeof on CPython 3.11, rounded up.
DELTA_BYTES = 300
CANDIDATE_BYTES = 250


def size_of(delta: Delta) -> int:
    """About how many bytes of memory a delta of one token takes."""
    if not delta.logprobs and not delta.prompt_logprobs:
        return DELTA_BYTES
    candidates = 0
    for position in (*delta.logprobs, *delta.prompt_logprobs):
        candidates += 1 + len(position.top)
    return DELTA_BYTES + CANDIDATE_BYTES * candidates


class UnackedDeltas:
    """Starts behind the `first` ids that the router had when the request came."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._deltas: deque[Delta] = deque()
        self.bytes = 0

    def add(self, delta: Delta, limit: int) -> None:
        """Keep it; the oldest go while all together take more than `limit` bytes."""
        self._deltas.append(delta)
        self.bytes += size_of(delta)
        while self.bytes > limit and self._deltas:
            self.bytes -= size_of(self._deltas.popleft())
            self._first += 1

    def since(self, offset: int) -> list[Delta] | None:
        """The deltas of all ids from number `offset` on."""
        if offset < self._first:
            return None
        return list(islice(self._deltas, offset - self._first, None))
