"""Requests that wait: on probation, after a refusal, or because no node is ready."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Abort, Delta, Deltas, RunJob
from baton_protocol.store import StoreHealth
from baton_router.requests.state import MAX_ATTEMPTS
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

BUSY = ErrorRecord("no room", "busy", status=503, retryable=True)


# --- requests that kill nodes ---------------------------------------------------------------------


async def got_jobs(node: FakeNode, count: int) -> None:
    await until(lambda: len(node.got_of(RunJob)) == count)


async def restart_silent(node: FakeNode, epochs: int, requests: int) -> None:
    """Restart the node `epochs` times, each time once it has all `requests`."""
    for epoch in range(epochs):
        await got_jobs(node, requests * (epoch + 1))
        await node.restart(f"again-{epoch}")


async def test_a_request_that_kills_each_node_ends_with_a_final_error(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await restart_silent(decode, epochs=3, requests=1)
        status, body, headers = await answer
        assert (status, body["error"]["code"]) == (500, "request_kills_nodes")
        assert "retry-after" not in headers
        assert len(decode.got_of(RunJob)) == 3


async def test_requests_on_probation_run_one_at_a_time(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        answers = [pools.completing(client) for _ in range(3)]
        await restart_silent(decode, epochs=2, requests=3)
        await got_jobs(decode, 7)
        assert sorted(r.phase for r in pools.records(client)) == ["running", "waiting", "waiting"]
        fresh = pools.completing(client)  # without strikes: does not wait
        await got_jobs(decode, 8)
        decode.script.run = "answer"
        suspect = decode.got_of(RunJob)[6].request
        await decode.say(Deltas((Delta(suspect.id, suspect.attempt, 0, 0, (72,), "H"),)))
        await got_jobs(decode, 10)
        # Two answers are complete. The restart must not hit a request on probation.
        await until(lambda: sum(answer.done() for answer in answers) == 2)
        await decode.restart("the last")
        assert [pools.text_of(await answer) for answer in [*answers, fresh]] == [pools.REPLY] * 4


# --- a node refuses -------------------------------------------------------------------------------


async def test_a_request_that_one_node_refuses_goes_to_another(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run, decode.script.failure = "fail", BUSY
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await pools.join(client, other)
        assert pools.text_of(await answer) == pools.REPLY
        assert [job.request.attempt for job in other.got_of(RunJob)] == [2]
        assert decode.got_of(Abort) == []
        assert await client.figure('baton_router_retries_total{cause="refused"}') == 1


async def test_a_node_that_refused_is_tried_again_after_a_while(decode: FakeNode) -> None:
    decode.script.run, decode.script.failure = "fail", BUSY
    async with pools.running(decode, tunables={"refused_s": 0.05}) as client:
        answer = pools.completing(client)
        await until(lambda: len(decode.got_of(RunJob)) > 2)
        decode.script.run = "answer"
        assert pools.text_of(await answer) == pools.REPLY


async def test_after_too_many_refusals_the_client_gets_the_node_s_error(decode: FakeNode) -> None:
    decode.script.run, decode.script.failure = "fail", BUSY
    async with pools.running(decode, tunables={"refused_s": 0.0}) as client:
        status, body, headers = await pools.completing(client)
        assert (status, body["error"]["code"]) == (503, "busy")
        assert headers["retry-after"] == "1"
        assert len(decode.got_of(RunJob)) == MAX_ATTEMPTS + 1


# --- no node is ready -----------------------------------------------------------------------------


async def test_a_new_request_waits_for_a_lost_node_to_come_back(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.stop()
        await client.ready(0)
        answer = pools.completing(client)
        await until(lambda: pools.records(client))
        (request,) = client.router.dispatcher.in_flight.values()
        await until(lambda: request.record.waits_for)
        line = "prefill=- decode=- reason=waiting: no node is ready (nodes: 1 lost)"
        assert request.placement_line() == line
        await decode.restart("epoch-2")
        assert pools.text_of(await answer) == pools.REPLY


async def test_a_new_request_that_waits_too_long_for_a_node_gets_a_503_with_the_reason(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, unready_wait_s=0.2) as client:
        await decode.stop()
        await client.ready(0)
        status, body, headers = await pools.completing(client)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert "1 lost" in body["error"]["message"]
        assert headers["retry-after"] == "1"


async def test_a_pool_that_never_had_a_node_refuses_at_once() -> None:
    settings = RouterSettings(port=0, nodes=("http://127.0.0.1:9",))
    async with Router(settings) as router, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{router.port}/v1/completions"
        async with (
            asyncio.timeout(settings.unready_wait_s / 2),
            session.post(url, json=pools.ask()) as r,
        ):
            assert r.status == 503


async def test_missing_role_queue_waits_for_a_node_of_the_role(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, missing_role="queue") as client:
        short = await pools.completing(client)  # needs no prefill node
        assert pools.text_of(short) == pools.REPLY
        answer = pools.completing(client, prompt=pools.LONG)
        await until(lambda: [r.phase for r in pools.records(client)] == ["waiting"])
        await pools.join(client, prefill)
        done = await answer
        assert pools.text_of(done) == pools.REPLY
        assert "prefill=prefill-0 decode=decode-0" in done[2]["x-baton-placement"]


async def test_missing_role_fail_refuses_and_names_the_role(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, missing_role="fail") as client:
        status, body, _ = await pools.completing(client, prompt=pools.LONG)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert "no prefill node is ready, and missing_role is fail" in body["error"]["message"]
        await pools.join(client, prefill)
        await decode.stop()
        await client.ready(1)
        status, body, _ = await pools.completing(client)
        assert status == 503
        assert "no decode node is ready" in body["error"]["message"]
        assert prefill.got_of(RunJob) == []


async def test_an_accepted_request_may_finish_on_a_node_of_any_role(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.half_answered(decode, prefill, missing_role="fail", handoff="never") as (
        _,
        answer,
    ):
        await decode.stop()
        done = await answer
        assert pools.text_of(done) == pools.REPLY
        assert "decode=prefill-0 reason=no_decode" in done[2]["x-baton-placement"]


async def test_a_pair_is_formed_only_while_both_reach_the_store(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        for node in (decode, prefill):
            expected: list[tuple[StoreHealth, str]] = [("down", "store_down"), ("up", "always")]
            for health, reason in expected:
                await report_store(client, node, health)
                done = await pools.completing(client)
                assert f"reason={reason}" in done[2]["x-baton-placement"]


async def report_store(client: pools.Client, node: FakeNode, health: StoreHealth) -> None:
    await node.say_load(store=health)

    async def state() -> str:
        return str((await client.node(node.report.node))["store"])

    await until_is(state, health)
