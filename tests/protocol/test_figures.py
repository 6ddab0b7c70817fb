"""Figures out of bounds are refused where they are decoded, and cost no token."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from baton_protocol import PROTOCOL_VERSION
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    UNREADABLE_ERROR,
    Delta,
    Deltas,
    JobFailed,
    PrefillDone,
    RequestStats,
    rescued,
    to_router_codec,
)
from baton_protocol.store import DataInstance, NodeLoad, RouterReport, Speeds
from baton_protocol.wire import WireError

NUMBERS: list[tuple[type, dict[str, Any]]] = [
    (Speeds, {}),
    (DataInstance, {}),
    (NodeLoad, {}),
    (RequestStats, {}),
    (RouterReport, {"router": "r", "uptime_s": 1.0}),
]
EACH = [
    (kind, more, field.name)
    for kind, more in NUMBERS
    for field in msgspec.structs.fields(kind)
    if type(field.default) in (int, float) or field.name == "uptime_s"
]


@pytest.mark.parametrize(("kind", "more", "name"), EACH)
def test_no_figure_is_negative_infinite_or_no_number(
    kind: type, more: dict[str, Any], name: str
) -> None:
    assert msgspec.convert({**more, name: 1}, kind)
    for bad in (-1, -0.5, math.nan, math.inf, -math.inf, 2**64 - 1, 1e300):
        data = msgspec.msgpack.encode({**more, name: bad})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=kind)


@pytest.mark.parametrize("name", Speeds.__struct_fields__)
@pytest.mark.parametrize("value", [5e-324, 1e-9, 0.00099])
def test_a_speed_whose_inverse_is_absurd_is_none(name: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"0 \(not measured\)"):
        msgspec.convert({name: value}, Speeds)


BAD = RequestStats(queue_ms=math.nan)
DELTA = Delta(RequestId("r"), 1, 0, 3, ids=(7,), text="x")
TOLD: list[tuple[Any, Any]] = [
    (
        Deltas((DELTA, msgspec.structs.replace(DELTA, finish="stop", stats=BAD))),
        Deltas((DELTA, msgspec.structs.replace(DELTA, finish="stop"))),
    ),
    (
        PrefillDone(RequestId("r"), 1, (DELTA,), BAD),
        PrefillDone(RequestId("r"), 1, (DELTA,), RequestStats()),
    ),
    (
        JobFailed(RequestId("r"), 1, msgspec.structs.replace(UNREADABLE_ERROR, status=7)),
        JobFailed(RequestId("r"), 1, UNREADABLE_ERROR),
    ),
]


@pytest.mark.parametrize(("said", "left"), TOLD)
def test_what_a_frame_says_of_requests_is_kept_without_its_wrong_figures(
    said: Any, left: Any
) -> None:
    data = to_router_codec().encode(said)
    with pytest.raises(WireError):
        to_router_codec().decode(data)
    assert rescued(data) == left


def frame(record: object) -> bytes:
    return msgspec.msgpack.encode((PROTOCOL_VERSION, record))


@pytest.mark.parametrize(
    "data",
    [
        frame({"type": "load", "speeds": {"decode_step_ms": -1.0}}),
        frame({"type": "of another version"}),
        frame({}),
        frame({"type": ["deltas"]}),
    ],
)
def test_of_a_frame_that_says_nothing_of_requests_nothing_is_left(data: bytes) -> None:
    assert rescued(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        frame([]),
        frame({"type": "deltas"}),
        frame({"type": "deltas", "items": {"a": 1}}),
        frame({"type": "deltas", "items": [{"request": "r"}]}),
        frame({"type": "failed", "request": 7, "attempt": 1}),
    ],
)
def test_tokens_that_cannot_be_read_are_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        rescued(data)
