"""The fault table: what is hit, when, and how. Data only; `runs` executes it.

In: nothing. Out: rows. A row checks its values when it is made: a misspelt one fails at collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

What = Literal["prefill", "decode", "all decode", "index", "data", "both"]
When = Literal[
    "job sent",  # the prefill node has its job; nothing is published
    "half published",  # some of the prompt's chunks exist, but not all
    "first computed",  # the prefill node has sent its answer, which is lost
    "first seen",  # the client has its first token
    "parked",  # the decode node has its job; no token exists
    "first sent",  # the router has sent the first token to the decode node, which is lost
    "mid-stream",
    "one left",  # the client lacks the last token
    "last lost",  # the decode node has sent the last token, which is lost
]
How = Literal[
    "kill",  # SIGKILL; a Redis comes back empty
    "kill engine",
    "freeze",  # SIGSTOP until the request is on another node; then SIGCONT
    "freeze engine",
    "blink",  # SIGSTOP for a second
    "cut",  # connections are reset, new ones too, until the request is on another node
    "blip",  # connections are reset once
    "hold",  # no data flows until the request is on another node
    "stutter",  # no data flows for a second
    "drain",  # a manual drain with deadline 0; resumed when the request is on another node
    "end",  # SIGTERM; requests that outlive the short drain deadline move
    "fill",  # Redis reaches maxmemory
    "take away",  # killed, and restarted only when the request is over
]
# A kind of request: the features that it uses.
Kind = Literal[
    "greedy",
    "seeded",
    "two",
    "penalties",
    "logprobs",
    "stop",
    "whole",
    "echo",
    "scores",
    "grammar",
    "beams",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
STORE: tuple[What, ...] = ("index", "data", "both")


@dataclass(frozen=True)
class Row:
    what: What
    when: When
    how: How
    kind: Kind

    def __post_init__(self) -> None:
        assert self.what in get_args(What), self
        assert self.when in get_args(When), self
        assert self.how in get_args(How), self
        assert self.kind in KINDS, self

    def __str__(self) -> str:
        return f"{self.what}-{self.when}-{self.how}-{self.kind}".replace(" ", "_")

    @property
    def on_store(self) -> bool:
        return self.what in STORE

    @property
    def loses_attempt(self) -> bool:
        """Whether the fault forces a new attempt. Short faults may pass unnoticed."""
        if self.on_store or self.how in ("blink", "blip", "stutter", "drain", "end"):
            return False
        return not (self.what == "prefill" and self.when in ("first seen", "mid-stream"))


PREFILL_WHENS: tuple[When, ...] = ("job sent", "half published", "first computed", "first seen")
DECODE_WHENS: tuple[When, ...] = (
    *("parked", "half published", "first sent", "first seen"),
    *("mid-stream", "one left", "last lost"),
)
STORE_WHENS: tuple[When, ...] = (
    *("job sent", "half published", "first seen", "mid-stream", "one left"),
)
# Moments that also occur in requests without a hand-off.
WHENS_WITHOUT_HAND_OFF: tuple[When, ...] = (
    "parked",
    "first seen",
    "mid-stream",
    "one left",
    "last lost",
)
NODE_HOWS: tuple[How, ...] = (
    *("kill", "freeze", "cut", "blip", "blink", "hold", "stutter", "drain", "end"),
)
STORE_HOWS: tuple[How, ...] = ("kill", "freeze", "fill", "take away")


def _places() -> list[tuple[What, When, How]]:
    """Every (what, when, how) of the table."""
    places: list[tuple[What, When, How]] = []
    places += [("prefill", when, how) for when in PREFILL_WHENS for how in NODE_HOWS]
    places += [("decode", when, how) for when in DECODE_WHENS for how in NODE_HOWS]
    places += [("prefill", "half published", "kill engine"), ("decode", "parked", "kill engine")]
    places += [("decode", "mid-stream", "kill engine"), ("decode", "one left", "kill engine")]
    places += [("prefill", "half published", "freeze engine")]
    places += [("decode", "mid-stream", "freeze engine")]
    places += [("all decode", when, "kill") for when in ("parked", "first seen", "mid-stream")]
    places += [("all decode", "mid-stream", how) for how in ("freeze", "cut", "hold", "drain")]
    places += [(what, when, how) for what in STORE for when in STORE_WHENS for how in STORE_HOWS]
    # A frame is lost only if its connection breaks, which these faults do not cause.
    gentle = ("freeze", "blink", "hold", "stutter", "drain", "end")
    lost = ("first computed", "first sent", "last lost")
    return [place for place in places if not (place[1] in lost and place[2] in gentle)]


def all_rows() -> list[Row]:
    """The table. The rows' targets cycle through the kinds; the other kinds run beside each."""
    kinds = cycle(KINDS)
    return [Row(*place, _next_kind(kinds, place)) for place in _places()]


