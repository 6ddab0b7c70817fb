"""What the planner remembers from one call to the next: demand, recommendations, missed targets.

In: the entries of each call. Out: the same, without entries that are too old. A second call for the
same time replaces the first, so the planner is idempotent. An operator that restarts begins with
`PlannerMemory()` and waits a whole window before it scales down.
"""

from __future__ import annotations

from collections.abc import Iterator
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
class PastRecommendation:
    """The replicas that the load needed at one time, before stabilization and limits."""

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
class PlannerMemory:
    since_s: float | None = None  # time of the first call
    demand: tuple[DemandSample, ...] = ()
    recommendations: tuple[PastRecommendation, ...] = ()
    misses: tuple[TargetMiss, ...] = ()  # the newest of each role

    def at(self, now_s: float, keep_s: float) -> PlannerMemory:
        """Entries before `now_s` and at most `keep_s` old. Empty if the clock went back."""
        if self.since_s is None or self.since_s > now_s:
            return PlannerMemory(since_s=now_s)

        def is_kept(at_s: float) -> bool:
            return now_s - keep_s <= at_s < now_s

        return replace(
            self,
            demand=tuple(sample for sample in self.demand if is_kept(sample.at_s)),
            recommendations=tuple(past for past in self.recommendations if is_kept(past.at_s)),
            misses=tuple(miss for miss in self.misses if is_kept(miss.at_s)),
        )

    def with_demand(self, sample: DemandSample) -> PlannerMemory:
        """Add the sample, unless it is already present: several calls may see the same report."""
        earlier = tuple(other for other in self.demand if other.at_s < sample.at_s)
        return replace(self, demand=(*earlier, sample)[-MOST_ENTRIES:])

    def demand_points(self, name: str) -> list[tuple[float, float]]:
        """(time, value) of a field of `DemandSample`, where it is inputs."""
        values = ((sample.at_s, getattr(sample, name)) for sample in self.demand)
        return [(at_s, value) for at_s, value in values if value is not None]

    def with_recommendation(self, at_s: float, prefill: int, decode: int) -> PlannerMemory:
        newest = PastRecommendation(at_s=at_s, prefill=prefill, decode=decode)
        return replace(self, recommendations=(*self.recommendations, newest)[-MOST_ENTRIES:])

    def recommended_since(self, role: Role, since_s: float) -> Iterator[int]:
        """The role's recommendations since then, including the current one."""
        return (past.of(role) for past in self.recommendations if past.at_s >= since_s)

    def with_miss(self, miss: TargetMiss) -> PlannerMemory:
        others = tuple(other for other in self.misses if other.role != miss.role)
        return replace(self, misses=(*others, miss))

    def newest_miss(self, role: Role) -> TargetMiss | None:
        return next((miss for miss in self.misses if miss.role == role), None)
