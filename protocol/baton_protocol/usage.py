"""What a pool's books hold: where the time of nodes went, and which tokens tenants used.

TimeSpent    milliseconds of steps that a node spent on one request, by cause
TimeRow      milliseconds that a node spent on one tenant for one cause
NodeTime     all rows of a node's engine since it became ready
TokenRow     a tenant's calls and tokens of one model
UsageEntry   index: what one start of a node or of a router adds to the books of one day

A node divides the time of each step among the tokens that the step computes. All other time is
idle, so the rows of a node add up to the time since its engine became ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from baton_protocol.figures import Count, Milliseconds, Text

USAGE_PATH = "/usage"  # of routers, and of nodes, which answer with a UsageEntry as JSON
# Why a node was busy. "prefill" and "decode" are work that each request needs once. "lost": tokens
# that an attempt before may have computed, whose node was lost or drained. "evicted": tokens that
# this node had computed for the request before it took its blocks for another one.
BusyCause = Literal["prefill", "decode", "lost", "evicted"]
TimeCause = Literal[BusyCause, "idle"]
BUSY_CAUSES: tuple[BusyCause, ...] = get_args(BusyCause)
TIME_CAUSES: tuple[TimeCause, ...] = (*BUSY_CAUSES, "idle")
# Tenants of one node or router with rows of their own; later ones share OTHER_TENANTS.
MAX_TENANTS = 1000
OTHER_TENANTS = "(other)"
MAX_ROWS = (MAX_TENANTS + 1) * 8
R = TypeVar("R", "TimeRow", "TokenRow")


class TimeSpent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Milliseconds of steps of one node for one request, by cause."""

    prefill_ms: Milliseconds = 0.0
    decode_ms: Milliseconds = 0.0
    lost_ms: Milliseconds = 0.0
    evicted_ms: Milliseconds = 0.0


class TimeRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nobody's time is idle: such a row has no tenant."""

    tenant: Text
    cause: TimeCause
    ms: Milliseconds


class NodeTime(msgspec.Struct, frozen=True, tag="time"):
    """The time of a node's engine since it was ready: `wall_ms` by its clock, and the rows."""

    wall_ms: Milliseconds = 0.0
    rows: Annotated[tuple[TimeRow, ...], Meta(max_length=MAX_ROWS)] = ()


class TokenRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`model` is "" for calls that ended before one was chosen. `errors` counts calls that ended
    with an error; a client that left is none. Tokens are those of the answers' `usage`, and of
    calls that ended early those until then. `cached_tokens` are among the prompt tokens."""

    tenant: Text
    model: Text
    calls: Count = 0
    errors: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0


class UsageEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`name` is the node's or the router's. `role` and `model` are a node's, as `wall_ms` and
    `times`; `tokens` are a router's."""

    name: Text
    role: Text = ""
    model: Text = ""
    wall_ms: Milliseconds = 0.0
    times: Annotated[tuple[TimeRow, ...], Meta(max_length=MAX_ROWS)] = ()
    tokens: Annotated[tuple[TokenRow, ...], Meta(max_length=MAX_ROWS)] = ()

    def since(self, earlier: UsageEntry) -> UsageEntry:
        """What was added since this earlier state of the same entry."""
        return msgspec.structs.replace(
            self,
            wall_ms=max(0.0, self.wall_ms - earlier.wall_ms),
            times=_added(self.times, earlier.times),
            tokens=_added(self.tokens, earlier.tokens),
        )


def _added(now: Sequence[R], before: Sequence[R]) -> tuple[R, ...]:
    """The rows with their numbers less those of the earlier row of the same names. Rows of zeros
    are left out."""
    known = {row_names(row): row for row in before}
    added: list[R] = []
    for row in now:
        earlier = known.get(row_names(row))
        numbers = {
            name: max(0, value - (getattr(earlier, name) if earlier is not None else 0))
            for name, value in msgspec.structs.asdict(row).items()
            if not isinstance(value, str)
        }
        if any(numbers.values()):
            added.append(msgspec.structs.replace(row, **numbers))
    return tuple(added)


def row_names(row: TimeRow | TokenRow) -> tuple[str, str]:
    return (row.tenant, row.cause if isinstance(row, TimeRow) else row.model)