def _next_kind(kinds: Iterator[Kind], place: tuple[What, When, How]) -> Kind:
    """The next kind that can meet the row's moment. Requests for the prompt's log-probabilities
    (echo, scores) have no hand-off, scores has no stream and so no first event, and a beam search
    has no token before its last."""
    what, when, _ = place
    unfit: set[Kind] = set()
    if when not in WHENS_WITHOUT_HAND_OFF or what == "prefill":
        unfit |= {"echo", "scores"}
    if when == "first seen":
        unfit.add("scores")
    if when in ("first seen", "mid-stream", "one left"):
        unfit.add("beams")
    return next(kind for kind in kinds if kind not in unfit)


# Rows for every test run, from the failure contract. Together they have each what, when, how and
# kind.
SHORT_ROWS: tuple[Row, ...] = (
    Row("prefill", "job sent", "kill", "greedy"),
    Row("prefill", "half published", "kill engine", "two"),
    Row("prefill", "first computed", "cut", "logprobs"),
    Row("prefill", "first seen", "cut", "stop"),
    Row("decode", "parked", "cut", "echo"),
    Row("decode", "first sent", "blip", "seeded"),
    Row("decode", "mid-stream", "kill", "scores"),
    Row("decode", "half published", "kill", "grammar"),
    Row("decode", "mid-stream", "freeze", "penalties"),
    Row("decode", "mid-stream", "hold", "whole"),
    Row("decode", "mid-stream", "freeze engine", "two"),
    Row("decode", "mid-stream", "blink", "stop"),
    Row("decode", "mid-stream", "drain", "penalties"),
    Row("decode", "mid-stream", "end", "seeded"),
    Row("decode", "one left", "stutter", "logprobs"),
    Row("decode", "last lost", "kill", "beams"),
    Row("decode", "last lost", "cut", "stop"),
    Row("all decode", "mid-stream", "kill", "seeded"),
    Row("index", "half published", "take away", "seeded"),
    Row("data", "job sent", "fill", "stop"),
    Row("both", "half published", "kill", "penalties"),
)
# Extra rows of the long run: kinds of requests that matter at these moments.
MORE_ROWS: tuple[Row, ...] = (
    Row("prefill", "first seen", "kill", "stop"),
    Row("decode", "parked", "kill", "echo"),
    Row("decode", "last lost", "kill", "stop"),
    Row("prefill", "half published", "freeze", "seeded"),
    Row("decode", "parked", "kill", "two"),
    Row("decode", "mid-stream", "kill", "stop"),
    Row("decode", "mid-stream", "kill engine", "echo"),
    Row("decode", "mid-stream", "blip", "penalties"),
    Row("prefill", "half published", "drain", "two"),
    Row("decode", "parked", "drain", "stop"),
    Row("all decode", "mid-stream", "drain", "logprobs"),
    Row("decode", "one left", "kill", "greedy"),
    Row("decode", "last lost", "blip", "two"),
    Row("prefill", "half published", "kill", "beams"),
    Row("decode", "parked", "kill", "beams"),
    Row("decode", "first sent", "kill", "beams"),
    Row("decode", "last lost", "blip", "beams"),
    Row("both", "half published", "freeze", "beams"),
    Row("index", "job sent", "fill", "two"),
    Row("data", "half published", "freeze", "greedy"),
    Row("both", "mid-stream", "freeze", "whole"),
)


def long_rows() -> list[Row]:
    """All rows of the table and MORE_ROWS, without SHORT_ROWS."""
    return [row for row in dict.fromkeys((*all_rows(), *MORE_ROWS)) if row not in SHORT_ROWS]
