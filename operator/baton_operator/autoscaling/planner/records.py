"""What the planner is told and what it says. Plain values: no clock, no cluster, no I/O.

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
    """Of a node, as the cluster and its own report say."""

    PENDING = "pending"  # a pod that has no place yet
    STARTING = "starting"  # loads its model
    READY = "ready"
    DRAINING = "draining"  # takes nothing new


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node. Its gauges are those of its newest report, `age_s` old; without a report they are
    None. `since_s` is how long it has been in its phase."""

    name: str
    role: Role
    phase: Phase
    since_s: float = 0.0
    age_s: float | None = None
    queued_tokens: int | None = None  # prompt tokens known and not yet computed
    running: int | None = None
    waiting: int | None = None
    kv_tokens: int | None = None  # in use by live requests
    kv_capacity: int | None = None  # tokens
    busy: float | None = None  # share of the last window its engine was in steps, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What clients asked for, from routers and nodes: `requests`, the tokens and the bytes are per
    second, the mean of the last `window_s`; the other numbers are as of now. `held` requests wait
    in routers since no node can take them."""

    window_s: float
    age_s: float
    requests: float | None = None
    prompt_tokens: float | None = None
    uncached_prompt_tokens: float | None = None  # after hits in nodes' caches and in the store
    output_tokens: float | None = None
    live_requests: int | None = None  # being generated now, or waiting for a decode node's KV
    live_kv_tokens: int | None = None
    held: int | None = None
    idle_s: float | None = None  # since the last request
    store_read_bytes: float | None = None
    ttft_s: float | None = None  # the measured percentile that the target names
    itl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one node of each role can do, learnt from nodes' step times; the prior is what they
    measured at their start. `samples` is on how many steps it rests (0: the prior).

    A decode step takes `step_base_s + batch * step_per_seq_s + kv_tokens * step_per_kv_token_s`.
    """

    prefill_tokens: float  # per second, one busy prefill node
    step_base_s: float
    step_per_seq_s: float = 0.0
    step_per_kv_token_s: float = 0.0
    kv_capacity: int | None = None  # tokens that fit a decode node's cache
    start_s: float = 60.0  # from a pod's creation to its first request
    samples: int = 0
    store_read_limit: float | None = None  # bytes per second that the data servers give at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one role. GPUs are per node."""

    minimum: int = 1
    maximum: int = 1
    gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A window of some days, in minutes of the day in the policy's time zone (the caller converts),
    that raises minima or lowers maxima. `days` are those on which it begins, 0 (Monday) to 6; it
    ends on the next day where `to_minute` is not after `from_minute`. Of two that overlap the later
    in the list wins, each role and side by itself."""

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
    percentile: float = 0.99  # the share of requests that is to hold the targets
    gpu_budget: int | None = None  # of both roles together
    ratio_min: float | None = None  # prefill nodes per decode node
    ratio_max: float | None = None
    scale_to_zero_after_s: float | None = None  # None: never
    up_stabilisation_s: float = 0.0
    down_stabilisation_s: float = 300.0
    up_step: float = 2.0  # at most so many times the nodes there are, at once (and at least one)
    down_step: int = 1  # nodes per role and decision
    stale_after_s: float = 30.0  # observations older than that hold
    headroom: float = 0.2  # share of a node's capability that is kept free
    schedules: tuple[Schedule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything of one look. `minute_of_week` is local to the policy's time zone, Monday 00:00 is
    0. `desired` is what the workloads are set to now, less what drains in order to go; `rolling`
    while a roll-out runs; `holds`: requests that come while there is no node are held."""

    at_s: float
    nodes: tuple[NodeView, ...]
    desired: Mapping[Role, int]
    demand: Demand | None
    capability: Capability | None
    minute_of_week: int = 0
    rolling: bool = False
    holds: bool = True


class Reason(StrEnum):
    """Why a decision is what it is: the one rule that bound it last. `reasons.py` explains each."""

    # What the load asks for.
    STEADY = "Steady"
    DEMAND_ROSE = "DemandRose"
    TREND_ROSE = "TrendRose"
    BACKLOG_GREW = "BacklogGrew"
    TARGET_MISSED = "TargetMissed"
    TARGET_UNREACHABLE = "TargetUnreachable"
    DEMAND_FELL = "DemandFell"
    STORE_LIMITED = "StoreLimited"
    CAPACITY_COMING = "CapacityComing"
    # What is not known.
    DEMAND_UNKNOWN = "DemandUnknown"
    DEMAND_STALE = "DemandStale"
    CAPABILITY_UNKNOWN = "CapabilityUnknown"
    NODES_SILENT = "NodesSilent"
    # What the owner allows.
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
    # How fast.
    UP_STABILISING = "UpStabilising"
    UP_STEP = "UpStep"
    DOWN_STABILISING = "DownStabilising"
    DOWN_STEP = "DownStep"
    CONSOLIDATION_REFUSED = "ConsolidationRefused"
    DRAIN_RUNNING = "DrainRunning"
    ROLL_OUT_RUNNING = "RollOutRunning"
    # To zero and back.
    IDLE = "Idle"
    ASLEEP = "Asleep"
    WOKEN = "Woken"


MOVE = " -> "  # in a decision's message, between the counts of a role that changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`numbers` are what the reason rests on, by name, for people to read: demand, what one node
    can do, what would be needed, what limited it."""

    prefill: int
    decode: int
    reason: Reason
    message: str
    numbers: Mapping[str, float]
    acts: bool  # differs from what is desired now
