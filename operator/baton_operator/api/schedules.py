"""The spec's `autoscaling.schedules`: windows of time with bounds of their own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args
from zoneinfo import ZoneInfo

from msgspec import Meta, field

from baton_operator.api.cel import CelRule, matches, ruled
from baton_operator.api.fields import MOST_NODES
from baton_operator.api.record import Record

Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = get_args(Day)
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


def minutes_of(name: str, clock: str) -> int:
    """Minutes since midnight. Raise ValueError if `clock` is not a time of day."""
    hours, _, minutes = clock.partition(":")
    if not (hours.isdecimal() and minutes.isdecimal() and int(hours) < 24 and int(minutes) < 60):
        raise ValueError(f'{name}: {clock!r} is not a time of day; write "00:00" to "23:59"')
    return 60 * int(hours) + int(minutes)


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
