"""The spec's `autoscaling`: who sets the number of nodes, and within which bounds.

In: what a user wrote. Out: records from which `autoscaling.policy` builds the planner's policy. A
field that the user leaves out has a default here, or turns its feature off.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from baton_operator.api.autoscaling_rules import ratio_rules, window_rules
from baton_operator.api.cel import CelRule
from baton_operator.api.decimals import Decimal, check_decimal, number_cel
from baton_operator.api.fields import MOST_NODES
from baton_operator.api.record import Record
from baton_operator.api.resources import Quantity, check_quantity
from baton_operator.api.schedules import ScheduleSpec
from baton_protocol.store import ROLES, Role

PlannedMode = Literal["auto", "advise"]
Mode = Literal[PlannedMode, "external"]
RoleMode = Literal["external"]


class TargetsSpec(Record, frozen=True, kw_only=True):
    """Latency targets. The planner adds nodes until the pool meets them."""

    ttft_ms: Annotated[
        int, Meta(ge=1, description="Target for the time to first token, in milliseconds.")
    ] = 2000
    itl_ms: Annotated[
        int, Meta(ge=1, description="Target for the time between two tokens, in milliseconds.")
    ] = 50
    percentile: Annotated[
        int,
        Meta(
            ge=50,
            le=99,
            description="Percentage of requests and tokens that must meet the targets.",
        ),
    ] = 99


class RoleBounds(Record, frozen=True, kw_only=True):
    """Bounds for the number of nodes of one role."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.max) || self.min <= self.max || self.max < 0",
            "above max; write a min that is at most max",
            field=".min",
        ),
    )

    min: Annotated[
        int,
        Meta(ge=0, le=MOST_NODES, description="Minimum number of nodes. Only prefill may have 0."),
    ] = 1
    max: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MOST_NODES,
                description="Maximum number of nodes. Required unless a PoolScaler sets the count.",
            ),
        ]
        | None
    ) = None
    mode: (
        Annotated[
            RoleMode,
            Meta(
                description="Who sets this role's number of nodes. external: its PoolScaler, for"
                " HPA, KEDA and `kubectl scale`, whatever autoscaling.mode is. Default: as"
                " autoscaling.mode."
            ),
        ]
        | None
    ) = None


class RatioSpec(Record, frozen=True, kw_only=True):
    """Bounds for the number of prefill nodes per decode node."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!has(self.max) || {number_cel('max')} > 0.0",
            "0 allows no prefill node; write a number above 0",
            field=".max",
        ),
        CelRule(
            f"!has(self.min) || !has(self.max) || {number_cel('min')} <= {number_cel('max')}",
            "above max; write a min that is at most max",
            field=".min",
        ),
    )

    min: (
        Annotated[Decimal, Meta(description="Minimum number of prefill nodes per decode node.")]
        | None
    ) = None
    max: (
        Annotated[Decimal, Meta(description="Maximum number of prefill nodes per decode node.")]
        | None
    ) = None

    def __post_init__(self) -> None:
        check_decimal("min", self.min)
        check_decimal("max", self.max)


class ScaleUpSpec(Record, frozen=True, kw_only=True):
    """How fast nodes are added."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            # The API server also checks the default object {}, before `factor` has its default.
            f"!has(self.factor) || {number_cel('factor')} > 1.0",
            "a factor of 1 or less adds no nodes; write a number above 1",
            field=".factor",
        ),
    )

    stabilization_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=3600,
            description="Seconds for which more nodes must be needed before nodes are added.",
        ),
    ] = 0
    factor: Annotated[
        Decimal,
        Meta(description="One step grows a role to at most this many times its current nodes."),
    ] = 2

    def __post_init__(self) -> None:
        check_decimal("factor", self.factor)


class ScaleDownSpec(Record, frozen=True, kw_only=True):
    """How fast nodes are removed."""

    stabilization_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=3600,
            description="Seconds for which fewer nodes must suffice before a node is removed.",
        ),
    ] = 300
    nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_NODES,
            description="Maximum number of nodes of a role removed in one step.",
        ),
    ] = 1


