"""What `baton bench serve` measures on a stream, and its figures over many, computed by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton_cli.bench.serve_metrics import MetricChoice, figures, is_good, most_at_once
from baton_cli.bench.serve_report import serve_text
from baton_cli.bench.stream import AnswerReader, RequestOutcome, SseReader, error_word
from baton_cli.errors import UsageError

PLAIN = MetricChoice(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0), {})


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(content: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": content, **more}])


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


def read(*pieces: tuple[float, bytes], sent_at: float = 100.0) -> RequestOutcome:
    """The outcome of a stream whose pieces arrive at these seconds after the request was sent."""
    outcome = RequestOutcome(0.0, requested_tokens=3, prompt_tokens=5)
    reader = AnswerReader(outcome, sent_at)
    for at, piece in pieces:
        reader.feed(piece, sent_at + at)
    reader.close()
    return outcome


def test_events_are_read_whatever_the_size_of_the_received_pieces() -> None:
    stream = b": waiting\n\ndata: one\r\n\r\nevent: x\ndata:two\ndata: three\n\ndata: [DONE]\n\n"
    for size in range(1, len(stream) + 1):
        reader = SseReader()
        pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
        payloads = [payload for piece in pieces for payload in reader.feed(piece)]
        assert payloads == [b"one", b"two\nthree", b"[DONE]"]


def test_ttft_gaps_and_tpot_are_measured_between_chunks_with_tokens() -> None:
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


def test_a_chat_s_first_chunk_without_content_is_no_token() -> None:
    outcome = read(
        (0.1, delta(role="assistant", content="")),
        (0.4, delta(reasoning_content="hm")),
        (0.6, delta(content="a")),
        (0.6, b"data: [DONE]\n\n"),
    )
    assert (outcome.ttft, outcome.output_tokens) == pytest.approx((0.4, 2))


def test_without_usage_tokens_are_counted_by_their_ids_or_else_by_chunks() -> None:
    outcome = read((0.1, text("", token_ids=[7, 8])), (0.2, text("a") + b"data: [DONE]\n\n"))
    assert (outcome.output_tokens, outcome.ttft) == pytest.approx((3, 0.1))
    assert outcome.prompt_tokens == 5  # the length of the prompt that was sent


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
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
def test_an_incomplete_stream_has_an_error(pieces: list[bytes], error: str) -> None:
    assert read(*((0.1, piece) for piece in pieces)).error == error


def test_a_chunk_that_is_no_json_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        read((0.1, b"data: <html>\n\n"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"code": "rate_limited", "message": "slow down"}}, "rate_limited"),
        ({"error": {"code": None, "type": "NotFound"}}, "NotFound"),
        ({"detail": 3}, "no reason"),
        ("x" * 100, "x" * 80),
    ],
)
def test_an_error_body_becomes_a_short_reason(body: Any, reason: str) -> None:
    assert error_word(body) == reason


def outcomes() -> list[RequestOutcome]:
    return [
        RequestOutcome(0.0, 3, 10, 3, 0.1, 0.5, [0.1, 0.3]),
        RequestOutcome(0.2, 1, 20, 1, 0.3, 0.3, [], cached=16),
        RequestOutcome(0.5, 3, 30, 2, 0.2, 0.4, [0.2], cached=0),
        RequestOutcome(0.6, 3, 40, error="HTTP 429 rate_limited"),
    ]


def test_figures_of_a_run_follow_from_its_outcomes() -> None:
    report = figures(outcomes(), 2.0, PLAIN)
    expected = {
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
        # The two requests with a second token: (500 - 100) / 2 and (400 - 200) / 1.
        "mean_tpot_ms": pytest.approx(200.0),
        "std_tpot_ms": pytest.approx(0.0),
        "mean_itl_ms": pytest.approx(200.0),
        "p99_itl_ms": pytest.approx(298.0),
    }
    assert {key: report[key] for key in expected} == expected


def test_figures_without_any_answer_are_none() -> None:
    report = figures([RequestOutcome(0.0, error="gone")], 1.0, PLAIN)
    assert (report["completed"], report["mean_ttft_ms"], report["p99_itl_ms"]) == (0, None, None)
    assert report["total_cached_tokens"] is None


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 300.0}, [True, True, True]),
        ({"ttft": 299.0}, [True, False, True]),
        ({"itl": 250.0}, [False, True, True]),  # every gap must meet it
        ({"tpot": 199.0}, [False, True, False]),
        ({"e2el": 450.0, "ttft": 250.0}, [False, False, True]),
    ],
)
def test_a_good_request_meets_every_goal(goals: dict[str, float], good: list[bool]) -> None:
    *answered, failed = outcomes()
    for one in answered:  # 0.3 s must compare as exactly 300 ms
        one.ttft, one.latency = round(one.ttft, 6), round(one.latency, 6)
    assert [is_good(one, goals) for one in answered] == good
    assert not is_good(failed, goals)
    report = figures([*answered, failed], 2.0, MetricChoice((), (), goals))
    assert report["request_goodput"] == sum(good) / 2.0


def test_the_peak_concurrency_is_found() -> None:
    assert most_at_once(outcomes()) == 2
    assert most_at_once([]) == 0


def test_metrics_percentiles_and_goals_are_parsed() -> None:
    wanted = MetricChoice.read(("ttft", "e2el", "ttft"), ("50", "99.9"), ("ttft:500", "itl:50.5"))
    assert wanted == MetricChoice(("ttft", "e2el"), (50.0, 99.9), {"ttft": 500.0, "itl": 50.5})


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            (("ttfb",), (), ()),
            "--percentile-metrics ttfb: 'ttfb' is not one of ttft, tpot, itl, e2el",
        ),
        (((), ("101",), ()), "--metric-percentiles 101: give numbers from 0 to 100"),
        (((), ("x",), ()), "--metric-percentiles x"),
        (((), (), ("ttft",)), "--goodput ttft: give milliseconds, as in ttft:500"),
        (((), (), ("speed:3",)), "--goodput speed:3: 'speed' is not one of"),
    ],
)
def test_an_invalid_metric_percentile_or_goal_is_named_in_the_error(
    flags: tuple[Any, Any, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        MetricChoice.read(*flags)


def test_the_text_report_holds_the_wanted_figures_and_ends_with_the_failures() -> None:
    wanted = MetricChoice(("ttft",), (99.9,), {"ttft": 250.0})
    setting = {"max_concurrency": None, "request_rate": "inf"}
    lines = serve_text(setting | figures(outcomes(), 2.0, wanted), wanted).splitlines()
    assert "Successful requests:                    3" in lines
    assert "Request goodput (req/s):                1.00" in lines
    assert any(line.startswith("P99.9 TTFT (ms):") for line in lines)
    assert not any("TPOT" in line or "concurrency" in line for line in lines)
    assert lines[-1] == "failed 1 times: HTTP 429 rate_limited"
