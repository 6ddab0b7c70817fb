"""Decoding rejects figures out of bounds, and keeps the tokens of a frame that carries them."""

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

RECORDS: list[tuple[type, dict[str, Any]]] = [
    (Speeds, {}),
    (DataInstance, {}),
    (NodeLoad, {}),
    (RequestStats, {}),
    (RouterReport, {"router": "r", "uptime_s": 1.0}),
]
FIGURES = [
    (kind, more, field.name)
    for kind, more in RECORDS
    for field in msgspec.structs.fields(kind)
    if type(field.default) in (int, float) or field.name == "uptime_s"
]


@pytest.mark.parametrize(("kind", "more", "name"), FIGURES)
def test_negative_infinite_and_nan_figures_are_rejected(
    kind: type, more: dict[str, Any], name: str
) -> None:
    assert msgspec.convert({**more, name: 1}, kind)
    for bad in (-1, -0.5, math.nan, math.inf, -math.inf, 2**64 - 1, 1e300):
        data = msgspec.msgpack.encode({**more, name: bad})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=kind)


@pytest.mark.parametrize("name", Speeds.__struct_fields__)
@pytest.mark.parametrize("value", [5e-324, 1e-9, 0.00099])
def test_a_speed_close_to_zero_is_rejected(name: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"0 \(not measured\)"):
        msgspec.convert({name: value}, Speeds)


BAD = RequestStats(queue_ms=math.nan)
DELTA = Delta(RequestId("r"), 1, 0, 3, ids=(7,), text="x")
FRAMES: list[tuple[Any, Any]] = [
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


@pytest.mark.parametrize(("frame", "expected"), FRAMES)
def test_a_frame_with_bad_figures_keeps_its_deltas_and_errors(frame: Any, expected: Any) -> None:
    data = to_router_codec().encode(frame)
    with pytest.raises(WireError):
        to_router_codec().decode(data)
    assert rescued(data) == expected


def encoded(record: object) -> bytes:
    return msgspec.msgpack.encode((PROTOCOL_VERSION, record))


@pytest.mark.parametrize(
    "data",
    [
        encoded({"type": "load", "speeds": {"decode_step_ms": -1.0}}),
        encoded({"type": "of another version"}),
        encoded({}),
        encoded({"type": ["deltas"]}),
    ],
)
def test_a_bad_frame_without_requests_is_dropped(data: bytes) -> None:
    assert rescued(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encoded([]),
        encoded({"type": "deltas"}),
        encoded({"type": "deltas", "items": {"a": 1}}),
        encoded({"type": "deltas", "items": [{"request": "r"}]}),
        encoded({"type": "failed", "request": 7, "attempt": 1}),
    ],
)
def test_deltas_that_cannot_be_read_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        rescued(data)
