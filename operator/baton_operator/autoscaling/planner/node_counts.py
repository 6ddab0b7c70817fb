"""Counts of one role's nodes: serving, starting, draining, and with fresh reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton_operator.autoscaling.planner.records import NodeView, Phase, Situation
from baton_protocol.store import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCounts:
    role: Role
    desired: int
    ready: tuple[NodeView, ...]
    coming: tuple[NodeView, ...]  # pending or starting
    draining: tuple[NodeView, ...]
    stale_after_s: float

    @property
    def alive(self) -> int:
        """Number of nodes that stay."""
        return len(self.ready) + len(self.coming)

    @property
    def held(self) -> int:
        """Nodes that hold GPUs, or will soon, without a new decision."""
        return max(self.desired, self.alive) + len(self.draining)

    @property
    def silent(self) -> tuple[str, ...]:
        """Ready nodes without a fresh report."""
        return tuple(
            node.name
            for node in self.ready
            if node.age_s is None or node.age_s > self.stale_after_s
        )

    def total(self, gauge: Callable[[NodeView], float | None]) -> float | None:
        """Sum of a gauge over the ready nodes; None if one of them did not report it."""
        return None if self.silent else _total(gauge(node) for node in self.ready)


def _total(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def fleet_of(role: Role, situation: Situation, stale_after_s: float) -> RoleCounts:
    nodes = [node for node in situation.nodes if node.role == role]
    return RoleCounts(
        role=role,
        desired=situation.desired.get(role, 0),
        ready=tuple(node for node in nodes if node.phase == Phase.READY),
        coming=tuple(node for node in nodes if node.phase in (Phase.PENDING, Phase.STARTING)),
        draining=tuple(node for node in nodes if node.phase == Phase.DRAINING),
        stale_after_s=stale_after_s,
    )
