"""Inputs and outputs of the planner. Plain values: no clock, no cluster, no I/O.

In one line:  plan(Situation, Policy, Memory) -> (Decision, Memory)

All rates are per second, times in seconds unless the name says otherwise, sizes in tokens or
blocks. None means "not known": the planner never reads it as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class NodeView:
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
class Bounds:
    """Bounds of one role. `gpus` is per node."""

    minimum: int = 1
    maximum: int = 1
    gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A daily window that raises minima or lowers maxima, in minutes of the day in the policy's
    time zone (the caller converts). `days`: those on which it starts, 0 (Monday) to 6. It ends on
    the next day if `to_minute` is not after `from_minute`. If two windows overlap, the later one in
    the list wins, per role and bound."""

    days: frozenset[int]
    from_minute: int
    to_minute: int
    minimum: Mapping[Role, int] = field(default_factory=dict)
    maximum: Mapping[Role, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the pool's owner wants."""

    bounds: Mapping[Role, Bounds]
    ttft_s: float = 2.0
    itl_s: float = 0.05
    percentile: float = 0.99  # share of the requests that must meet the targets
    gpu_budget: int | None = None  # GPUs of both roles together
    ratio_min: float | None = None  # prefill nodes per decode node
    ratio_max: float | None = None
    scale_to_zero_after_s: float | None = None  # None: never
    up_stabilisation_s: float = 0.0
    down_stabilisation_s: float = 300.0
    up_step: float = 2.0  # a step grows a role to at most this many times its nodes, at least by 1
    down_step: int = 1  # nodes per role and decision
    stale_after_s: float = 30.0  # older observations are stale
    headroom: float = 0.2  # share of a node's capability that is kept free
    schedules: tuple[Schedule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All inputs of one decision. `minute_of_week` is local to the policy's time zone, from Monday
    00:00. `desired`: what the workloads are set to, without nodes that drain to be removed.
    `rolling`: a roll-out runs. `holds`: routers hold requests that arrive while there is no
    node."""

    at_s: float
    nodes: tuple[NodeView, ...]
    desired: Mapping[Role, int]
    demand: Demand | None
    capability: Capability | None
    minute_of_week: int = 0
    rolling: bool = False
    holds: bool = True


class Reason(StrEnum):
    """Why a decision is what it is: the rule that bound it last. `reasons.py` explains each."""

    # The load.
    STEADY = "Steady"
    DEMAND_ROSE = "DemandRose"
    TREND_ROSE = "TrendRose"
    BACKLOG_GREW = "BacklogGrew"
    TARGET_MISSED = "TargetMissed"
    TARGET_UNREACHABLE = "TargetUnreachable"
    DEMAND_FELL = "DemandFell"
    STORE_LIMITED = "StoreLimited"
    CAPACITY_COMING = "CapacityComing"
    # Unknown inputs.
    DEMAND_UNKNOWN = "DemandUnknown"
    DEMAND_STALE = "DemandStale"
    CAPABILITY_UNKNOWN = "CapabilityUnknown"
    NODES_SILENT = "NodesSilent"
    # The owner's limits.
    AT_MINIMUM = "AtMinimum"
    AT_MAXIMUM = "AtMaximum"
    SCHEDULE_MINIMUM = "ScheduleMinimum"
    SCHEDULE_MAXIMUM = "ScheduleMaximum"
    RATIO_RAISED = "RatioRaised"
    RATIO_LIMITED = "RatioLimited"
    BUDGET_LIMITED = "BudgetLimited"
    BUDGET_SHIFT = "BudgetShift"
    BUDGET_WAITS = "BudgetWaits"
    BUDGET_TOO_SMALL = "BudgetTooSmall"
    # Rates.
    UP_STABILISING = "UpStabilising"
    UP_STEP = "UpStep"
    DOWN_STABILISING = "DownStabilising"
    DOWN_STEP = "DownStep"
    CONSOLIDATION_REFUSED = "ConsolidationRefused"
    DRAIN_RUNNING = "DrainRunning"
    ROLL_OUT_RUNNING = "RollOutRunning"
    # Scale to zero and wake-up.
    IDLE = "Idle"
    ASLEEP = "Asleep"
    WOKEN = "Woken"


MOVE = " -> "  # in a decision's message, between the counts of a role that changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`numbers`: the inputs and intermediate results behind the reason, by name, for people."""

    prefill: int
    decode: int
    reason: Reason
    message: str
    numbers: Mapping[str, float]
    acts: bool  # the counts differ from the current desired ones
