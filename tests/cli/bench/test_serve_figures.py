"""What `baton bench serve` reads off a stream, and what it says of many: exact, by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton_cli.bench.serve_metrics import Wanted, figures, is_good, most_at_once
from baton_cli.bench.serve_report import serve_text
from baton_cli.bench.stream import AnswerReader, Outcome, SseReader, error_word
from baton_cli.errors import UsageError

PLAIN = Wanted(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0), {})


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(words: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": words, **more}])


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


def read(*pieces: tuple[float, bytes], begun: float = 100.0) -> Outcome:
    """What came of pieces at so many seconds since the request was sent."""
    outcome = Outcome(0.0, asked_tokens=3, prompt_tokens=5)
    reader = AnswerReader(outcome, begun)
    for at, piece in pieces:
        reader.feed(piece, begun + at)
    reader.close()
    return outcome


def test_events_are_cut_wherever_their_bytes_are() -> None:
    stream = b": waiting\n\ndata: one\r\n\r\nevent: x\ndata:two\ndata: three\n\ndata: [DONE]\n\n"
    for size in range(1, len(stream) + 1):
        reader = SseReader()
        pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
        found = [payload for piece in pieces for payload in reader.feed(piece)]
        assert found == [b"one", b"two\nthree", b"[DONE]"]


def test_times_of_a_stream() -> None:
    outcome = read(
        (0.5, text("a")),
        (0.7, text("b") + text("c")),
        (1.0, text("", finish_reason="stop")),
        (1.5, event(choices=[], usage={"prompt_tokens": 8, "completion_tokens": 6})),
        (1.6, b"data: [DONE]\n\n"),
    )
    assert outcome.error == ""
    assert (outcome.ttft, outcome.latency) == pytest.approx((0.5, 1.0))
    assert outcome.gaps == [pytest.approx(0.2), 0.0]
    assert (outcome.prompt_tokens, outcome.output_tokens) == (8, 6)
    assert outcome.tpot == pytest.approx(0.1)


def test_a_chat_s_opening_chunk_brings_no_token() -> None:
    outcome = read(
        (0.1, delta(role="assistant", content="")),
        (0.4, delta(reasoning_content="hm")),
        (0.6, delta(content="a")),
        (0.6, b"data: [DONE]\n\n"),
    )
    assert (outcome.ttft, outcome.output_tokens) == pytest.approx((0.4, 2))


def test_without_usage_tokens_are_counted_by_ids_and_else_by_chunks() -> None:
    outcome = read((0.1, text("", token_ids=[7, 8])), (0.2, text("a") + b"data: [DONE]\n\n"))
    assert (outcome.output_tokens, outcome.ttft) == pytest.approx((3, 0.1))
    assert outcome.prompt_tokens == 5  # as many as were sent


def test_an_answer_without_text_has_its_first_token_when_it_ends() -> None:
    outcome = read((0.3, text("", finish_reason="length")), (0.4, b"data: [DONE]\n\n"))
    assert (outcome.ttft, outcome.latency) == pytest.approx((0.3, 0.3))
    assert (outcome.error, outcome.tpot) == ("", None)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([text("a")], "the stream ended without [DONE]"),
        ([b"data: [DONE]\n\n"], "no token"),
        ([text("a"), event(error={"message": "m", "code": "lost"})], "in the stream: lost"),
    ],
)
def test_a_stream_that_is_not_whole_has_a_reason(pieces: list[bytes], error: str) -> None:
    assert read(*((0.1, piece) for piece in pieces)).error == error


def test_what_is_no_chunk_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        read((0.1, b"data: <html>\n\n"))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"error": {"code": "rate_limited", "message": "slow down"}}, "rate_limited"),
        ({"error": {"code": None, "type": "NotFound"}}, "NotFound"),
        ({"detail": 3}, "no reason"),
        ("x" * 100, "x" * 80),
    ],
)
def test_an_error_is_a_short_word(body: Any, word: str) -> None:
    assert error_word(body) == word


def outcomes() -> list[Outcome]:
    return [
        Outcome(0.0, 3, 10, 3, 0.1, 0.5, [0.1, 0.3]),
        Outcome(0.2, 1, 20, 1, 0.3, 0.3, [], cached=16),
        Outcome(0.5, 3, 30, 2, 0.2, 0.4, [0.2], cached=0),
        Outcome(0.6, 3, 40, error="HTTP 429 rate_limited"),
    ]


def test_figures_of_a_run() -> None:
    found = figures(outcomes(), 2.0, PLAIN)
    told = {
        "completed": 3,
        "failed": 1,
        "failures": {"HTTP 429 rate_limited": 1},
        "short": 1,
        "total_input_tokens": 60,
        "total_cached_tokens": 16,
        "total_output_tokens": 6,
        "request_throughput": 1.5,
        "output_throughput": 3.0,
        "total_token_throughput": 33.0,
        "request_goodput": None,
        "mean_ttft_ms": pytest.approx(200.0),
        "median_ttft_ms": pytest.approx(200.0),
        # Between the second and the third of three: 200 + 0.98 * 100.
        "p99_ttft_ms": pytest.approx(298.0),
        "p50_e2el_ms": pytest.approx(400.0),
        # Of the two that have a second token: (500 - 100) / 2 and (400 - 200) / 1.
        "mean_tpot_ms": pytest.approx(200.0),
        "std_tpot_ms": pytest.approx(0.0),
        "mean_itl_ms": pytest.approx(200.0),
        "p99_itl_ms": pytest.approx(298.0),
    }
    assert {key: found[key] for key in told} == told


def test_nothing_is_said_of_what_nobody_answered() -> None:
    found = figures([Outcome(0.0, error="gone")], 1.0, PLAIN)
    assert (found["completed"], found["mean_ttft_ms"], found["p99_itl_ms"]) == (0, None, None)
    assert found["total_cached_tokens"] is None


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 300.0}, [True, True, True]),
        ({"ttft": 299.0}, [True, False, True]),
        ({"itl": 250.0}, [False, True, True]),  # each of its gaps
        ({"tpot": 199.0}, [False, True, False]),
        ({"e2el": 450.0, "ttft": 250.0}, [False, False, True]),
    ],
)
def test_a_good_request_holds_each_goal(goals: dict[str, float], good: list[bool]) -> None:
    *whole, failed = outcomes()
    for one in whole:  # so that 300 ms are 300
        one.ttft, one.latency = round(one.ttft, 6), round(one.latency, 6)
    assert [is_good(one, goals) for one in whole] == good
    assert not is_good(failed, goals)
    found = figures([*whole, failed], 2.0, Wanted((), (), goals))
    assert found["request_goodput"] == sum(good) / 2.0


def test_requests_at_once_are_those_under_way() -> None:
    assert most_at_once(outcomes()) == 2
    assert most_at_once([]) == 0


def test_wishes_are_read() -> None:
    read = Wanted.read(("ttft", "e2el", "ttft"), ("50", "99.9"), ("ttft:500", "itl:50.5"))
    assert read == Wanted(("ttft", "e2el"), (50.0, 99.9), {"ttft": 500.0, "itl": 50.5})


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ((("ttfb",), (), ()), "--percentile-metrics ttfb: 'ttfb' is none of ttft, tpot, itl, e2el"),
        (((), ("101",), ()), "--metric-percentiles 101: give numbers from 0 to 100"),
        (((), ("x",), ()), "--metric-percentiles x"),
        (((), (), ("ttft",)), "--goodput ttft: give milliseconds, as in ttft:500"),
        (((), (), ("speed:3",)), "--goodput speed:3: 'speed' is none of"),
    ],
)
def test_a_wish_that_cannot_be_is_named(wish: tuple[Any, Any, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Wanted.read(*wish)


def test_the_text_holds_the_wanted_figures_and_ends_with_what_failed() -> None:
    wanted = Wanted(("ttft",), (99.9,), {"ttft": 250.0})
    setting = {"max_concurrency": None, "request_rate": "inf"}
    lines = serve_text(setting | figures(outcomes(), 2.0, wanted), wanted).splitlines()
    assert "Successful requests:                    3" in lines
    assert "Request goodput (req/s):                1.00" in lines
    assert any(line.startswith("P99.9 TTFT (ms):") for line in lines)
    assert not any("TPOT" in line or "concurrency" in line for line in lines)
    assert lines[-1] == "failed 1 times: HTTP 429 rate_limited"
