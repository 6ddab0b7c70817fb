"""What the engine process tells its server about itself: load, speeds, cache contents.

In: the engine's and the data servers' figures, the counters, a clock. Out: Load (every
`load_every_s` if it changed, at least each second; at once when the store's health changed) and
CacheEvents (every `events_every_s` if there are any).
"""

from __future__ import annotations

from baton_engine.api import Engine
from baton_node.counters import Counters
from baton_node.frames import ToServer
from baton_node.plane import Measured
from baton_node.speeds import SpeedMeter
from baton_protocol.ids import Epoch
from baton_protocol.link import CacheEvents, Load

AT_LEAST_EVERY_S = 1.0


class Reporter:
    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        speeds: SpeedMeter,
        plane: Measured,
        epoch: Epoch,
        *,
        load_every_s: float,
        events_every_s: float,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._speeds = speeds
        self._plane = plane
        self._epoch = epoch
        self._load_every_s = load_every_s
        self._events_every_s = events_every_s
        self._next_load = self._next_events = self._must_load = 0.0
        self._last: Load | None = None

    @property
    def next_due(self) -> float:
        """When due() has to be asked next."""
        return min(self._next_load, self._next_events)

    def load(self, parked: int) -> Load:
        """The node's figures now. The server knows the state; to the engine it is ready."""
        instances = self._plane.instances()
        # A prompt's chunks lie on all data servers: the slowest one's latency is what it waits for.
        latency_ms = max((each.get_latency_ms for each in instances), default=0.0)
        self._speeds.transfers(*self._plane.rates(), latency_ms)
        return Load(
            self._epoch,
            "ready",
            self._speeds.speeds(),
            self._counters.merge(self._engine.load(), parked),
            self._plane.store_health(),
            instances,
        )

    def due(self, now: float, parked: int) -> list[ToServer]:
        """The frames whose time has come."""
        frames: list[ToServer] = []
        if now >= self._next_events:
            self._next_events = now + self._events_every_s
            change = self._engine.cache_changes()
            if change.stored or change.evicted:
                frames.append(CacheEvents(self._epoch, change.stored, change.evicted))
        if now >= self._next_load or (
            self._last and self._last.store != self._plane.store_health()
        ):
            self._next_load = now + self._load_every_s
            load = self.load(parked)
            if load != self._last or now >= self._must_load:
                self._last = load
                self._must_load = now + AT_LEAST_EVERY_S
                frames.append(load)
        return frames
