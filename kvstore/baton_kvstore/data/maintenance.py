"""What one data server needs beside transfers: connections, a look now and then, probes.

In: the server's links, and what is known of its health. Out: for the thread that asks, the next
thing to do, or how long there is nothing. A server that is gone, frozen or restarted is noticed
without traffic, and its settings are seen to once per start of it, both by the first link's thread.

Room is probed for with several chunks that lie there at the same time. One would do for a server
without any; but one exactly at its limit has room for one again as soon as the buffers of the put
that it refused are gone, and the next put would find it full: it would come and go for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_kvstore.connection.resp import RespConnection
from baton_kvstore.connection.server_settings import CareMode, Usage, read_usage, tend
from baton_kvstore.data.health import Health
from baton_kvstore.data.staging import StagingPool
from baton_kvstore.data.transfer_rate import Average, RateMeter
from baton_kvstore.data.transfers import refusal
from baton_kvstore.errors import LinkBroken, ServerRefused, StoreUnavailable
from baton_kvstore.keys import DEFAULT_TTL_S, room_key
from baton_protocol.ids import Fingerprint

PROBE_CHUNKS = 4
PROBE_TTL_MS = 5000  # they are deleted after the probe; this is for a thread that dies in it
BUSY_CHECK_S = 1.0  # between two looks at a server that has work

Chore = Callable[[RespConnection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times and rates of the data plane. Seconds, bytes per second."""

    ttl_base_s: float = DEFAULT_TTL_S
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0
    floor_bytes_per_s: float = 8 << 20
    queue_limit_s: float = 30.0
    backoff_first_s: float = 0.1
    backoff_limit_s: float = 0.5
    idle_check_s: float = 0.5

    def deadline_s(self, size: int) -> float:
        """base + bytes / floor rate: what a transfer of `size` bytes may take. 1 MiB: 2.125 s."""
        return self.deadline_base_s + size / self.floor_bytes_per_s

    def settled_s(self, size: int) -> float:
        """By when an operation of `size` bytes has settled: the longest wait in the queue, the
        longest that its thread may be at when that is over (a probe), and its own transfer."""
        return self.queue_limit_s + self.deadline_s(PROBE_CHUNKS * size) + self.deadline_s(size)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share. `settings`: None leaves the servers' alone."""

    staging: StagingPool
    fingerprint: Fingerprint
    value_bytes: int
    shards: int  # values of one chunk
    puts: RateMeter
    gets: RateMeter
    tuning: Tuning
    settings: CareMode | None


class Maintenance:
    """Of one server, whose links each have a thread. `links[0]`'s does what one is enough for."""

    def __init__(
        self,
        links: Sequence[RespConnection],
        health: Health,
        shared: Shared,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock  # of the checks; deadlines are the sockets', and by the real one
        self._links = links
        self._health = health
        self._shared = shared
        self._checked_at = float("-inf")
        self._tended = ""
        self.run_id = ""  # the last one seen, "" before the first connection
        self.usage = Usage(0, 0, 0)
        self.round_trip_s = Average()

    def next(self, link: RespConnection, idle: bool) -> Chore | None:
        """What the thread of this link has to do before any operation."""
        if self._health.server.reason:
            return self.reopen if self._health.server.claim_probe() else None
        if self._health.room.claim_probe():
            return self._probe_room
        if link is self._links[0] and self._clock() >= self._check_at(idle):
            return self._check
        return None

    def pause_s(self, link: RespConnection, idle: bool) -> float | None:
        """Seconds until next() has to be asked again; None: not before something changes."""
        if self._health.server.reason:
            return self._health.server.wait_s()
        room = self._health.room.wait_s()
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
        self._health.reached()

    def reopen(self, link: RespConnection) -> None:
        began = time.monotonic()
        try:
            self.open(link, began + self._shared.tuning.connect_timeout_s)
        except StoreUnavailable as error:
            self._health.lost(str(error), began)

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
            self._health.lost(str(error), began)
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
            self._health.refused(refusal(error), began)
        except StoreUnavailable as error:
            self._health.refused(str(error), began)
            self._health.lost(str(error), began)
        else:
            self._health.has_room()
        finally:
            self._shared.staging.give_back(buffer)
