"""What the router records of a finished request: one log line, and times in histograms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, RequestStats, RunJob
from baton_router.http.stopwatch import Stopwatch
from baton_router.metrics.demand import DemandCounter
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.pool_view import PoolView
from baton_router.requests.context import RequestContext
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

SECRET = "nobody may read this"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """`lines()` returns the fields of each access log line so far. The log level is DEBUG."""
    caplog.set_level(logging.DEBUG)

    def read() -> list[dict[str, Any]]:
        return [
            vars(record)
            for record in caplog.records
            if record.name == "baton_router.observability.request_log"
        ]

    return read


async def test_an_answered_request_has_one_log_line_with_its_figures_and_no_content(
    decode: FakeNode, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with pools.running(decode) as client:
        _, body, headers = await client.post("/v1/chat/completions", CHAT)
        await client.get("/health")
    [line] = lines()
    assert line["request"] == headers["x-baton-request-id"]
    assert (line["endpoint"], line["status"], line["error"]) == ("chat", 200, None)
    assert line["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert (line["completion_tokens"], line["attempts"]) == (4, 1)
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["levelno"] == logging.INFO
    logged = [str(vars(record)) for record in caplog.records]
    assert SECRET not in "".join(logged)


KV = RequestStats(
    prompt_tokens=64,
    matched_tokens=48,
    fetched_tokens=16,
    declined_tokens=24,
    cached_tokens=8,
    computed_tokens=40,
    fetch_predicted_ms=8.04,
    compute_predicted_ms=30.0,
    fetch_ms=9.0,
)


async def test_a_log_line_has_matched_fetched_and_declined_tokens(
    decode: FakeNode, lines: Lines
) -> None:
    decode.script.stats = KV
    async with pools.running(decode) as client:
        await client.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
        body = {"prompt": "a", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.read()
        page = await (await client.session.get(client.url + "/metrics")).text()
    two_prompts, one_prompt = lines()
    names = ("matched_tokens", "fetched_tokens", "declined_tokens")
    assert [two_prompts[name] for name in names] == [96, 32, 48]
    assert [one_prompt[name] for name in names] == [48, 16, 24]
    assert (one_prompt["fetch_predicted_ms"], one_prompt["compute_predicted_ms"]) == (8.0, 30.0)
    for line in (
        "baton_router_matched_tokens_total 144.0",
        "baton_router_fetched_tokens_total 48.0",
        "baton_router_declined_tokens_total 72.0",
        "baton_router_fetch_predicted_seconds_count 3.0",
        "baton_router_compute_predicted_seconds_sum 0.09",
        "baton_router_fetch_seconds_count 3.0",
    ):
        assert line + "\n" in page, line


async def test_a_hand_off_s_kv_figures_come_from_the_prefill_node(
    decode: FakeNode, prefill: FakeNode, lines: Lines
) -> None:
    prefill.script.stats = KV
    async with pools.running(decode, prefill, handoff="always") as client:
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert (lines()[0]["matched_tokens"], lines()[0]["declined_tokens"]) == (48, 24)
    assert "baton_router_matched_tokens_total 48.0\n" in page


async def test_without_stored_chunks_there_is_no_fetch_prediction(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert "baton_router_fetch_predicted_seconds_count 0.0\n" in page
    assert "baton_router_fetch_seconds_count 0.0\n" in page


async def test_a_refused_request_has_a_log_line(decode: FakeNode, lines: Lines) -> None:
    async with pools.running(decode) as client:
        await client.post("/v1/completions", {"prompt": SECRET, "top_p": 2})
    [line] = lines()
    assert (line["endpoint"], line["status"]) == ("completions", 400)
    assert (line["error"], line["attempts"], line["ttft_ms"]) == ("invalid_value", 0, None)


async def test_a_failed_stream_is_logged_with_the_failure_s_status(
    decode: FakeNode, lines: Lines
) -> None:
    decode.script.run = "fail"
    async with pools.running(decode) as client:
        await client.post("/v1/completions", {"prompt": SECRET, "stream": True})
    [line] = lines()
    assert (line["status"], line["error"], line["attempts"]) == (500, "engine_error", 1)


async def test_a_disconnect_is_logged_as_499(decode: FakeNode, lines: Lines) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        body = {"prompt": "x", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readline()
        await until(lines)
    [line] = lines()
    assert (line["status"], line["error"]) == (499, None)
    assert 0 < line["completion_tokens"] <= len("Hello,")


async def test_a_request_that_moved_to_another_node_is_recorded_once(
    decode: FakeNode, lines: Lines
) -> None:
    async with FakeNode("decode-1", "decode") as other, pools.running(decode, other) as client:
        decode.script.run = other.script.run = "half"
        answer = asyncio.create_task(client.post("/v1/completions", {"prompt": "x"}))
        in_flight = client.router.dispatcher.in_flight
        await until(lambda: any(len(f.record.outputs[0]) == 6 for f in in_flight.values()))
        first, second = (decode, other) if decode.got_of(RunJob) else (other, decode)
        second.script.run = "answer"
        await first.stop()
        status, body, headers = await answer
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert (status, body["choices"][0]["text"]) == (200, "Hello, world!")
    assert second.report.node in headers["x-baton-placement"]
    assert (lines()[0]["attempts"], lines()[0]["completion_tokens"]) == (2, 13)
    assert "baton_router_time_to_first_token_seconds_count 1.0\n" in page
    assert "baton_router_inter_token_latency_seconds_count 12.0\n" in page
    assert "baton_router_e2e_request_latency_seconds_count 1.0\n" in page


def observed(deltas: Iterable[tuple[float, tuple[int, ...]]]) -> dict[str, tuple[float, float]]:
    """Count and sum of each histogram after the deltas (time, ids) of one choice."""
    now = 0.0
    metrics = RouterMetrics(PoolView(lambda: now, 10), DemandCounter("router-1", lambda: now))
    watch = Stopwatch(metrics, lambda: now, RequestContext("r", 0.0))
    for at, ids in deltas:
        now = at
        watch.record_batch([(0, Delta(RequestId("r"), 1, 0, 0, ids=ids))])
    watch.record_end()
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    value = metrics.registry.get_sample_value
    return {
        name: tuple(value(f"baton_router_{name}_seconds_{what}") for what in ("count", "sum"))  # type: ignore[misc]
        for name in names
    }


def test_a_resumed_request_s_pause_counts_as_inter_token_latency() -> None:
    times = observed([(1.0, (5,)), (1.5, (6,)), (9.5, (7,)), (10.0, (8,))])
    assert times == {
        "time_to_first_token": (1, 1.0),
        "inter_token_latency": (3, 9.0),
        "e2e_request_latency": (1, 10.0),
    }


def test_deltas_without_tokens_do_not_count() -> None:
    times = observed([(1.0, ()), (2.0, (5,)), (3.0, ()), (4.0, (6,))])
    assert times["time_to_first_token"] == (1, 2.0)
    assert times["inter_token_latency"] == (1, 2.0)
