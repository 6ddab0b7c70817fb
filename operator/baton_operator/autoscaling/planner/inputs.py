"""What the planner decides from: observations of a pool, and what its owner wants.

In one line:  plan_replicas(PoolObservation, AutoscalingPolicy, PlannerMemory) -> Decision, memory

Plain values: no clock, no cluster, no I/O. All rates are per second, times in seconds unless the
name says otherwise, sizes in tokens or blocks. None means "not known": the planner never reads it
as zero. A replica is a node of a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton_protocol.store import Role


class Phase(StrEnum):
    """A node's phase, from the cluster and from its own report."""

    PENDING = "pending"  # the pod is not scheduled
    STARTING = "starting"  # loads its model
    READY = "ready"
    DRAINING = "draining"  # takes no new requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """One node. Its gauges are from its newest report, `age_s` old; without a report they are None.
    `since_s`: seconds in its phase."""

    name: str
    role: Role
    phase: Phase
    since_s: float = 0.0
    age_s: float | None = None
    queued_tokens: int | None = None  # prompt tokens that are not computed yet
    running: int | None = None
    waiting: int | None = None
    kv_tokens: int | None = None  # in use by live requests
    kv_capacity: int | None = None  # tokens
    asleep: bool = False  # ready, but its engine sleeps until a request needs it
    busy: float | None = None  # share of the last window in which its engine worked, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Clients' demand, from routers and nodes. `requests`, tokens and bytes are means per second
    over the last `window_s`; the other numbers are current. `held`: requests that wait in routers
    because no node can take them."""

    window_s: float
    age_s: float
    requests: float | None = None
    prompt_tokens: float | None = None
    uncached_prompt_tokens: float | None = None  # after hits in nodes' caches and in the store
    output_tokens: float | None = None
    live_requests: int | None = None  # being generated now, or waiting for a decode node's KV
    live_kv_tokens: int | None = None
    held: int | None = None
    idle_s: float | None = None  # seconds since the last request
    store_read_bytes: float | None = None
    ttft_s: float | None = None  # the measured percentile of the target
    itl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one node of each role can do, learnt from the nodes' reports; the prior is what they
    measured at their start. `samples`: number of step samples behind it (0: only the prior).

    A decode step takes `step_base_s + batch * step_per_seq_s + kv_tokens * step_per_kv_token_s`.
    """

    prefill_tokens: float  # per second, one busy prefill node
    step_base_s: float
    step_per_seq_s: float = 0.0
    step_per_kv_token_s: float = 0.0
    kv_capacity: int | None = None  # tokens that fit a decode node's cache
    start_s: float = 60.0  # from a pod's creation to its first request
    samples: int = 0
    store_read_limit: float | None = None  # bytes per second from all data servers, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRange:
    """Minimum and maximum of one role's replicas. `gpus` is per node. The rest is what schedules
    did: `*_is_scheduled` if one changed the owner's own number, `keeps_awake` if one wants nodes.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    gpus: int = 1
    min_is_scheduled: bool = False
    max_is_scheduled: bool = False
    keeps_awake: bool = False

    def clamp(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRange:
    """What an active schedule sets: it raises minima and lowers maxima."""

    min_replicas: Mapping[Role, int] = field(default_factory=dict)
    max_replicas: Mapping[Role, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingPolicy:
    """What the pool's owner wants. `ranges` are without schedules. Of `active_schedules` the later
    one in the list wins, per role and bound."""

    ranges: Mapping[Role, ReplicaRange]
    ttft_s: float = 2.0
    itl_s: float = 0.05
    percentile: float = 0.99  # share of the requests that must meet the targets
    gpu_budget: int | None = None  # GPUs of both roles together
    ratio_min: float | None = None  # prefill nodes per decode node
    ratio_max: float | None = None
    scale_to_zero_after_s: float | None = None  # None: never
    up_stabilization_s: float = 0.0
    down_stabilization_s: float = 300.0
    up_factor: float = (
        2.0  # a step grows a role to at most this many times its nodes, at least by 1
    )
    down_nodes: int = 1  # nodes per role and decision
    stale_after_s: float = 30.0  # older observations are stale
    headroom: float = 0.2  # share of a node's capability that is kept free
    active_schedules: tuple[ScheduledRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """A pool at one moment. `current_replicas`: what the workloads are set to, without nodes that
    drain to be removed. `rolling`: a roll-out runs. `routers_hold`: routers hold requests that
    arrive while there is no node."""

    at_s: float
    nodes: tuple[ObservedNode, ...]
    current_replicas: Mapping[Role, int]
    demand: Demand | None
    capability: Capability | None
    rolling: bool = False
    routers_hold: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNodes:
    """The nodes of one role by phase, and sums of their gauges."""

    role: Role
    current_replicas: int
    ready: tuple[ObservedNode, ...]
    starting: tuple[ObservedNode, ...]  # or pending
    draining: tuple[ObservedNode, ...]
    stale_after_s: float

    @property
    def staying(self) -> int:
        """Number of nodes that do not drain."""
        return len(self.ready) + len(self.starting)

    @property
    def existing(self) -> int:
        """Nodes that stay if nothing shrinks, those that are not created yet included."""
        return max(self.current_replicas, self.staying)

    @property
    def gpu_holders(self) -> int:
        """Nodes that hold GPUs, or will soon, without a new decision."""
        return self.existing + len(self.draining)

    @property
    def silent(self) -> tuple[str, ...]:
        """Ready nodes without a fresh report."""
        return tuple(
            node.name
            for node in self.ready
            if node.age_s is None or node.age_s > self.stale_after_s
        )

    def total(self, gauge: Callable[[ObservedNode], float | None]) -> float | None:
        """Sum of a gauge over the ready nodes; None if one of them did not report it."""
        return None if self.silent else _sum_known(gauge(node) for node in self.ready)


def nodes_of_role(role: Role, observation: PoolObservation, stale_after_s: float) -> RoleNodes:
    nodes = [node for node in observation.nodes if node.role == role]
    return RoleNodes(
        role=role,
        current_replicas=observation.current_replicas.get(role, 0),
        ready=tuple(node for node in nodes if node.phase == Phase.READY),
        starting=tuple(node for node in nodes if node.phase in (Phase.PENDING, Phase.STARTING)),
        draining=tuple(node for node in nodes if node.phase == Phase.DRAINING),
        stale_after_s=stale_after_s,
    )


def _sum_known(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
