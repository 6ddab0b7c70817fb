"""What one look hands to the next: demand seen, recommendations given, targets missed.

In: the entries of each look. Out: the same, without what is too old to matter. A second look at the
same time replaces the first, so that asking twice changes nothing. An operator that starts anew
starts with `Memory()`: it then takes a whole window before it scales down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton_protocol.store import Role

MOST_ENTRIES = 1024  # a look each 5 s for the longest window, and some more


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSample:
    """Demand as it was observed at one time: rates per second, and requests that are answered or
    wait to be."""

    at_s: float
    requests: float | None
    prompt: float | None  # uncached tokens
    output: float | None
    live: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNodes:
    """What the load asked for at one time, before any window or limit."""

    at_s: float
    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMiss:
    """A role missed its target under so many tokens per second and node."""

    at_s: float
    role: Role
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    since_s: float | None = None  # of the first look
    seen: tuple[DemandSample, ...] = ()
    needed: tuple[WantedNodes, ...] = ()
    misses: tuple[TargetMiss, ...] = ()  # the newest of each role

    def at(self, now_s: float, keep_s: float) -> Memory:
        """What is before `now_s` and at most `keep_s` old; all is forgotten where the clock went
        back."""
        if self.since_s is None or self.since_s > now_s:
            return Memory(since_s=now_s)
        return replace(
            self,
            seen=tuple(one for one in self.seen if _within(one.at_s, now_s, keep_s)),
            needed=tuple(one for one in self.needed if _within(one.at_s, now_s, keep_s)),
            misses=tuple(one for one in self.misses if _within(one.at_s, now_s, keep_s)),
        )

    def with_seen(self, seen: DemandSample) -> Memory:
        """Once, though several looks may find the same observation."""
        before = tuple(one for one in self.seen if one.at_s < seen.at_s)
        return replace(self, seen=(*before, seen)[-MOST_ENTRIES:])

    def points(self, name: str) -> list[tuple[float, float]]:
        """(time, value) of what was known of a field of `DemandSample`."""
        values = ((one.at_s, getattr(one, name)) for one in self.seen)
        return [(at_s, value) for at_s, value in values if value is not None]

    def with_needed(self, needed: WantedNodes) -> Memory:
        return replace(self, needed=(*self.needed, needed)[-MOST_ENTRIES:])

    def with_miss(self, miss: TargetMiss) -> Memory:
        others = tuple(one for one in self.misses if one.role != miss.role)
        return replace(self, misses=(*others, miss))

    def miss(self, role: Role) -> TargetMiss | None:
        return next((one for one in self.misses if one.role == role), None)


def _within(at_s: float, now_s: float, keep_s: float) -> bool:
    return now_s - keep_s <= at_s < now_s
