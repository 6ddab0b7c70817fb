"""The planner's memory from one call to the next: demand, needs, missed targets.

In: the entries of each call. Out: the same, without entries that are too old. A second call for the
same time replaces the first, so the planner is idempotent. An operator that restarts begins with
`Memory()` and waits a whole window before it scales down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton_protocol.store import Role

MOST_ENTRIES = 1024  # more than one entry each 5 s for the longest window


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSample:
    """Demand observed at one time: rates per second, and requests that generate or wait to."""

    at_s: float
    requests: float | None
    prompt: float | None  # uncached tokens
    output: float | None
    live: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNodes:
    """The need at one time, before stabilization and limits."""

    at_s: float
    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMiss:
    """A role missed its target with this load, in tokens per second and node."""

    at_s: float
    role: Role
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    since_s: float | None = None  # time of the first call
    seen: tuple[DemandSample, ...] = ()
    needed: tuple[WantedNodes, ...] = ()
    misses: tuple[TargetMiss, ...] = ()  # the newest of each role

    def at(self, now_s: float, keep_s: float) -> Memory:
        """Entries before `now_s` and at most `keep_s` old. Empty if the clock went back."""
        if self.since_s is None or self.since_s > now_s:
            return Memory(since_s=now_s)
        return replace(
            self,
            seen=tuple(entry for entry in self.seen if _within(entry.at_s, now_s, keep_s)),
            needed=tuple(entry for entry in self.needed if _within(entry.at_s, now_s, keep_s)),
            misses=tuple(entry for entry in self.misses if _within(entry.at_s, now_s, keep_s)),
        )

    def with_seen(self, seen: DemandSample) -> Memory:
        """Add the sample, unless it is already present: several calls may see the same report."""
        earlier = tuple(sample for sample in self.seen if sample.at_s < seen.at_s)
        return replace(self, seen=(*earlier, seen)[-MOST_ENTRIES:])

    def points(self, name: str) -> list[tuple[float, float]]:
        """(time, value) of a field of `DemandSample`, where it is known."""
        values = ((sample.at_s, getattr(sample, name)) for sample in self.seen)
        return [(at_s, value) for at_s, value in values if value is not None]

    def with_needed(self, needed: WantedNodes) -> Memory:
        return replace(self, needed=(*self.needed, needed)[-MOST_ENTRIES:])

    def with_miss(self, miss: TargetMiss) -> Memory:
        others = tuple(other for other in self.misses if other.role != miss.role)
        return replace(self, misses=(*others, miss))

    def miss(self, role: Role) -> TargetMiss | None:
        return next((miss for miss in self.misses if miss.role == role), None)


def _within(at_s: float, now_s: float, keep_s: float) -> bool:
    return now_s - keep_s <= at_s < now_s
