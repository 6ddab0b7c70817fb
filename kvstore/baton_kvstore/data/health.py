"""Whether one data server is worth asking, and the log lines about that.

Two circuits: one for the server (does it answer), and one for its room, opened by any put that
failed: a server that is full, too small or too slow for chunks answers small commands well. The
room's probe is less than what puts do, so it closes on trial until a put has worked.

In: what threads meet. Out: reasons, and one line when trouble begins and one when it is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from baton_kvstore.data.circuit_breaker import CircuitBreaker

logger = logging.getLogger(__name__)
# Probing for room moves chunks, so a server without any is asked less often than a lost one.
ROOM_LIMIT = 4.0
State = Literal["well", "trial", "full", "away"]


class Health:
    """Of data instance `number`. `changed` is called after each change, from the thread that made
    it. Thread-safe."""

    def __init__(
        self, number: int, first_s: float, limit_s: float, changed: Callable[[], None]
    ) -> None:
        self.server = CircuitBreaker(first_s, limit_s)
        self.room = CircuitBreaker(first_s, limit_s * ROOM_LIMIT)
        self._number = number
        self._changed = changed
        self._lock = threading.Lock()
        self._told: State = "well"
        self._closed = False

    @property
    def put_trouble(self) -> str:
        """Why puts are refused now, "" if they are not."""
        return self.server.reason or self.room.reason

    def lost(self, reason: str, began: float) -> None:
        """An attempt that began then met no server."""
        if not self._closed and self.server.fail(reason, began):
            self._tell()

    def reached(self) -> None:
        self.server.succeed()
        self._tell()

    def refused(self, reason: str, began: float) -> None:
        """A put that began then failed."""
        if not self._closed and self.room.fail(reason, began):
            self._tell()

    def has_room(self) -> None:
        """A probe was taken."""
        self.room.succeed(trial=True)
        self._tell()

    def took_put(self) -> None:
        if self.room.prove():
            self._tell()

    def close(self) -> None:
        """What fails from now on was cut off by us."""
        self._closed = True

    def _tell(self) -> None:
        self._changed()
        with self._lock:
            before, state = self._told, self._state()
            self._told = state
        fresh = before == "well" or (before == "trial" and state == "away")
        if state in ("full", "away") and fresh:
            reason = self.put_trouble
            logger.warning("data instance %d cannot be used: %s", self._number, reason)
        elif state == "well" and before != "well":
            logger.warning("data instance %d can be used again", self._number)

    def _state(self) -> State:
        if self.server.reason:
            return "away"
        if self.room.reason:
            return "full"
        return "trial" if self.room.on_trial else "well"
