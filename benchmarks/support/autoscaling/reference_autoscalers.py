"""Autoscalers in use elsewhere, as their documents describe them, for each role on its own.

Both look at the requests that a role has, waiting and running: what an engine's queue metrics or a
gateway's say. Their targets are per node.

hpa   Kubernetes' HorizontalPodAutoscaler on an external metric with an average value: the target
      count is ceil(value / target), nothing within a tolerance of 0.1; up at most by 100 % or 4
      pods per 15 s, whichever is more; down to the highest count recommended in the last 300 s.
kpa   the Knative-like pod autoscaler that serving platforms use: averages over a stable window of
      180 s and a panic window of 60 s; panics when the short one asks for twice the ready nodes,
      until it has not for a stable window, and does not go down meanwhile; at most twice or half
      per decision; 300 s of quiet before it goes down; tolerance 0.1.

Both hold when the metric is missing or older than `STALE_S`.

In: a `PoolObservation`. Out: how many nodes each role should have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from baton_operator.autoscaling.planner.inputs import Phase, PoolObservation
from baton_protocol.store import ROLES, Role

TOLERANCE = 0.1
STALE_S = 45.0
DOWN_S = 300.0
HPA_PODS = 4
KPA_STABLE_S, KPA_PANIC_S, KPA_PANIC, KPA_RATE = 180.0, 60.0, 2.0, 2.0

Counts = Mapping[Role, int]


class Scaler(Protocol):
    """Keeps what it must remember between decisions; one object per run."""

    def decide(self, situation: PoolObservation) -> Counts: ...


class Static:
    """Always the same count."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def decide(self, situation: PoolObservation) -> Counts:
        return self._counts


class Hpa:
    """Limits are for each role, least and most."""

    def __init__(self, targets: Mapping[Role, float], limits: tuple[int, int]) -> None:
        self._targets = targets
        self._limits = limits
        self._past: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in ROLES}

    def decide(self, situation: PoolObservation) -> Counts:
        return {role: self._one(situation, role) for role in ROLES}

    def _one(self, situation: PoolObservation, role: Role) -> int:
        have, value = situation.current_replicas[role], queue_length(situation, role)
        if value is None:
            return have
        wanted = hpa_count(value, self._targets[role], have)
        wanted = min(self._limits[1], max(self._limits[0], wanted))
        past = self._past[role]
        past.append((situation.at_s, wanted))
        while past[0][0] < situation.at_s - DOWN_S:
            past.popleft()
        if wanted > have:
            return min(wanted, max(2 * have, have + HPA_PODS))
        return min(have, max(count for _, count in past))


class Kpa:
    """Limits are for each role, least and most."""

    def __init__(self, targets: Mapping[Role, float], limits: tuple[int, int]) -> None:
        self._targets = targets
        self._limits = limits
        self._seen: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in ROLES}
        self._panic_until_s = dict.fromkeys(ROLES, 0.0)
        self._lower_since_s: dict[Role, float | None] = dict.fromkeys(ROLES)

    def decide(self, situation: PoolObservation) -> Counts:
        return {role: self._one(situation, role) for role in ROLES}

    def _one(self, situation: PoolObservation, role: Role) -> int:
        now_s, have = situation.at_s, situation.current_replicas[role]
        value = queue_length(situation, role)
        if value is None:
            return have
        seen, target = self._seen[role], self._targets[role]
        seen.append((now_s, value))
        while seen[0][0] <= now_s - KPA_STABLE_S:
            seen.popleft()
        live = sum(n.role == role and n.phase is Phase.READY for n in situation.nodes)
        stable = kpa_count(mean_since(seen, now_s - KPA_STABLE_S), target, live)
        panic = kpa_count(mean_since(seen, now_s - KPA_PANIC_S), target, live)
        if panic >= KPA_PANIC * max(1, live):
            self._panic_until_s[role] = now_s + KPA_STABLE_S
        if now_s < self._panic_until_s[role]:
            self._lower_since_s[role] = None
            return self._within(max(have, panic))
        if abs(stable - have) <= TOLERANCE * have:
            self._lower_since_s[role] = None
            return have
        return self._within(stable if stable > have else self._lower(role, now_s, have, stable))

    def _lower(self, role: Role, now_s: float, have: int, wanted: int) -> int:
        """Only after some quiet."""
        since_s = self._lower_since_s[role]
        if since_s is None:
            self._lower_since_s[role] = since_s = now_s
        return wanted if now_s - since_s >= DOWN_S else have

    def _within(self, count: int) -> int:
        return min(self._limits[1], max(self._limits[0], count))


def hpa_count(value: float, target: float, have: int) -> int:
    """What Kubernetes would ask for, before its limits on behaviour."""
    if have and abs(value / (target * have) - 1.0) <= TOLERANCE:
        return have
    return math.ceil(value / target)


def kpa_count(value: float, target: float, live: int) -> int:
    """At most twice and at least half of the ready nodes."""
    wanted = math.ceil(value / target)
    return max(math.floor(live / KPA_RATE), min(wanted, math.ceil(max(1, live) * KPA_RATE)))


def mean_since(seen: deque[tuple[float, float]], since_s: float) -> float:
    """Of the values after that time; the newest is always one of them."""
    values = [value for at_s, value in seen if at_s > since_s]
    return sum(values) / len(values)


def queue_length(situation: PoolObservation, role: Role) -> float | None:
    """Requests that the role's nodes have, waiting and running, and for prefill those that routers
    hold; None when no fresh number is there."""
    demand = situation.demand
    if demand is None or demand.age_s > STALE_S:
        return None
    nodes = [node for node in situation.nodes if node.role == role and node.running is not None]
    held = demand.held or 0
    return float(held + sum((node.running or 0) + (node.waiting or 0) for node in nodes))
