"""When a router lets the nodes of its pool sleep, and when it wakes them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from baton_node.server.node import DRAINING
from baton_protocol.link import RunJob
from baton_protocol.node_sleep import SLEEP_SINCE
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

AFTER_S = 0.3
QUERY = {"level": "2", "idle_s": str(AFTER_S)}
LONGER_S = 4 * AFTER_S  # in which an idle pool would have gone to sleep
SLEEPY: dict[str, Any] = {
    "sleep_after_s": AFTER_S,
    "sleep_level": 2,
    "tunables": {"retry_sleep_s": 0.05},
}


async def test_an_idle_pool_sleeps_and_a_request_wakes_all_of_it(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, **SLEEPY) as client:
        for _ in range(2):
            for node in (decode, prefill):
                await until_is(partial(client.state, node.report.node), "asleep")
                assert node.sleeps[-1] == QUERY
            for path in ("/ready", "/ready?all=1"):
                assert (await client.get(path))[0] == 200, path
            assert await client.figure("baton_node_ready") == 0
            assert pools.text_of(await pools.completing(client)) == pools.REPLY
            await until(lambda: not decode.report.asleep and not prefill.report.asleep)
        assert (len(decode.wakes), len(prefill.wakes)) == (2, 2)


async def test_a_pool_that_another_router_uses_does_not_sleep(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with (
        pools.running(decode, **SLEEPY) as idle,
        pools.running(decode, **SLEEPY) as busy,
    ):
        answer = pools.completing(busy)
        await until(lambda: decode.got)
        await decode.say_load(requests=1, jobs_total=1)
        await asyncio.sleep(LONGER_S)
        assert not decode.sleeps
        # The other router's calls are short: only the count of jobs tells of them.
        for jobs in range(2, 8):
            await decode.say_load(jobs_total=jobs)
            await asyncio.sleep(AFTER_S / 2)
        answer.cancel()
        assert not decode.sleeps
        await until_is(lambda: idle.state("decode-0"), "asleep")


@pytest.mark.parametrize("wakes", [True, False])
async def test_only_a_node_that_sleeps_because_its_pool_is_idle_is_woken(
    wakes: bool, decode: FakeNode, other: FakeNode
) -> None:
    """Also by a router whose pool never sleeps, and while another node serves."""
    async with pools.running(decode, other) as client:
        await decode.fall_asleep(wakes=wakes)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        if wakes:
            await until_is(lambda: client.state("decode-0"), "ready")
        else:
            await asyncio.sleep(LONGER_S)
            assert (await client.state("decode-0"), decode.wakes) == ("asleep", [])


async def test_a_request_that_a_node_on_its_way_to_sleep_refuses_waits_and_wakes_it(
    decode: FakeNode,
) -> None:
    decode.script.run = "fail"
    decode.script.failure = DRAINING
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await decode.fall_asleep(wakes=True)
        decode.script.run = "answer"
        assert pools.text_of(await answer) == pools.REPLY
        assert len(decode.wakes) == 1


async def test_a_wake_up_that_fails_is_tried_again_and_the_error_has_its_reason(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, unready_wait_s=1.0, **SLEEPY) as client:
        await until_is(lambda: client.state("decode-0"), "asleep")
        decode.refusal = "there is no memory for the weights"
        status, body, _ = await pools.completing(client)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert f"decode-0 refuses: {decode.refusal}" in body["error"]["message"]
        assert len(decode.wakes) > 1
        answer = pools.completing(client)
        await until_is(client.held, 1)
        decode.refusal = ""
        assert pools.text_of(await answer) == pools.REPLY


async def test_a_sleeping_node_that_is_killed_leaves_its_requests_to_the_others(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, other, **SLEEPY) as client:
        for name in ("decode-0", "decode-1"):
            await until_is(partial(client.state, name), "asleep")
        await decode.stop()
        answer = await pools.completing(client)
        assert pools.text_of(answer) == pools.REPLY
        assert "decode=decode-1" in answer[2]["x-baton-placement"]


async def test_a_node_of_an_older_version_does_not_sleep() -> None:
    async with (
        FakeNode("decode-0", "decode", protocol=SLEEP_SINCE - 1) as older,
        pools.running(older, **SLEEPY),
    ):
        await asyncio.sleep(LONGER_S)
        assert not older.sleeps
