"""The spec's `autoscaling`: who says how many nodes there are, and within which bounds.

In: what a user wrote. Out: records that `autoscaling.policy` makes the planner's rules from. What
is left out is said here by a default, or is not asked for at all.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args
from zoneinfo import ZoneInfo

from msgspec import Meta, field

from baton_operator.api.fields import (
    CelRule,
    Quantity,
    Record,
    check_quantity,
    matches,
    quoted,
    ruled,
)
from baton_protocol.store import ROLES, Role

PlannedMode = Literal["auto", "advise"]
Mode = Literal[PlannedMode, "external"]
RoleMode = Literal["external"]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = get_args(Day)

_DECIMAL = r"[0-9]{1,4}(\.[0-9]{1,3})?"
# Texts, since Kubernetes wants no fractions in numbers that are compared.
Decimal = Annotated[
    int | Annotated[str, Meta(max_length=8)],
    ruled(
        CelRule(
            f"string(self).matches({quoted(f'^{_DECIMAL}$')})",
            'not a decimal; write a number as a text, such as "0.5" or "2"',
        )
    ),
]
Clock = Annotated[
    str,
    ruled(
        CelRule(
            matches("([01][0-9]|2[0-3]):[0-5][0-9]"),
            'not a time of day; write "00:00" to "23:59"',
        ),
        max_length=5,
    ),
]
TimeZone = Annotated[
    str,
    ruled(
        CelRule(
            matches("[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*"),
            "not a time zone; write one of the tz database, such as Europe/Berlin or UTC",
        ),
        max_length=64,
    ),
]


def _number(path: str) -> str:
    """CEL: a Decimal as a number; the rule of the value itself refuses what is none."""
    return f"double(string(self.{path}))"


def minutes_of(name: str, clock: str) -> int:
    """Of the day; raise ValueError."""
    hours, _, minutes = clock.partition(":")
    if not (hours.isdecimal() and minutes.isdecimal() and int(hours) < 24 and int(minutes) < 60):
        raise ValueError(f'{name}: {clock!r} is not a time of day; write "00:00" to "23:59"')
    return 60 * int(hours) + int(minutes)


def _check_decimal(name: str, number: int | str | None) -> None:
    try:
        float(number or 0)
    except ValueError as error:
        raise ValueError(
            f'{name}: {number!r} is not a decimal; write a number as a text, such as "0.5"'
        ) from error


class TargetsSpec(Record, frozen=True, kw_only=True):
    """What users are to feel; nodes are added until they do."""

    ttft_ms: Annotated[int, Meta(ge=1, description="to the first token, milliseconds")] = 2000
    itl_ms: Annotated[int, Meta(ge=1, description="between two tokens, milliseconds")] = 50
    percentile: Annotated[
        int, Meta(ge=50, le=99, description="of requests and tokens that are to hold them")
    ] = 99


class RoleBounds(Record, frozen=True, kw_only=True):
    """How many nodes a role may have."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.max) || self.min <= self.max",
            "over max; write a min that is at most max",
            field=".min",
        ),
    )

    min: Annotated[int, Meta(ge=0, description="at least; 0 for prefill only")] = 1
    max: (
        Annotated[int, Meta(ge=0, description="at most; needed unless a PoolScaler says how many")]
        | None
    ) = None
    mode: (
        Annotated[
            RoleMode,
            Meta(
                description="external: this role's PoolScaler says how many, for HPA, KEDA and"
                " `kubectl scale`, whatever autoscaling.mode is; default: as autoscaling.mode"
            ),
        ]
        | None
    ) = None


class RatioSpec(Record, frozen=True, kw_only=True):
    """Prefill nodes per decode node."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!has(self.max) || {_number('max')} > 0.0",
            "0 allows no prefill node; write a number above it",
            field=".max",
        ),
        CelRule(
            f"!has(self.min) || !has(self.max) || {_number('min')} <= {_number('max')}",
            "over max; write a min that is at most max",
            field=".min",
        ),
    )

    min: Annotated[Decimal, Meta(description="at least")] | None = None
    max: Annotated[Decimal, Meta(description="at most")] | None = None

    def __post_init__(self) -> None:
        _check_decimal("min", self.min)
        _check_decimal("max", self.max)


class ScaleUpSpec(Record, frozen=True, kw_only=True):
    """How fast nodes are added."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            # It is there by default, but not yet where that default itself is checked.
            f"!has(self.factor) || {_number('factor')} > 1.0",
            "adds nothing; write a number above 1",
            field=".factor",
        ),
    )

    stabilization_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="more is needed for so long before it is added")
    ] = 0
    factor: Annotated[
        Decimal, Meta(description="to at most so many times the nodes there are, at once")
    ] = 2

    def __post_init__(self) -> None:
        _check_decimal("factor", self.factor)


