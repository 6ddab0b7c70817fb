"""Demand in the load report: counted requests and tokens, latencies, live and held requests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.link import RunJob
from baton_protocol.store import LATENCY_BOUNDS_S
from baton_router.metrics.demand import DemandCounter
from tests.router import pools
from tests.support.nodes.fake_node import LAYOUT, FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

PROMPT = "x" * 64


async def test_each_prompt_of_a_call_counts_as_a_request_and_all_choices_tokens_as_output(
    decode: FakeNode,
) -> None:
    async with pools.running(decode) as client:
        before = client.router.report()
        body = {"prompt": ["four", "sixsix"], "max_tokens": 3, "n": 2}
        status, _, _ = await client.post("/v1/completions", body)
        after = client.router.report()
    assert status == 200
    assert (before.requests_total, before.output_tokens_total) == (0, 0)
    assert (after.requests_total, after.prompt_tokens_total) == (2, 10)
    assert (after.uncached_tokens_total, after.output_tokens_total) == (10, 2 * 2 * 3)
    assert (after.live, after.held) == (0, 0)


async def test_prompt_tokens_that_the_node_has_cached_do_not_count_as_uncached(
    decode: FakeNode,
) -> None:
    root = root_hash(decode.report.fingerprint)
    blocks = extend_hashes(root, list(PROMPT.encode()), LAYOUT.block_size)
    decode.chunks = tuple(chunk_hashes(blocks, LAYOUT.chunk_blocks))[:3]
    async with pools.running(decode) as client:
        await until_is(lambda: client.chunks("decode-0"), 3)
        await client.post("/v1/completions", {"prompt": PROMPT})
        report = client.router.report()
    assert report.prompt_tokens_total == len(PROMPT)
    assert report.uncached_tokens_total == len(PROMPT) - 3 * LAYOUT.chunk_tokens


async def test_a_request_that_is_placed_again_counts_once(
    decode: FakeNode, other: FakeNode
) -> None:
    for node in (decode, other):
        node.script.run = "half"
    async with pools.running(decode, other, link_patience_s=0.0) as client:
        answer = asyncio.create_task(client.post("/v1/completions", {"prompt": PROMPT}))
        await until(lambda: client.router.report().output_tokens_total == len("Hello,"))
        first, second = (decode, other) if decode.got_of(RunJob) else (other, decode)
        second.script.run = "answer"
        await first.stop()
        status, _, _ = await answer
        report = client.router.report()
    assert status == 200
    assert (report.requests_total, report.uncached_tokens_total) == (1, len(PROMPT))
    assert report.output_tokens_total == len("Hello, world!")


async def test_a_refused_request_does_not_count_as_demand(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        status, _, _ = await client.post("/v1/completions", {"prompt": "x" * 300})
        report = client.router.report()
    assert status == 400
    assert (report.requests_total, report.prompt_tokens_total) == (0, 0)


async def test_latencies_in_the_report_agree_with_the_metrics_page(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for _ in range(2):
            await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        report = client.router.report()
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert len(report.ttft_counts) == len(report.itl_counts) == len(LATENCY_BOUNDS_S) + 1
    assert (sum(report.ttft_counts), sum(report.itl_counts)) == (2, 2 * 3)
    assert "baton_router_time_to_first_token_seconds_count 2.0\n" in page
    assert "baton_router_inter_token_latency_seconds_count 6.0\n" in page


@given(st.floats(0.0, 1e6))
def test_a_latency_counts_in_the_first_bucket_that_contains_it(seconds: float) -> None:
    demand = DemandCounter("router-1", lambda: 0.0)
    demand.ttft.observe(seconds)
    counts = demand.report(0, 0).ttft_counts
    bounds = (*LATENCY_BOUNDS_S, float("inf"))
    assert sum(counts) == 1
    [bucket] = [bound for bound, count in zip(bounds, counts, strict=True) if count]
    assert bucket == min(bound for bound in bounds if seconds <= bound)


async def test_a_request_is_live_while_it_runs_and_held_while_no_node_can_take_it(
    decode: FakeNode,
) -> None:
    decode.script.run = "half"
    async with pools.running(decode, link_patience_s=0.0) as client:
        answer = asyncio.create_task(client.post("/v1/completions", {"prompt": PROMPT}))
        await until(lambda: client.router.report().output_tokens_total)
        assert (client.router.report().live, client.router.report().held) == (1, 0)
        await decode.stop()
        await until_is(client.held, 1)
        assert client.router.report().live == 0
        page = await (await client.session.get(client.url + "/metrics")).text()
        assert "baton_router_requests_held 1.0\n" in page
        decode.script.run = "answer"
        await decode.start(int(decode.address.rpartition(":")[2]))
        status, _, _ = await answer
        assert status == 200
        assert (client.router.report().live, client.router.report().held) == (0, 0)


async def test_a_new_request_is_held_while_no_node_of_its_role_is_ready(prefill: FakeNode) -> None:
    async with pools.running(prefill, missing_role="queue") as client:
        answer = asyncio.create_task(client.post("/v1/completions", {"prompt": PROMPT}))
        await until_is(client.held, 1)
        assert client.router.report().requests_total == 1
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await until_is(client.held, 0)


def test_idle_time_starts_when_the_last_request_ended() -> None:
    now = 0.0
    demand = DemandCounter("router-1", lambda: now)
    now = 10.0
    assert demand.report(0, 0).idle_s == 10.0
    demand.accepted([5])
    now = 12.0
    assert demand.report(0, 0).idle_s == 2.0
    for live, held in ((1, 0), (0, 1)):
        assert demand.report(live, held).idle_s == 0.0
    now = 15.0
    report = demand.report(0, 0)
    assert (report.idle_s, report.uptime_s, report.router) == (3.0, 15.0, "router-1")
