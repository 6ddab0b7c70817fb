"""Frames round-trip, ignore unknown fields, and errors name the bad field."""

import msgspec
import pytest

from baton_protocol import PROTOCOL_VERSION
from baton_protocol.errors import InvalidRequest, Unavailable
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    Abort,
    Delta,
    Deltas,
    FirstTokens,
    Hello,
    RunJob,
    to_node_codec,
    to_router_codec,
)
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import FetchReport
from baton_protocol.wire import Codec, WireError
from tests.support.nodes.fake_node import make_report

REQUEST = Request(
    id=RequestId("r1"),
    attempt=2,
    prompt_ids=(1, 2, 3),
    params=SamplingParams(n=2, temperature=0.0, stop=("x",), seed=-5),
    outputs=((7,), (8, 9)),
    time_left=12.5,
)


def test_jobs_and_first_tokens_round_trip() -> None:
    codec = to_node_codec()
    for frame in (
        RunJob(REQUEST, await_first=True),
        FirstTokens(RequestId("r1"), 2, ((7,), (8,)), (1,)),
    ):
        assert codec.decode(codec.encode(frame)) == frame


def test_deltas_round_trip_with_logprobs_and_bytes() -> None:
    logprobs = PositionLogprobs(
        TokenLogprob(5, -0.5, 1, "\ufffd", b"\xf0"), (TokenLogprob(6, -1.5),)
    )
    delta = Delta(RequestId("r"), 1, 0, 4, (5,), "x", (logprobs,), finish="stop", stop=5)
    codec = to_router_codec()
    assert codec.decode(codec.encode(Deltas((delta,)))) == Deltas((delta,))


def test_the_wall_clock_deadline_of_version_3_is_neither_read_nor_sent() -> None:
    codec = to_node_codec()
    request = {"id": "r", "attempt": 1, "prompt_ids": [1], "params": {}, "outputs": [[]]}
    job = {"type": "run", "request": request | {"deadline": 1.0}}
    read = codec.decode(msgspec.msgpack.encode([3, job]))
    assert isinstance(read, RunJob)
    assert read.request.time_left is None
    _, sent = msgspec.msgpack.decode(codec.encode(RunJob(REQUEST)))
    assert sent["request"]["time_left"] == 12.5
    assert "deadline" not in sent["request"]


def test_a_node_that_does_not_report_how_exact_it_is_counts_as_numeric() -> None:
    codec = to_router_codec()
    sent = codec.encode(Hello(make_report("decode-0", "decode", exact="bitwise")))
    version, record = msgspec.msgpack.decode(sent)
    assert record["report"].pop("exact") == "bitwise"
    read = codec.decode(msgspec.msgpack.encode((version, record)))
    assert isinstance(read, Hello)
    assert read.report.exact == "numeric"


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    record = {"type": "abort", "request": "r", "attempt": 1, "colour": "blue"}
    data = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, record])
    assert to_node_codec().decode(data) == Abort(RequestId("r"), 1)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"nonsense", msgspec.msgpack.encode([0, {}])])
def test_bytes_that_are_not_a_frame_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="frame"):
        to_node_codec().decode(data)


def test_a_frame_older_than_the_oldest_readable_version_is_refused() -> None:
    data = msgspec.msgpack.encode([0, {"type": "abort", "request": "r", "attempt": 1}])
    with pytest.raises(WireError, match="version 0"):
        to_node_codec().decode(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop_token_ids", (1,) * 1025),
    ],
)
def test_the_error_for_a_bad_sampling_value_names_its_field(field: str, value: object) -> None:
    params = msgspec.structs.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidRequest, match=field) as caught:
        params.check()
    assert caught.value.param == field


def test_the_default_sampling_parameters_are_valid() -> None:
    SamplingParams().check()


def test_the_type_of_an_error_says_whether_it_is_retryable() -> None:
    assert Unavailable("gone").record().retryable
    assert not InvalidRequest("bad").record().retryable


@pytest.mark.parametrize(
    "data",
    [
        b"\x92\x01\x81\xa4node\xa2\xff\xff",
        b"\x92\x01\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\x92\x01" + b"\x81\xa1x" * 100_000 + b"\xc0",
    ],
    ids=["invalid UTF-8", "nested arrays", "nested maps"],
)
def test_bad_utf8_and_deep_nesting_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="unreadable frame"):
        Codec[FetchReport](FetchReport).decode(data)
