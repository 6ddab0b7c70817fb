"""The spec's `autoscaling`: who sets the number of nodes, and within which bounds.

In: what a user wrote. Out: records from which `autoscaling.policy` builds the planner's policy. A
field that the user leaves out has a default here, or turns its feature off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, get_args
from zoneinfo import ZoneInfo

from msgspec import Meta, field

from baton_operator.api.cel import CelRule, matches, quoted, ruled
from baton_operator.api.fields import MOST_NODES
from baton_operator.api.record import Record
from baton_operator.api.resources import Quantity, check_quantity
from baton_protocol.store import ROLES, Role

PlannedMode = Literal["auto", "advise"]
Mode = Literal[PlannedMode, "external"]
RoleMode = Literal["external"]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = get_args(Day)

_DECIMAL = r"[0-9]{1,4}(\.[0-9]{1,3})?"
# Strings are allowed because the Kubernetes API conventions advise against floating-point numbers.
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
    """CEL that converts a Decimal to a number. The Decimal's own rule rejects anything else."""
    return f"double(string(self.{path}))"


def minutes_of(name: str, clock: str) -> int:
    """Minutes since midnight. Raise ValueError if `clock` is not a time of day."""
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
            f"!has(self.max) || {_number('max')} > 0.0",
            "0 allows no prefill node; write a number above 0",
            field=".max",
        ),
        CelRule(
            f"!has(self.min) || !has(self.max) || {_number('min')} <= {_number('max')}",
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
        _check_decimal("min", self.min)
        _check_decimal("max", self.max)


class ScaleUpSpec(Record, frozen=True, kw_only=True):
    """How fast nodes are added."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            # The API server also checks the default object {}, before `factor` has its default.
            f"!has(self.factor) || {_number('factor')} > 1.0",
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
        _check_decimal("factor", self.factor)


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


class ScheduleBounds(Record, frozen=True, kw_only=True):
    """A role's bounds while a schedule is active."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "above max; write a min that is at most max",
            field=".min",
        ),
    )

    min: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MOST_NODES,
                description=(
                    "Minimum number of nodes while the window applies, if higher than the "
                    "usual minimum."
                ),
            ),
        ]
        | None
    ) = None
    max: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MOST_NODES,
                description=(
                    "Maximum number of nodes while the window applies, if lower than the usual "
                    "maximum."
                ),
            ),
        ]
        | None
    ) = None


class ScheduleSpec(Record, frozen=True, kw_only=True):
    """A daily time window with its own bounds."""

    days: Annotated[
        tuple[Day, ...],
        Meta(max_length=7, description="Days on which the window starts. Empty: every day."),
    ] = ()
    begin: Annotated[Clock, Meta(description="Time of day at which the window starts.")] = field(
        name="from"
    )
    end: Annotated[
        Clock,
        Meta(
            description="Time of day at which the window ends. It ends on the next day if this is"
            " not after `from`."
        ),
    ] = field(name="to")
    time_zone: Annotated[
        TimeZone, Meta(description="Time zone of `from` and `to`, from the tz database.")
    ] = "UTC"
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


# Ratios have three digits, so their products with counts differ by at least 0.001.
ROUNDING = "0.0001"
# CEL: the planner sets the counts of both roles, so their bounds and the ratio apply together.
_BOTH = " && ".join(
    ["self.mode != 'external'"]
    + [f"has(self.{role}) && !has(self.{role}.mode) && has(self.{role}.max)" for role in ROLES]
)


def _unless_both(claim: str, part: str) -> str:
    return f"!({_BOTH} && has(self.{part})) || ({claim})"


def _each_schedule(claim: str) -> str:
    return f"self.schedules.all(one, {claim})"


def _ratio_rules() -> tuple[CelRule, ...]:
    """A ratio that no allowed numbers of nodes can have: it is the smallest with the most decode
    and the fewest prefill nodes. A role without prefill nodes has no ratio."""
    too_low = f"double(self.prefill.max) + {ROUNDING} >= {_number('ratio.min')} * double({{}})"
    too_high = f"double({{}}) <= {_number('ratio.max')} * double(self.decode.max) + {ROUNDING}"
    none = "self.prefill.max <= 0"
    least = (
        "prefill.max allows fewer prefill nodes than ratio.min times {}; "
        "write a smaller ratio.min or a larger prefill.max"
    )
    most = (
        "{0} is more than ratio.max times decode.max; write a smaller {0}, or a larger "
        "ratio.max or decode.max"
    )
    rows = (
        ("min", too_low, "self.decode.min", "decode.min", least),
        ("max", too_high, "self.prefill.min", "prefill.min", most),
    )
    rules = []
    for side, claim, own, name, message in rows:
        role = name.partition(".")[0]
        at = f".ratio.{side}"
        guard = f"!has(self.ratio.{side}) || {none} || "
        in_window = f"!has(one.{role}) || !has(one.{role}.min) || {claim.format(f'one.{role}.min')}"
        rules += [
            CelRule(
                _unless_both(guard + claim.format(own), "ratio"),
                message.format(name),
                field=at,
            ),
            CelRule(
                _unless_both(
                    f"{guard}!has(self.schedules) || {_each_schedule(in_window)}", "ratio"
                ),
                message.format(f"{name} of a window in schedules"),
                field=at,
            ),
        ]
    return tuple(rules)


def _window_rules() -> Iterator[CelRule]:
    """A window's bound beyond the role's own one would have no effect."""
    rows = (
        (
            "min",
            "max",
            "<=",
            "is above {role}.max, so it cannot apply; write a smaller one, or a larger {role}.max",
        ),
        (
            "max",
            "min",
            ">=",
            "is below {role}.min, so it cannot apply; write a larger one, or a smaller {role}.min",
        ),
    )
    for role in ROLES:
        for side, other, relation, remedy in rows:
            bound = f"one.{role}.{side}"
            known = f"!has(one.{role}) || !has({bound})"
            claim = _each_schedule(f"{known} || {bound} {relation} self.{role}.{other}")
            applies = (
                f"self.mode != 'external' && has(self.schedules) && has(self.{role})"
                f" && !has(self.{role}.mode) && has(self.{role}.{other})"
            )
            yield CelRule(
                f"!({applies}) || {claim}",
                f"a window's {role}.{side} {remedy.format(role=role)}",
                field=".schedules",
            )


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
            "for a pool that may sleep",
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
        *_ratio_rules(),
        *_window_rules(),
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
        found = {"prefill": self.prefill, "decode": self.decode}[role]
        return found if found is not None else RoleBounds()

    def is_external(self, role: Role) -> bool:
        """Whether the role's PoolScaler sets its number of nodes."""
        return self.mode == "external" or self.bounds(role).mode == "external"

    @property
    def is_planned(self) -> bool:
        """Whether the planner runs for the pool, in mode `auto` or `advise`."""
        return self.mode != "external" and not all(map(self.is_external, ROLES))

    @property
    def sleeps(self) -> bool:
        """Whether the pool may scale to zero nodes."""
        return self.mode == "auto" and self.scale_to_zero_after_seconds is not None
