"""The engine process's reports to its server.

In: the figures of the engine, the data servers and the requests, and the time of steps. Out: Load,
CacheEvents and NodeTime frames.
"""

from __future__ import annotations

from baton_node.engine.loop_context import LoopContext
from baton_node.engine.prefix_pins import PrefixPins
from baton_node.engine.roles import Fetching
from baton_node.ipc.messages import (
    ToServer,
)
from baton_protocol.link import (
    CacheEvents,
    Load,
)

AT_LEAST_EVERY_S = 1.0  # an unchanged load is sent again after this
SOON_S = 0.02  # shortest interval between loads that requests cause
TIME_EVERY_S = 0.5  # a node that is killed loses at most this and what its server has not written


class Reporter:
    """Makes the engine process's reports to its server: load and cache events.

    In: the figures of the engine, of the data servers and of the jobs, a clock. Out: frames. A
    changed Load is sent every `load_every_s`, an unchanged one every AT_LEAST_EVERY_S; a new health
    of the store is sent at once. When requests arrive, have their prompt computed or end, a Load
    follows within SOON_S: each router must see what the others have placed here. CacheEvents are
    sent every `events_every_s` if there are any, NodeTime every TIME_EVERY_S.
    """

    def __init__(self, context: LoopContext, fetching: Fetching, pins: PrefixPins) -> None:
        self._context = context
        self._pins = pins
        self._connector = context.connector
        self._jobs = context.jobs
        self._fetching = fetching
        self._epoch = context.options.epoch
        self._next_load = self._next_events = self._must_load = self._next_time = 0.0
        self._soon = 0.0
        self._last: Load | None = None
        self._changes = -1  # what the last report's jobs had changed

    @property
    def next_due(self) -> float:
        """When to call take_due() next, in seconds of the loop's clock."""
        next_report = self._soon if self._jobs.changes != self._changes else self._next_load
        return min(next_report, self._next_load, self._next_events, self._next_time)

    def read_load(self) -> Load:
        """Return the node's figures now. The state is always "ready"; the server replaces it."""
        instances = self._connector.instances()
        # A prompt's chunks lie on all data servers, so a fetch waits for the slowest server.
        latency_ms = max((instance.get_latency_ms for instance in instances), default=0.0)
        speeds = self._context.speeds
        speeds.transfers(*self._connector.rates(), latency_ms)
        self._context.counters.set_to(**self._context.ledger.busy_seconds())
        return Load(
            self._epoch,
            "ready",
            speeds.speeds(),
            self._context.counters.merge(
                self._context.engine.load(),
                self._jobs.waiting_sequences,
                self._jobs.compiling_tokens + self._fetching.tokens,
            ),
            self._connector.store_health(),
            instances,
            pins=self._pins.reports(),
        )

    def take_due(self, now: float) -> list[ToServer]:
        """Return the frames to send at `now`."""
        frames: list[ToServer] = []
        if now >= self._next_events:
            self._next_events = now + self._context.options.events_every_s
            change = self._context.engine.cache_changes()
            if change.stored or change.evicted:
                frames.append(CacheEvents(self._epoch, change.stored, change.evicted))
        if now >= self._next_time:
            self._next_time = now + TIME_EVERY_S
            frames.append(self._context.ledger.report())
        if self._is_due(now):
            self._next_load, self._soon = now + self._context.options.load_every_s, now + SOON_S
            self._changes = self._jobs.changes
            load = self.read_load()
            if load != self._last or now >= self._must_load:
                self._last = load
                self._must_load = now + AT_LEAST_EVERY_S
                frames.append(load)
        return frames

    def _is_due(self, now: float) -> bool:
        if now >= self._next_load or (now >= self._soon and self._jobs.changes != self._changes):
            return True
        return self._last is not None and self._last.store != self._connector.store_health()
