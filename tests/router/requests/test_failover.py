"""Failover: streams continue when nodes die, freeze, stall or come back."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton_protocol.link import Abort, Delta, Deltas, PrefillJob, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

# --- a node is lost -------------------------------------------------------------------------------


async def test_a_stream_continues_on_another_node_when_its_node_dies(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(
        decode, link_patience_s=600.0
    ) as client:  # refused connections do not wait for it
        answer = asyncio.create_task(pools.streamed(client))
        await pools.half_sent(client)
        await pools.join(client, other)
        await decode.stop()
        assert await answer == pools.REPLY
        job = pools.only_job(other, attempt=2)
        assert bytes(job.request.outputs[0]) == b"Hello,"
        assert (job.request.params, job.await_first) == (
            pools.only_job(decode).request.params,
            False,
        )
        assert await client.figure('baton_router_retries_total{cause="link"}') == 1
        assert await client.figure("baton_router_attempts_total") == 2
        assert await client.figure("baton_router_resumed_requests_total") == 1
        assert await client.figure("baton_router_resumed_tokens_total") == len("Hello,")
        assert await client.figure("baton_router_pause_seconds_count") == 1
        assert await client.figure("baton_router_recomputed_tokens_total") == len("Say hello")
        assert await client.figure("baton_router_queue_seconds_count") == 1
        assert await client.figure("baton_asyncio_tasks") > 0


async def test_finished_choices_are_not_run_again(decode: FakeNode, other: FakeNode) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        answer = pools.completing(client, n=2)
        await pools.half_sent(client)
        (record,) = pools.records(client)
        rest = tuple(pools.REPLY.encode()[len(record.outputs[1]) :])
        last = Delta(record.request.id, 1, 1, 6, rest, pools.REPLY[6:], finish="stop")
        await decode.say(Deltas((last,)))
        await until(lambda: record.open == {0})
        await pools.join(client, other)
        await decode.stop()
        status, body, _ = await answer
        assert (status, [c["text"] for c in body["choices"]]) == (200, [pools.REPLY] * 2)
        assert pools.only_job(other, attempt=2).finished == (1,)


async def test_a_resumed_request_is_not_split_again(
    decode: FakeNode, prefill: FakeNode, other: FakeNode
) -> None:
    async with pools.half_answered(decode, prefill, handoff="always") as (client, answer):
        await pools.join(client, other)
        await decode.stop()
        done = await answer
        assert pools.text_of(done) == pools.REPLY
        assert "prefill=- decode=decode-1 reason=resumed" in done[2]["x-baton-placement"]
        assert len(prefill.got_of(PrefillJob)) == 1
        assert done[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        assert await client.figure("baton_router_handoff_seconds_count") == 1


async def test_a_request_waits_while_no_node_is_left(decode: FakeNode) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await decode.stop()
        await until(lambda: pools.records(client)[0].phase == "waiting")
        decode.script.run = "answer"
        await decode.restart("epoch-2")
        assert pools.text_of(await answer) == pools.REPLY


async def test_a_disconnect_while_the_request_waits_frees_everything(decode: FakeNode) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await decode.stop()
        await until(lambda: pools.records(client)[0].phase == "waiting")
        (request,) = client.router.dispatcher.in_flight.values()
        task = request.task
        assert task is not None
        answer.cancel()
        await until(lambda: not pools.records(client) and task.done())
        assert await client.booked() == 0


async def test_a_request_that_waits_past_its_deadline_ends_with_a_504(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, request_timeout_s=1.0) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await decode.stop()
        status, body, _ = await answer
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_time_left_in_each_job_does_not_depend_on_the_wall_clock(
    decode: FakeNode,
    other: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    async with pools.half_answered(decode, request_timeout_s=60.0) as (client, answer):
        monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
        await pools.join(client, other)
        await decode.stop()
        status, _, _ = await answer
        assert status == 200
    first, second = (
        pools.only_job(decode).request.time_left,
        pools.only_job(other, attempt=2).request.time_left,
    )
    assert first is not None
    assert second is not None
    assert 60.0 >= first > second > 0.0


# --- a link is lost -------------------------------------------------------------------------------


async def test_a_hand_off_continues_when_its_links_come_back(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.handing_off(decode, prefill, link_patience_s=20.0) as (_, answer):
        decode.cut_links()
        await until(lambda: len(decode.got_of(RunJob)) == 2)
        prefill.script.prefill = "answer"
        prefill.cut_links()
        assert pools.text_of(await answer) == pools.REPLY
        assert [job.await_first for job in decode.got_of(RunJob)] == [True, True]
        assert {job.request.attempt for job in prefill.got_of(PrefillJob)} == {1}


async def test_a_frozen_node_is_lost_and_gets_the_abort_first_when_it_wakes(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.half_answered(decode, tunables={"ping_s": 0.2}) as (client, answer):
        await pools.join(client, other)
        before = len(decode.got)
        decode.freeze()
        assert pools.text_of(await answer) == pools.REPLY
        assert await client.figure('baton_router_retries_total{cause="pings"}') == 1
        assert not pools.is_ready(client, decode)
        decode.wake()
        await until(lambda: pools.is_ready(client, decode) and len(decode.got) > before)
        assert decode.got[before] == Abort(pools.only_job(decode).request.id, 1)


async def test_losing_a_node_that_froze_before_it_got_the_request_is_no_strike(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, tunables={"ping_s": 0.2}) as client:
        decode.freeze()
        link = client.router._table.links[decode.address]
        await until(lambda: time.monotonic() > link.due_at)
        answer = pools.completing(client)
        await until(lambda: [record.attempt for record in pools.records(client)] == [1])
        (record,) = pools.records(client)
        await pools.join(client, other)
        assert pools.text_of(await answer) == pools.REPLY
        assert (record.attempt, record.strikes) == (2, 0)


# --- an engine stalls -----------------------------------------------------------------------------


async def test_a_stalled_engine_loses_its_requests_and_gets_no_new_ones(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode, stall_timeout_s=0.5) as client:
        await decode.say_load(running=1, engine_steps_total=7)
        answer = pools.completing(client)
        await pools.half_sent(client)
        reporting = asyncio.create_task(report_loads(other))
        await pools.join(client, other)
        assert pools.text_of(await answer) == pools.REPLY
        assert await client.figure('baton_router_retries_total{cause="stalled"}') == 1
        await until(lambda: decode.got_of(Abort))
        assert decode.links == 1
        assert await client.state("decode-0") == "stalled"
        await decode.say_load(running=1, engine_steps_total=8)
        await until(lambda: pools.is_ready(client, decode))
        reporting.cancel()


async def report_loads(node: FakeNode) -> None:
    """Report an idle load repeatedly, as a node does."""
    while True:
        await node.say_load()
        await asyncio.sleep(0.05)
