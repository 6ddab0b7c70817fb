"""Whether one data server can be used: found out by checks, and told by warnings.

Checks: a server that is gone, frozen or restarted is noticed without traffic, and its settings are
seen to once per start of it. While a circuit is open a thread probes instead of transfers: the
server's circuit says whether it answers; its room's, opened by any put that failed, whether it
takes chunks: one that is full, too small or too slow for chunks answers small commands well.

Room is probed for with several chunks that lie there at the same time. One would do for a server
without any; but one exactly at its limit has room for one again as soon as the buffers of the put
that it refused are gone, and the next put would find it full: it would come and go for ever. Even
this proves less than puts do, so the room's circuit closes on trial until a put has worked.

Warnings: one line when trouble begins, one when it is over.

In: what transfer threads meet, their connections. Out: reasons why operations are refused, the next
check for the thread that asks, the server's figures.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from baton_kvstore.connection.resp import RespConnection
from baton_kvstore.connection.server_settings import Usage, read_usage, tend
from baton_kvstore.data.transfers import PROBE_CHUNKS, Average, Shared, refusal
from baton_kvstore.errors import LinkBroken, ServerRefused, StoreUnavailable
from baton_kvstore.keys import room_key


class CircuitBreaker:
    """Whether an instance is worth asking.

    A failure opens the circuit: operations fail at once, with the reason, instead of each waiting
    for its deadline. One thread at a time probes, after a pause that doubles up to a limit; when it
    succeeds the circuit closes. No operation is spent on finding out.

    A probe that proves less than an operation closes the circuit on trial: should operations fail
    all the same, the next pause is longer than the last, until one of them has worked.

    Thread-safe. `first_s` and `limit_s` bound the pause between attempts.
    """

    def __init__(
        self, first_s: float, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._reason = ""
        self._failures = 0
        self._retry_at = 0.0
        self._probing = False
        self._trial = False
        self._succeeded_at = float("-inf")

    @property
    def reason(self) -> str:
        """Why it is open; "" while closed."""
        return self._reason

    @property
    def on_trial(self) -> bool:
        """Closed by a probe, and no operation has worked since."""
        return self._trial

    def fail(self, reason: str, began: float) -> bool:
        """Open, or open for longer, after an attempt that began then (by the clock). False, and no
        effect, if another thread succeeded since: what failed was before that."""
        with self._lock:
            if began < self._succeeded_at:
                return False
            pause = min(self._limit_s, self._first_s * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._reason = reason
            self._retry_at = self._clock() + pause
            self._probing = self._trial = False
            return True

    def succeed(self, trial: bool = False) -> None:
        with self._lock:
            self._reason = ""
            self._failures = self._failures if trial else 0
            self._probing, self._trial = False, trial
            self._succeeded_at = self._clock()

    def prove(self) -> bool:
        """An operation worked. True if that ended a trial."""
        with self._lock:
            if not self._trial:
                return False
            self._trial, self._failures = False, 0
            return True

    def wait_s(self) -> float | None:
        """Seconds until a probe is due (0.0: now); None if none is wanted from this thread."""
        with self._lock:
            if not self._reason or self._probing:
                return None
            return max(0.0, self._retry_at - self._clock())

    def claim_probe(self) -> bool:
        """True for the one thread that should try to reconnect now, then fail() or succeed()."""
        with self._lock:
            due = bool(self._reason) and not self._probing and self._clock() >= self._retry_at
            if due:
                self._probing = True
            return due


logger = logging.getLogger(__name__)
PROBE_TTL_MS = 5000  # probes are deleted; this is for a thread that dies in one
BUSY_CHECK_S = 1.0  # between two checks of a server that has work
# Probing for room moves chunks, so a server without any is asked less often than a lost one.
ROOM_LIMIT = 4.0

Check = Callable[[RespConnection], None]
State = Literal["well", "trial", "full", "away"]


class ServerCheck:
    """Of data instance `number`, whose links each have a thread; `links[0]`'s does what one is
    enough for. `changed` is called after each change, from the thread that made it. Thread-safe."""

    def __init__(
        self,
        number: int,
        links: Sequence[RespConnection],
        shared: Shared,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock  # of the checks; deadlines are the sockets', and by the real one
        self._number = number
        self._links = links
        self._shared = shared
        self._changed = changed
        first_s, limit_s = shared.tuning.backoff_first_s, shared.tuning.backoff_limit_s
        self._server = CircuitBreaker(first_s, limit_s)
        self._room = CircuitBreaker(first_s, limit_s * ROOM_LIMIT)
        self._checked_at = float("-inf")
        self._tended = ""
        self._lock = threading.Lock()
        self._told: State = "well"
        self._closed = False
        self.run_id = ""  # the last one seen, "" before the first connection
        self.usage = Usage(0, 0, 0)
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
        """What fails from now on was cut off by us."""
        self._closed = True

    # --- what transfers and checks met -----------------------------------------------------------

    def lost(self, reason: str, began: float) -> None:
        """An attempt that began then met no server."""
        if not self._closed and self._server.fail(reason, began):
            self._warn()

    def reached(self) -> None:
        self._server.succeed()
        self._warn()

    def refused(self, reason: str, began: float) -> None:
        """A put that began then failed."""
        if not self._closed and self._room.fail(reason, began):
            self._warn()

    def has_room(self) -> None:
        """A probe was taken."""
        self._room.succeed(trial=True)
        self._warn()

    def took_put(self) -> None:
        if self._room.prove():
            self._warn()

    # --- checks ----------------------------------------------------------------------------------

    def next(self, link: RespConnection, idle: bool) -> Check | None:
        """What the thread of this link has to do before any operation."""
        if self._server.reason:
            return self.reopen if self._server.claim_probe() else None
        if self._room.claim_probe():
            return self._probe_room
        if link is self._links[0] and self._clock() >= self._check_at(idle):
            return self._check
        return None

    def pause_s(self, link: RespConnection, idle: bool) -> float | None:
        """Seconds until next() has to be asked again; None: not before something changes."""
        if self._server.reason:
            return self._server.wait_s()
        room = self._room.wait_s()
        if link is not self._links[0]:
            return room
        check = max(0.0, self._check_at(idle) - self._clock())
        return check if room is None else min(check, room)

    def open(self, link: RespConnection, deadline: float) -> None:
        """Connect, and see to a server that was not met before. Raise StoreUnavailable."""
        self.run_id = link.open(deadline).run_id
        mode = self._shared.settings
        if mode is not None and link is self._links[0] and self.run_id != self._tended:
            tend(link, deadline, "data", mode, self._shared.value_bytes)
            self._tended = self.run_id
        self.reached()

    def reopen(self, link: RespConnection) -> None:
        began = time.monotonic()
        try:
            self.open(link, began + self._shared.tuning.connect_timeout_s)
        except StoreUnavailable as error:
            self.lost(str(error), began)

    def _check_at(self, idle: bool) -> float:
        idle_s = self._shared.tuning.idle_check_s
        return self._checked_at + (idle_s if idle else max(BUSY_CHECK_S, idle_s))

    def _check(self, link: RespConnection) -> None:
        """Is the server there, still the same, how far and how full? A broken connection is opened
        anew at once."""
        began = time.monotonic()
        deadline = began + self._shared.tuning.connect_timeout_s
        try:
            if link.is_open:
                # Who refuses (no permission, busy with a script) is there.
                with contextlib.suppress(ServerRefused):
                    link.command(deadline, b"PING")
                self.round_trip_s.add(time.monotonic() - began)
                with contextlib.suppress(ServerRefused):
                    self.usage = read_usage(link, deadline)
            else:
                self.reopen(link)
        except LinkBroken:
            self.reopen(link)
        except StoreUnavailable as error:
            self.lost(str(error), began)
        self._checked_at = self._clock()

    def _probe_room(self, link: RespConnection) -> None:
        """Put more than one chunk. One byte goes ahead: a full server refuses that too."""
        began, size = time.monotonic(), self._shared.value_bytes
        buffer = self._shared.staging.borrow()
        if buffer is None:
            return
        count = PROBE_CHUNKS * self._shared.shards
        keys = [room_key(self._shared.fingerprint) + b":%d" % n for n in range(count)]
        deadline = began + self._shared.tuning.deadline_s(size * count)
        try:
            if not link.is_open:
                self.open(link, deadline)
            try:
                link.put(deadline, keys[0], [buffer[:1]], PROBE_TTL_MS)
                for key in keys:
                    link.put(deadline, key, [buffer], PROBE_TTL_MS)
            finally:
                if link.is_open:
                    with contextlib.suppress(ServerRefused):  # or else they expire
                        link.command(deadline, b"DEL", *keys)
        except ServerRefused as error:
            self.refused(refusal(error), began)
        except StoreUnavailable as error:
            self.refused(str(error), began)
            self.lost(str(error), began)
        else:
            self.has_room()
        finally:
            self._shared.staging.give_back(buffer)

    # --- warnings --------------------------------------------------------------------------------

    def _warn(self) -> None:
        self._changed()
        with self._lock:
            before, state = self._told, self._state()
            self._told = state
        fresh = before == "well" or (before == "trial" and state == "away")
        if state in ("full", "away") and fresh:
            logger.warning("data instance %d cannot be used: %s", self._number, self.put_trouble)
        elif state == "well" and before != "well":
            logger.warning("data instance %d can be used again", self._number)

    def _state(self) -> State:
        if self._server.reason:
            return "away"
        if self._room.reason:
            return "full"
        return "trial" if self._room.on_trial else "well"
