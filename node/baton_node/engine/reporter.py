"""What the engine process tells its server about itself: load, speeds, cache contents.

In: the engine's and the data servers' figures, the counters, a clock. Out: Load (every
`load_every_s` if it changed, at least each second; at once when the store's health changed; within
`SOON_S` when requests came, were computed or ended, so that all routers know of what one of them
has booked) and CacheEvents (every `events_every_s` if there are any).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from baton_node.engine.context import LoopContext
from baton_node.ipc.messages import ToServer
from baton_protocol.link import CacheEvents, Load

AT_LEAST_EVERY_S = 1.0
SOON_S = 0.02


class Requests(Protocol):
    """The requests that are here. Equal `stamp`s: none has come, been computed or ended."""

    @property
    def stamp(self) -> Hashable: ...

    @property
    def parked(self) -> int: ...

    @property
    def parked_tokens(self) -> int: ...


class Reporter:
    def __init__(self, context: LoopContext, requests: Requests) -> None:
        self._context = context
        self._connector = context.connector
        self._requests = requests
        self._epoch = context.options.epoch
        self._next_load = self._next_events = self._must_load = 0.0
        self._soon = 0.0
        self._last: Load | None = None
        self._stamp: Hashable = None

    @property
    def next_due(self) -> float:
        """When due() has to be asked next."""
        news = self._soon if self._requests.stamp != self._stamp else self._next_load
        return min(news, self._next_load, self._next_events)

    def load(self) -> Load:
        """The node's figures now. The server knows the state; to the engine it is ready."""
        instances = self._connector.instances()
        # A prompt's chunks lie on all data servers: the slowest one's latency is what it waits for.
        latency_ms = max((each.get_latency_ms for each in instances), default=0.0)
        speeds, requests = self._context.speeds, self._requests
        speeds.transfers(*self._connector.rates(), latency_ms)
        return Load(
            self._epoch,
            "ready",
            speeds.speeds(),
            self._context.counters.merge(
                self._context.engine.load(), requests.parked, requests.parked_tokens
            ),
            self._connector.store_health(),
            instances,
        )

    def due(self, now: float) -> list[ToServer]:
        """The frames whose time has come."""
        frames: list[ToServer] = []
        if now >= self._next_events:
            self._next_events = now + self._context.options.events_every_s
            change = self._context.engine.cache_changes()
            if change.stored or change.evicted:
                frames.append(CacheEvents(self._epoch, change.stored, change.evicted))
        if self._is_due(now):
            self._next_load, self._soon = now + self._context.options.load_every_s, now + SOON_S
            self._stamp = self._requests.stamp
            load = self.load()
            if load != self._last or now >= self._must_load:
                self._last = load
                self._must_load = now + AT_LEAST_EVERY_S
                frames.append(load)
        return frames

    def _is_due(self, now: float) -> bool:
        if now >= self._next_load or (now >= self._soon and self._requests.stamp != self._stamp):
            return True
        return self._last is not None and self._last.store != self._connector.store_health()