class ScaleDownSpec(Record, frozen=True, kw_only=True):
    """How fast nodes are taken away."""

    stabilization_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="fewer would do for so long before one goes")
    ] = 300
    nodes: Annotated[int, Meta(ge=1, description="of a role at once, at most")] = 1


class ScheduleBounds(Record, frozen=True, kw_only=True):
    """A role's bounds while a schedule holds."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "over max; write a min that is at most max",
            field=".min",
        ),
    )

    min: Annotated[int, Meta(ge=0, description="at least, where it is more than else")] | None = (
        None
    )
    max: Annotated[int, Meta(ge=0, description="at most, where it is less than else")] | None = None


class ScheduleSpec(Record, frozen=True, kw_only=True):
    """A window of some days with bounds of its own."""

    days: Annotated[
        tuple[Day, ...], Meta(max_length=7, description="on which it begins; none given: each day")
    ] = ()
    begin: Annotated[Clock, Meta(description="when it begins")] = field(name="from")
    end: Annotated[
        Clock, Meta(description="when it ends; on the next day where that is not after `from`")
    ] = field(name="to")
    time_zone: Annotated[TimeZone, Meta(description="of both, by the tz database")] = "UTC"
    prefill: ScheduleBounds | None = None
    decode: ScheduleBounds | None = None

    def __post_init__(self) -> None:
        minutes_of("from", self.begin)
        minutes_of("to", self.end)
        try:
            ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"timeZone: {self.time_zone!r} is not known; write one of the tz database, such as"
                " Europe/Berlin or UTC"
            ) from error


class AutoscalingSpec(Record, frozen=True, kw_only=True):
    """How many nodes there are, by what users feel or by somebody else's word."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        *(
            CelRule(
                f"self.mode == 'external' || (has(self.{role}) && (has(self.{role}.mode)"
                f" || has(self.{role}.max)))",
                f"nobody says how many nodes there may be; write {role}.max, or {role}.mode:"
                " external",
                field=f".{role}",
            )
            for role in ROLES
        ),
        CelRule(
            "!has(self.decode) || self.decode.min >= 1",
            "0: nobody could answer; write at least 1, and for a pool that may sleep"
            " scaleToZeroAfterSeconds",
            field=".decode",
        ),
        CelRule(
            "!has(self.scaleToZeroAfterSeconds) || (self.mode != 'external'"
            " && !(has(self.prefill) && has(self.prefill.mode))"
            " && !(has(self.decode) && has(self.decode.mode)))",
            "somebody else says how many nodes there are; leave it out, or write mode: auto for"
            " both roles",
            field=".scaleToZeroAfterSeconds",
        ),
    )

    mode: Annotated[
        Mode,
        Meta(
            description="who says how many nodes there are. auto: the operator, as many as hold the"
            " targets; advise: the roles' `replicas`, and the operator only writes into the status"
            " how many it would have; external: the PoolScalers POOL-prefill and POOL-decode, for"
            " HPA, KEDA and `kubectl scale`"
        ),
    ]
    targets: TargetsSpec = TargetsSpec()
    prefill: RoleBounds | None = None
    decode: RoleBounds | None = None
    ratio: RatioSpec | None = None
    scale_to_zero_after_seconds: (
        Annotated[
            int,
            Meta(ge=10, description="without a request for so long the pool has no nodes"),
        ]
        | None
    ) = None
    scale_up: ScaleUpSpec = ScaleUpSpec()
    scale_down: ScaleDownSpec = ScaleDownSpec()
    headroom_percent: Annotated[
        int, Meta(ge=0, le=80, description="of what a node can do that is kept free")
    ] = 20
    stale_after_seconds: Annotated[
        int, Meta(ge=10, description="what was heard longer ago changes nothing any more")
    ] = 30
    store_read_per_second: (
        Annotated[
            Quantity,
            Meta(
                description="bytes that the store's data servers give together at most; near it no"
                " prefill nodes are added"
            ),
        ]
        | None
    ) = None
    schedules: Annotated[
        tuple[ScheduleSpec, ...],
        Meta(max_length=16, description="of those that overlap the last one counts"),
    ] = ()

    def __post_init__(self) -> None:
        if self.store_read_per_second is not None:
            check_quantity("storeReadPerSecond", self.store_read_per_second)

    def bounds(self, role: Role) -> RoleBounds:
        found = {"prefill": self.prefill, "decode": self.decode}[role]
        return found if found is not None else RoleBounds()

    def is_external(self, role: Role) -> bool:
        """Its PoolScaler says its count."""
        return self.mode == "external" or self.bounds(role).mode == "external"

    @property
    def is_planned(self) -> bool:
        """The planner looks at the pool, be it only to say what it would do."""
        return self.mode != "external" and not all(map(self.is_external, ROLES))

    @property
    def sleeps(self) -> bool:
        """The pool may have no nodes."""
        return self.mode == "auto" and self.scale_to_zero_after_seconds is not None
