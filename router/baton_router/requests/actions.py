"""What a request's record asks its owner to do, in words that need no socket.

In: nothing. Out: the actions of `state`, and the causes for which a request is placed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import NodeId
from baton_protocol.link import Delta, RequestStats, ToNode
from baton_router.nodes.link import Loss
from baton_router.placement.policy import PredictionError

# Why a request is placed again: its node is lost, refused it, or drains, or its tokens had a gap.
Cause = Loss | Literal["refused", "drained", "gap"]


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """What the first tokens of an attempt show, or the first ones of its decode node. `pause_s`:
    since the client's last token before. `handoff_s`: since the decode node got the first tokens.
    `error`: the placement's prediction, and what it came to."""

    pause_s: float | None
    handoff_s: float | None
    error: PredictionError | None


@dataclass(frozen=True, slots=True)
class Emit:
    """New ids or text of one choice, for the client."""

    delta: Delta
    times: FirstTokenTimes | None = None


@dataclass(frozen=True, slots=True)
class Send:
    node: NodeId
    frame: ToNode


@dataclass(frozen=True, slots=True)
class Replace:
    """The attempt is over: find another place for the request. `node` is whose fault it was."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Regroup:
    """The prefill node is lost, or drains: find another pair, or tell the decode node with
    no_first()."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Measured:
    """How a node closed the gap. `opening`: it is the first of its attempt to say so."""

    stats: RequestStats
    attempt: int
    opening: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over; the client gets this error."""

    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over; every choice finished."""


Action = Emit | Send | Replace | Regroup | Measured | Failed | Ended