class AutoscalingSpec(Record, frozen=True, kw_only=True):
    """How the number of nodes is set: by the operator from latency targets, or from outside."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        *(
            CelRule(
                f"self.mode == 'external' || (has(self.{role}) && (has(self.{role}.mode)"
                f" || has(self.{role}.max)))",
                f"the number of nodes has no upper bound; write {role}.max, or {role}.mode: "
                "external",
                field=f".{role}",
            )
            for role in ROLES
        ),
        CelRule(
            "!has(self.decode) || self.decode.min != 0",
            "0 decode nodes cannot answer; write at least 1, or set scaleToZeroAfterSeconds "
            "for a pool that may have none",
            field=".decode",
        ),
        CelRule(
            "!has(self.scaleToZeroAfterSeconds) || (self.mode != 'external'"
            " && !(has(self.prefill) && has(self.prefill.mode))"
            " && !(has(self.decode) && has(self.decode.mode)))",
            "an external autoscaler sets a number of nodes; leave this field out, or write "
            "mode: auto for both roles",
            field=".scaleToZeroAfterSeconds",
        ),
        CelRule(
            "!has(self.sleepAfterSeconds) || !has(self.scaleToZeroAfterSeconds)"
            " || self.sleepAfterSeconds < self.scaleToZeroAfterSeconds",
            "the pool would have no nodes before they sleep; write fewer seconds than"
            " scaleToZeroAfterSeconds",
            field=".sleepAfterSeconds",
        ),
        *ratio_rules(),
        *window_rules(),
    )

    mode: Annotated[
        Mode,
        Meta(
            description="Who sets the number of nodes. auto: the operator, as many as meet the"
            " targets. advise: the roles' `replicas`; the operator only writes its own"
            " recommendation into the status. external: the PoolScalers POOL-prefill and"
            " POOL-decode, for HPA, KEDA and `kubectl scale`."
        ),
    ]
    targets: TargetsSpec = TargetsSpec()
    prefill: RoleBounds | None = None
    decode: RoleBounds | None = None
    ratio: RatioSpec | None = None
    scale_to_zero_after_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="Seconds without a request after which the pool scales to zero "
                "nodes. Default: it never does.",
            ),
        ]
        | None
    ) = None
    sleep_after_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="Seconds without a request after which the engines of all nodes sleep"
                " until one comes. The nodes stay. Default: they never sleep.",
            ),
        ]
        | None
    ) = None
    sleep_level: Annotated[
        int,
        Meta(
            ge=1,
            le=2,
            description="What sleeping engines give back. 1: KV, and weights go to host memory. 2:"
            " also the weights, which are loaded again.",
        ),
    ] = 1
    scale_up: ScaleUpSpec = ScaleUpSpec()
    scale_down: ScaleDownSpec = ScaleDownSpec()
    headroom_percent: Annotated[
        int, Meta(ge=0, le=80, description="Percentage of a node's capacity that is kept free.")
    ] = 20
    stale_after_seconds: Annotated[
        int,
        Meta(
            ge=10,
            description="Seconds after which reports are stale. Stale reports change no count.",
        ),
    ] = 30
    store_read_per_second: (
        Annotated[
            Quantity,
            Meta(
                description="Bytes per second that all data servers of the store deliver"
                " together. Near this limit the operator adds no prefill nodes. Default: no limit."
            ),
        ]
        | None
    ) = None
    schedules: Annotated[
        tuple[ScheduleSpec, ...],
        Meta(
            max_length=16,
            description="Time windows with their own bounds. If windows overlap, the last in this"
            " list wins.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.store_read_per_second is not None:
            check_quantity("storeReadPerSecond", self.store_read_per_second)

    def bounds(self, role: Role) -> RoleBounds:
        bounds = {"prefill": self.prefill, "decode": self.decode}[role]
        return bounds if bounds is not None else RoleBounds()

    def is_external(self, role: Role) -> bool:
        """Whether the role's PoolScaler sets its number of nodes."""
        return self.mode == "external" or self.bounds(role).mode == "external"

    @property
    def is_planned(self) -> bool:
        """Whether the planner runs for the pool, in mode `auto` or `advise`."""
        return self.mode != "external" and not all(map(self.is_external, ROLES))

    @property
    def scales_to_zero(self) -> bool:
        """Whether the pool may have no nodes."""
        return self.mode == "auto" and self.scale_to_zero_after_seconds is not None
