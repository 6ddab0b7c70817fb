"""Hand-offs and whole requests end to end: frames the nodes get, and answers the client gets."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Fingerprint
from baton_protocol.link import Abort, FirstTokens, NoFirstTokens, PrefillJob, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration


async def test_a_split_request_gives_one_complete_answer(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        status, body, headers = await pools.completing(client)
        assert status == 200
        assert body["choices"][0]["text"] == "Hello, world!"
        assert bytes(body["choices"][0]["token_ids"]) == b"Hello, world!"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        assert headers["x-baton-placement"].startswith("prefill=prefill-0 decode=decode-0 reason=")
        (run,) = decode.got_of(RunJob)
        (job,) = prefill.got_of(PrefillJob)
        assert (run.await_first, job.decode_node, job.decode_epoch) == (True, "decode-0", "epoch-1")
        assert run.request == job.request
        assert run.request.params.seed is not None
        assert run.request.id == headers["x-baton-request-id"]
        (first,) = decode.got_of(FirstTokens)
        assert first.outputs == ((ord("H"),),)


async def test_every_choice_of_every_prompt_is_handed_over_separately(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        body = (await pools.completing(client, n=3, prompt=["ab", "cd"], max_tokens=3))[1]
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert {choice["text"] for choice in body["choices"]} == {"Hel"}
        prompts = [bytes(choice["prompt_token_ids"]) for choice in body["choices"]]
        assert prompts == [b"ab"] * 3 + [b"cd"] * 3
        assert body["usage"]["completion_tokens"] == 18
        assert len(decode.got_of(FirstTokens)) == 2


async def test_a_request_that_ends_with_its_first_token_frees_the_decode_node(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        body = (await pools.completing(client, max_tokens=1))[1]
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("H", "length")
        await until(lambda: decode.got_of(Abort))
        assert decode.got_of(FirstTokens) == []


@pytest.mark.parametrize("failure", ["fail", "vanish"])
async def test_a_failed_prefill_node_adds_only_latency(
    decode: FakeNode, prefill: FakeNode, failure: str
) -> None:
    prefill.script.prefill = "fail" if failure == "fail" else "silent"
    async with pools.running(decode, prefill, handoff="always") as client:
        answer = pools.completing(client)
        if failure == "vanish":
            await until(lambda: prefill.got_of(PrefillJob))
            await prefill.stop()
        status, body, _ = await answer
        assert (status, body["choices"][0]["text"]) == (200, "Hello, world!")
        assert len(decode.got_of(NoFirstTokens)) == 1


async def test_the_client_gets_the_decode_node_s_final_error(
    decode: FakeNode, prefill: FakeNode
) -> None:
    decode.script.run = "fail"
    prefill.script.prefill = "silent"
    decode.script.failure = ErrorRecord("past the context", "context_length_exceeded", status=400)
    async with pools.running(decode, prefill, handoff="always") as client:
        status, body, headers = await pools.completing(client)
        assert (status, body["error"]["message"]) == (400, "past the context")
        assert headers["x-baton-placement"].startswith("prefill=prefill-0")
        await until(lambda: prefill.got_of(Abort))
        assert len(decode.got_of(RunJob)) == 1


async def test_a_request_past_its_deadline_ends_with_a_504(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, request_timeout_s=0.3) as client:
        status, body, _ = await pools.completing(client)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: decode.got_of(Abort))


async def test_a_stream_sends_each_token_once_then_usage_then_done(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        events = await pools.stream_events(
            client, stream_options={"include_usage": True}, max_tokens=5
        )
        *tokens, usage, done = events
        assert done == "[DONE]"
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
        assert b"".join(bytes(e["choices"][0]["token_ids"]) for e in tokens) == b"Hello"
        assert all(e["usage"] is None for e in tokens)
        assert tokens[0]["choices"][0]["prompt_token_ids"]
        assert tokens[1]["choices"][0]["prompt_token_ids"] is None
        assert [e["choices"][0]["finish_reason"] for e in tokens] == [None] * 4 + ["length"]


async def test_draining_nodes_and_a_stray_node_of_another_fingerprint_get_no_requests(
    decode: FakeNode, prefill: FakeNode
) -> None:
    stranger = FakeNode("decode-1", "decode", fingerprint=Fingerprint("0" * 32))
    async with FakeNode("decode-2", "decode") as draining, stranger:
        async with pools.running(decode, prefill, draining) as client:
            client.dial(stranger.address)
            await until(lambda: stranger.links == 1)
            await draining.say_load("draining")
            await client.ready(2)
            for _ in range(20):
                assert (await pools.completing(client))[0] == 200
        assert draining.got_of(RunJob) == stranger.got_of(RunJob) == []


async def test_idle_nodes_share_the_requests(decode: FakeNode) -> None:
    async with FakeNode("decode-1", "decode") as other, pools.running(decode, other) as client:
        await asyncio.gather(*(pools.completing(client) for _ in range(40)))
        counts = [len(node.got_of(RunJob)) for node in (decode, other)]
        assert sum(counts) == 40
        assert min(counts) >= 5


async def test_a_restarted_node_has_a_new_epoch_and_serves_again(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        assert (await pools.completing(client))[0] == 200
        await decode.restart("epoch-2")
        await until_is(lambda: client.epoch("decode-0"), "epoch-2")
        await client.ready(1)
        assert (await pools.completing(client))[0] == 200


async def test_prefill_nodes_run_whole_requests_when_no_decode_node_is_left(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        await decode.stop()
        await client.ready(1)
        status, body, headers = await pools.completing(client)
        assert (status, body["choices"][0]["text"]) == (200, "Hello, world!")
        assert headers["x-baton-placement"].startswith("prefill=- decode=prefill-0 reason=no_de")


async def test_without_nodes_requests_are_refused_and_ready_gives_the_reason(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, unready_wait_s=0.0) as client:
        assert (await client.get("/ready"))[:2] == (200, {"ready": True, "reason": ""})
        await decode.stop()
        await client.ready(0)
        status, body, headers = await pools.completing(client)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert headers["x-baton-placement"].startswith("prefill=- decode=- reason=refused")
        status, body, _ = await client.get("/ready")
        assert (status, body["ready"]) == (503, False)
        assert "1 lost" in body["reason"]
        assert (await client.get("/health"))[0] == 200


async def test_shutdown_finishes_running_streams_and_accepts_no_connections(
    decode: FakeNode,
) -> None:
    decode.script.token_s = 0.03
    async with pools.running(decode) as client:
        answer = asyncio.create_task(pools.stream_events(client))
        await until(lambda: decode.got_of(RunJob))
        await client.router.drain(asyncio.Event())
        assert (await answer)[-1] == "[DONE]"
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as fresh:
                await fresh.get(client.url + "/health")


async def test_past_the_shutdown_deadline_a_stream_ends_with_an_error_event(
    decode: FakeNode,
) -> None:
    decode.script.run = "half"
    async with pools.running(decode, drain_timeout_s=0.1) as client:
        answer = asyncio.create_task(pools.stream_events(client))
        await pools.half_sent(client)
        await client.router.drain(asyncio.Event())
        await client.router._close()
        events = await answer
        assert events[-1]["error"]["code"] == "unavailable"
        await until(lambda: decode.got_of(Abort))
