"""Health checks of one data server.

The checks notice without traffic that a server is down, frozen or restarted, and its settings are
applied or checked once per start of it. Each server has two circuit breakers. The server's circuit
opens if the server does not answer; then all operations are refused. The room's circuit opens if a
put fails; then only puts are refused. A server that is full, or too small or slow for chunks, may
still answer small commands well. While a circuit is open, transfer threads probe instead.

The probe for room stores several chunks at the same time. A single chunk is not enough for a server
exactly at its limit: it has room for one again as soon as the buffers of the refused put are gone,
and the next put would find it full, over and over. Even several chunks prove less than real puts,
so the room's circuit closes on trial until a put has succeeded.

One warning is logged when trouble begins, one when it is over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_settings import tend
from baton_kvstore.connection.server_usage import ServerUsage, read_usage
from baton_kvstore.data.circuit_breaker import CircuitBreaker
from baton_kvstore.data.rate_meter import Average
from baton_kvstore.data.shared import Shared
from baton_kvstore.data.transfers import refusal
from baton_kvstore.errors import LinkBroken, ServerRefused, StoreUnavailable
from baton_kvstore.keys import room_key

logger = logging.getLogger(__name__)
PROBE_CHUNKS = 4  # chunks that a probe for room puts
PROBE_TTL_MS = 5000  # probes are deleted; the TTL is for a thread that dies during one
BUSY_CHECK_S = 1.0  # interval between checks of a server that has work
# Probing for room transfers chunks, so it backs off longer than probing an unreachable server: its
# longest pause is this many times as long.
ROOM_LIMIT = 4.0
Check = Callable[[RespConnection], None]
State = Literal["healthy", "trial", "full", "unreachable"]


class ServerCheck:
    """Checks of data instance `number`.

    Each of `links` belongs to one transfer thread. The thread of `links[0]` also does the regular
    checks and the settings. `changed` is called after each change of state, in the thread that
    caused it. Thread-safe.
    """

    def __init__(
        self,
        number: int,
        links: Sequence[RespConnection],
        shared: Shared,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock  # schedules checks; deadlines of sockets use time.monotonic()
        self._number = number
        self._links = links
        self._shared = shared
        self._changed = changed
        first_s, limit_s = shared.tuning.backoff_first_s, shared.tuning.backoff_limit_s
        self._server = CircuitBreaker(first_s, limit_s)
        self._room = CircuitBreaker(first_s, limit_s * ROOM_LIMIT)
        self._checked_at = float("-inf")
        self._configured_run_id = ""  # the start of the server whose settings were handled
        self._lock = threading.Lock()
        self._reported: State = "healthy"  # as of the last warning
        self._closed = False
        self.run_id = ""  # the run id seen last, "" before the first connection
        self.usage = ServerUsage(0, 0, 0)
        self.round_trip_s = Average()

    @property
    def trouble(self) -> str:
        """Why operations are refused now, "" if they are not."""
        return self._server.reason

    @property
    def put_trouble(self) -> str:
        """Why puts are refused now, "" if they are not."""
        return self._server.reason or self._room.reason

    def close(self) -> None:
        """Ignore failures from now on: closing the connections causes them."""
        self._closed = True

    # --- results of transfers and checks ---------------------------------------------------------

    def note_lost(self, reason: str, began: float) -> None:
        """An attempt that started at `began` did not reach the server."""
        if not self._closed and self._server.fail(reason, began):
            self._warn()

    def note_reached(self, began: float) -> None:
        """A connection to the server, which an attempt from `began` on made, was opened."""
        self._server.succeed(began)
        self._warn()

    def note_refused_put(self, reason: str, began: float) -> None:
        """A put that started at `began` failed."""
        if not self._closed and self._room.fail(reason, began):
            self._warn()

    def note_room(self, began: float) -> None:
        """A probe for room that started at `began` succeeded."""
        self._room.succeed(began, trial=True)
        self._warn()

    def note_put(self) -> None:
        """A put succeeded."""
        if self._room.prove():
            self._warn()

    # --- checks ----------------------------------------------------------------------------------

    def next_check(self, link: RespConnection, idle: bool) -> Check | None:
        """Return the check that the thread of this link must run before its next operation."""
        if self._server.reason:
            return self.reopen_link if self._server.claim_probe() else None
        if self._room.claim_probe():
            return self._probe_room
        if link is self._links[0] and self._clock() >= self._check_at(idle):
            return self._check
        return None

    def pause_s(self, link: RespConnection, idle: bool) -> float | None:
        """Seconds until next_check() must be called again; None: not before `changed` is called."""
        if self._server.reason:
            return self._server.wait_s()
        room = self._room.wait_s()
        if link is not self._links[0]:
            return room
        check = max(0.0, self._check_at(idle) - self._clock())
        return check if room is None else min(check, room)

    def open_link(self, link: RespConnection, deadline: float) -> None:
        """Connect, and handle the settings of a newly started server. Raise StoreUnavailable."""
        began = time.monotonic()
        self.run_id = link.open(deadline).run_id
        mode = self._shared.settings
        if mode is not None and link is self._links[0] and self.run_id != self._configured_run_id:
            tend(link, deadline, "data", mode, self._shared.value_bytes)
            self._configured_run_id = self.run_id
        self.note_reached(began)

    def reopen_link(self, link: RespConnection) -> None:
        """Connect; report a failure instead of raising."""
        began = time.monotonic()
        try:
            self.open_link(link, began + self._shared.tuning.connect_timeout_s)
        except StoreUnavailable as error:
            self.note_lost(str(error), began)

    def _check_at(self, idle: bool) -> float:
        idle_s = self._shared.tuning.idle_check_s
        return self._checked_at + (idle_s if idle else max(BUSY_CHECK_S, idle_s))

    def _check(self, link: RespConnection) -> None:
        """Ping the server, and measure its round trip and memory. Reopen a broken connection at
        once, which also notices a restart."""
        began = time.monotonic()
        deadline = began + self._shared.tuning.connect_timeout_s
        try:
            if link.is_open:
                # A server that refuses (no permission, busy with a script) is reachable.
                with contextlib.suppress(ServerRefused):
                    link.command(deadline, b"PING")
                self.round_trip_s.add(time.monotonic() - began)
                with contextlib.suppress(ServerRefused):
                    self.usage = read_usage(link, deadline)
            else:
                self.reopen_link(link)
        except LinkBroken:
            self.reopen_link(link)
        except StoreUnavailable as error:
            self.note_lost(str(error), began)
        self._checked_at = self._clock()

    def _probe_room(self, link: RespConnection) -> None:
        """Check for room by putting several chunks. First put one byte, which a full server refuses
        too: that saves sending a chunk."""
        began, size = time.monotonic(), self._shared.value_bytes
        buffer = self._shared.staging.borrow_buffer()
        if buffer is None:
            return
        count = PROBE_CHUNKS * self._shared.shards
        keys = [room_key(self._shared.fingerprint) + b":%d" % n for n in range(count)]
        deadline = began + self._shared.tuning.deadline_s(size * count)
        try:
            if not link.is_open:
                self.open_link(link, deadline)
            try:
                link.put(deadline, keys[0], [buffer[:1]], PROBE_TTL_MS)
                for key in keys:
                    link.put(deadline, key, [buffer], PROBE_TTL_MS)
            finally:
                if link.is_open:
                    with contextlib.suppress(ServerRefused):  # if refused, the keys expire
                        link.command(deadline, b"DEL", *keys)
        except ServerRefused as error:
            self.note_refused_put(refusal(error), began)
        except StoreUnavailable as error:
            self.note_refused_put(str(error), began)
            self.note_lost(str(error), began)
        else:
            self.note_room(began)
        finally:
            self._shared.staging.return_buffer(buffer)

    # --- warnings --------------------------------------------------------------------------------

    def _warn(self) -> None:
        self._changed()
        with self._lock:
            before, state = self._reported, self._state()
            self._reported = state
        fresh = before == "healthy" or (before == "trial" and state == "unreachable")
        if state in ("full", "unreachable") and fresh:
            logger.warning("data instance %d cannot be used: %s", self._number, self.put_trouble)
        elif state == "healthy" and before != "healthy":
            logger.warning("data instance %d can be used again", self._number)

    def _state(self) -> State:
        if self._server.reason:
            return "unreachable"
        if self._room.reason:
            return "full"
        return "trial" if self._room.on_trial else "healthy"
