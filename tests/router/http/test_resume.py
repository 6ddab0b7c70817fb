"""Streams that outlive their clients and their routers: every event once, whatever breaks."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.link import Abort, RequestStats, RunJob
from baton_router.http import answer as router_answer
from baton_router.requests import resume_writer
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.stores.kvstore import plain_client
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES_API, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
KEEP = {"x-baton-resume": "60"}
EVENT = re.compile(
    rb"id: (([0-9a-f]{32}):(\d+)(?::[0-9a-f]{1,8})?)\n(?:event: \S+\n)?data: (.*)\n\n"
)
# The last event of each dialect.
LAST = re.compile(rb'\[DONE\]|\{"type":"(message_stop|response\.completed)".*')
IDS = re.compile(rb'"(call|chatcmpl|cmpl|resp|rs|fc|msg|generate-tokens)[-_]\w+"')
REPLY = "Hé, wörld! <stop> and more".encode()
PROMPT: dict[str, Any] = {"prompt": "Say hello", "max_tokens": 50}
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello"}],
    "max_tokens": 50,
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESPONSE: dict[str, Any] = {"input": "Say hello", "max_output_tokens": 99}
MESSAGE: dict[str, Any] = MESSAGES | {"max_tokens": 99}
CALL = b'I call.<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'
BODIES: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "text": (COMPLETIONS, PROMPT, REPLY),
    "several choices with usage": (COMPLETIONS, PROMPT | USAGE | {"n": 3}, REPLY),
    "a stop string": (COMPLETIONS, PROMPT | {"stop": ["<stop>"]}, REPLY),
    "scores of prompt and answer": (
        COMPLETIONS,
        PROMPT | {"logprobs": 2, "echo": True, "return_token_ids": True},
        REPLY,
    ),
    "a chat": (CHAT, MESSAGES | USAGE | {"logprobs": True, "top_logprobs": 2}, REPLY),
    "a call of a function": (CHAT, MESSAGES | {"tools": [TOOL], "max_tokens": 99}, CALL),
    "a response": (RESPONSES, RESPONSE | {"top_logprobs": 2}, REPLY),
    "a response with a call": (
        RESPONSES,
        RESPONSE | {"tools": [TOOL["function"] | {"type": "function"}]},
        CALL,
    ),
    "a message": (MESSAGES_API, MESSAGE, REPLY),
    "a message with a call": (
        MESSAGES_API,
        MESSAGE | {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        CALL,
    ),
    "ids": (
        GENERATE,
        {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 50, "n": 2}} | USAGE,
        REPLY,
    ),
}


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as running:
        yield running


@pytest.fixture(autouse=True)
def known_cache(decode: FakeNode) -> None:
    decode.script.reply = REPLY
    decode.script.stats = RequestStats(prompt_tokens=9, cached_tokens=0, computed_tokens=9)


@pytest.fixture
def exact(decode: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node computes the same tokens again, so streams of one choice are repeatable. The index
    gets their tokens only at the end, or when they are resumed at their router."""
    decode.report = msgspec.structs.replace(decode.report, exact="bitwise")
    monkeypatch.setattr(resume_writer, "LATE_S", 3600.0)


@asynccontextmanager
async def kept(
    store: EmbeddedStore, node: FakeNode, path: str = COMPLETIONS, **fields: Any
) -> AsyncIterator[tuple[pools.Client, aiohttp.ClientResponse]]:
    """A router, and a stream that it keeps."""
    async with (
        pools.running(node, index_url=store.index_url) as client,
        stream(client, path, **(fields or PROMPT)) as answer,
    ):
        yield client, answer


@asynccontextmanager
async def stream(
    client: pools.Client, path: str = COMPLETIONS, headers: Any = KEEP, **fields: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"stream": True, **fields}
    async with client.session.post(client.url + path, json=body, headers=headers) as answer:
        yield answer


async def rest(
    client: pools.Client, last: str, *, post_to: str = "", tenant: str = ""
) -> tuple[int, bytes]:
    """Status and body of what follows the event with the id `last`."""
    headers = {"Last-Event-ID": last} | ({"Authorization": f"Bearer {tenant}"} if tenant else {})
    path, method = post_to or f"/requests/{last.partition(':')[0]}/events", "GET"
    body: dict[str, Any] = {}
    if post_to:
        method, body = "POST", {"json": {"stream": True, **PROMPT}}
    async with client.session.request(method, client.url + path, headers=headers, **body) as answer:
        return answer.status, await answer.read()


async def read_events(answer: aiohttp.ClientResponse, count: int) -> bytes:
    data = b""
    while len(EVENT.findall(data)) < count:
        more = await answer.content.readany()
        assert more, data
        data += more
    return data


def first_events(data: bytes, count: int) -> bytes:
    """The bytes of the first whole events, at most `count`."""
    return b"".join([match[0] for match in EVENT.finditer(data)][:count])


def payloads(data: bytes) -> list[Any]:
    """The events, without what differs from one stream to another."""
    events = [event[3] for event in EVENT.findall(data)]
    assert data == b"".join(match[0] for match in EVENT.finditer(data)), data
    return [_plain(event) for event in events]


def _plain(event: bytes) -> Any:
    if not event.startswith(b"{"):
        return event.decode()
    return json.loads(re.sub(rb'"created(_at)?":\d+', b'"created":0', IDS.sub(b'"id"', event)))


def whole(data: bytes) -> bool:
    """Whether the events are numbered from 1 without a gap, and the last one ends the stream."""
    events = EVENT.findall(data)
    return (
        [int(event[2]) for event in events] == list(range(1, len(events) + 1))
        and len({event[1] for event in events}) == 1
        and LAST.fullmatch(events[-1][3]) is not None
    )


# --- the rest of a stream -------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_cut_at_any_byte_and_resumed_is_the_whole_stream(
    store: EmbeddedStore, decode: FakeNode, name: str
) -> None:
    path, fields, decode.script.reply = BODIES[name]
    async with kept(store, decode, path, **fields) as (client, answer):
        assert (answer.status, answer.headers["x-baton-resume"]) == (200, "60")
        data = await answer.read()
        assert whole(data), data
        assert data.count(b"\n\n") == len(EVENT.findall(data))
        plain = await client.session.post(client.url + path, json={"stream": True, **fields})
        unkept = await plain.read()
        assert b"id: " not in unkept
        lines = [line.partition(b"data: ")[2] for line in unkept.split(b"\n\n") if line]
        assert payloads(data) == [_plain(line) for line in lines]
        rests: dict[str, bytes] = {}
        for cut in range(len(data)):
            arrived = data[: data.rfind(b"\n\n", 0, cut) + 2] if b"\n\n" in data[:cut] else b""
            last = EVENT.findall(arrived)[-1][0].decode() if arrived else ""
            if last and last not in rests:
                _, rests[last] = await rest(client, last, post_to=path if len(rests) % 2 else "")
            if last:
                assert arrived + rests[last] == data
        async with client.session.get(f"{client.url}/requests/{last[:32]}/events") as again:
            assert await again.read() == data
            assert again.headers["content-type"].startswith("text/event-stream")
        assert len(decode.got_of(RunJob)) == 2  # what is known is not computed again


@pytest.mark.parametrize("name", BODIES)
async def test_another_router_goes_on_after_the_client_s_last_event(
    store: EmbeddedStore, decode: FakeNode, name: str
) -> None:
    path, fields, decode.script.reply = BODIES[name]
    async with (
        kept(store, decode, path, **fields) as (client, answer),
        pools.running(decode, index_url=store.index_url) as other,
    ):
        undisturbed = payloads(await answer.read())
        for seen in (1, 2, 5) if name == "text" else (3,):
            decode.script.run, decode.got[:] = "half", []
            async with stream(client, path, **fields) as first:
                known = await read_events(first, 5)
                decode.script.run = "answer"
                arrived = first_events(known, seen)
                last = EVENT.findall(arrived)[-1][0].decode()
                status, data = await rest(other, last, post_to=path)
                assert status == 200
                assert whole(arrived + data), arrived + data
                assert payloads(arrived + data) == undisturbed
                with pytest.raises(aiohttp.ClientPayloadError):  # its router noticed
                    await first.read()
            jobs = decode.got_of(RunJob)
            assert len(jobs) == 2
            assert any(jobs[1].request.outputs)
            assert jobs[1].request.params.seed == jobs[0].request.params.seed
        await until_is(client.unfinished, 0)
        await until_is(other.unfinished, 0)


async def test_a_client_leaves_and_finds_its_stream_at_the_same_router(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.token_s = 0.01
    async with pools.running(decode, index_url=store.index_url) as client:
        async with stream(client, **PROMPT) as answer:
            arrived = await read_events(answer, 2)
        await until_is(client.answering, 0)  # the answer goes on to its end
        assert not decode.got_of(Abort)
        status, data = await rest(client, EVENT.findall(arrived)[-1][0].decode())
        assert status == 200
        assert whole(arrived + data)
        figure = await client.figure('baton_router_resumed_streams_total{outcome="ended"}')
        assert figure == 1


async def test_a_request_whose_client_stays_away_ends_after_its_time(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode, index_url=store.index_url) as client:
        async with stream(client, headers={"x-baton-resume": "1"}, **PROMPT) as answer:
            arrived = await read_events(answer, 2)
        assert await client.unfinished() == 1
        await until(lambda: bool(decode.got_of(Abort)))
        await until_is(client.unfinished, 0)
        status, _ = await rest(client, EVENT.findall(arrived)[-1][0].decode())
        assert status == 404
    with plain_client(store.index_url) as redis:
        assert not redis.keys(f"r1:*{EVENT.findall(arrived)[-1][1].decode()}*")


async def test_a_client_that_leaves_before_its_first_token_finds_its_stream_by_the_request_s_id(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    async with pools.running(decode, index_url=store.index_url) as client:
        await decode.say_load("draining")
        await client.ready(0)
        async with stream(client, **PROMPT) as answer:
            id = answer.headers["x-baton-request-id"]
        await decode.say_load("ready")
        async with client.session.get(f"{client.url}/requests/{id}/events") as again:
            assert whole(await again.read())
        await until_is(client.unfinished, 0)


@pytest.mark.parametrize("name", ["text", "a response", "a message", "ids"])
async def test_a_final_error_is_the_same_event_for_a_client_that_comes_back(
    store: EmbeddedStore, decode: FakeNode, name: str
) -> None:
    path, fields, _ = BODIES[name]
    decode.script.run = "fail"
    async with kept(store, decode, path, **fields) as (client, answer):
        data = await answer.read()
        assert b"the engine said no" in data
        last = EVENT.findall(data)[-1][0].decode()
        id, number = last.split(":")
        async with client.session.get(f"{client.url}/requests/{id}/events") as again:
            assert await again.read() == data
        assert await rest(client, f"{id}:{number}") == (200, b"")


async def test_a_slow_client_is_cut_off_and_finds_everything_later(
    store: EmbeddedStore, decode: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the kernel and two batches may hold so much that the rest stays below the limit.
    monkeypatch.setattr(router_answer, "UNREAD_PER_CHOICE", 8)
    decode.script.reply = b"x" * 240
    fields = {"prompt": "x", "n": 128, "max_tokens": 240, "return_token_ids": True}
    async with pools.running(decode, index_url=store.index_url) as client:
        body = {"stream": True, **fields}
        async with (
            aiohttp.ClientSession(read_bufsize=1 << 10) as session,
            session.post(client.url + COMPLETIONS, json=body, headers=KEEP) as slow,
        ):
            arrived = await slow.content.readany()
            await until_is(client.answering, 0)
        id = EVENT.findall(arrived)[0][1].decode()
        async with client.session.get(f"{client.url}/requests/{id}/events") as again:
            data = await again.read()
        assert whole(data)
        assert len(EVENT.findall(data)) == 128 * 240 + 1


# --- events that the index lacks ------------------------------------------------------------------


def several(fields: dict[str, Any]) -> bool:
    """Whether the call asks for several choices."""
    n: int = fields.get("sampling_params", fields).get("n", 1)
    return n > 1


SCORES = "scores of prompt and answer"
REPEATABLE = [name for name in BODIES if not several(BODIES[name][1]) and name != SCORES]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", REPEATABLE)
async def test_another_router_lets_the_nodes_compute_again_what_the_index_lacks(
    store: EmbeddedStore, decode: FakeNode, name: str
) -> None:
    path, fields, decode.script.reply = BODIES[name]
    async with (
        kept(store, decode, path, **fields) as (client, answer),
        pools.running(decode, index_url=store.index_url) as other,
    ):
        undisturbed = payloads(await answer.read())
        decode.script.run, decode.got[:] = "half", []
        async with stream(client, path, **fields) as first:
            arrived = await read_events(first, 5)
            arrived = first_events(arrived, 5)
            decode.script.run = "answer"
            status, data = await rest(other, EVENT.findall(arrived)[-1][0].decode(), post_to=path)
        assert status == 200
        assert whole(arrived + data), arrived + data
        assert payloads(arrived + data) == undisturbed
        jobs = decode.got_of(RunJob)
        assert [len(job.request.outputs[0]) for job in jobs] == [0, 0]
        assert jobs[1].request.params.seed == jobs[0].request.params.seed


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", BODIES)
async def test_a_repeatable_stream_resumed_after_any_event_is_the_whole_stream(
    store: EmbeddedStore, decode: FakeNode, name: str
) -> None:
    path, fields, decode.script.reply = BODIES[name]
    async with kept(store, decode, path, **fields) as (client, answer):
        data = await answer.read()
        assert whole(data), data
        assert (b":" in EVENT.findall(data)[0][0][33:]) == (name in REPEATABLE)
        arrived = b""
        for match in EVENT.finditer(data):
            arrived += match[0]
            status, following = await rest(client, match[1].decode(), post_to=path)
            assert (status, arrived + following) == (200, data)
        assert len(decode.got_of(RunJob)) == 1  # its own router writes first what the index lacks


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("known", [False, True])
async def test_a_client_gets_no_token_that_follows_other_tokens_than_its_own(
    store: EmbeddedStore, decode: FakeNode, known: bool
) -> None:
    """The node breaks its word: it computes other tokens for the second router. `known`: the index
    has those before the third router takes over."""
    async with (
        kept(store, decode, COMPLETIONS, **PROMPT) as (client, answer),
        pools.running(decode, index_url=store.index_url) as other,
    ):
        await answer.read()
        decode.script.run = "half"
        async with stream(client, **PROMPT) as first:
            arrived = await read_events(first, 3)
            last = EVENT.findall(arrived)[2][0].decode()
            decode.script.run, decode.script.reply = "answer", REPLY.swapcase()
            if known:
                _, theirs = await rest(other, f"{last[:32]}:0")
                assert whole(theirs)
                assert b"HELL" not in theirs
            status, data = await rest(other, last)
        message = "the tokens before that event are not those that the nodes compute"
        assert message in data.decode()
        assert status == (400 if known else 200)
        assert b"id: " not in data
        assert data.count(b"data: ") == (0 if known else 1)
        # Who has no event gets the whole stream, as it is now.
        async with client.session.get(f"{client.url}/requests/{last[:32]}/events") as again:
            text = await again.read()
        assert whole(text)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("last", ["ID:3", "ID:3:00000000", "ID:999:TOKENS", "ID:3:TOKENSx"])
async def test_a_made_up_id_of_a_repeatable_stream_gets_an_error_and_harms_nothing(
    store: EmbeddedStore, decode: FakeNode, last: str
) -> None:
    decode.script.run = "half"
    async with kept(store, decode) as (client, answer):
        arrived = await read_events(answer, 3)
        good = EVENT.findall(arrived)[2][0].decode()
        id, _, tokens = good.split(":")
        decode.script.run = "answer"
        _, data = await rest(client, last.replace("ID", id).replace("TOKENS", tokens))
        assert b"invalid_request_error" in data
        assert b"id: " not in data
        _, data = await rest(client, good)
        assert whole(first_events(arrived, 3) + data)


@pytest.mark.usefixtures("exact")
async def test_an_error_while_the_tokens_are_computed_again_takes_no_event_of_the_client_s_away(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with (
        kept(store, decode) as (_, answer),
        pools.running(decode, index_url=store.index_url) as other,
    ):
        arrived = await read_events(answer, 3)
        last = EVENT.findall(arrived)[2][0].decode()
        decode.script.run = "fail"
        _, data = await rest(other, last)
        assert data.startswith(b"data: ")
        assert b"the engine said no" in data
        decode.script.run = "answer"
        _, data = await rest(other, last)
        assert whole(first_events(arrived, 3) + data)


# --- who may resume what --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path", "changes", "says"),
    [
        ("", COMPLETIONS, {}, "use 1 to 600"),
        ("0", COMPLETIONS, {}, "use 1 to 600"),
        ("601", COMPLETIONS, {}, "'601'"),
        ("-1", COMPLETIONS, {}, "'-1'"),
        ("1.5", COMPLETIONS, {}, "'1.5'"),
        ("٣", COMPLETIONS, {}, "use 1 to 600"),
        ("9" * 4000, COMPLETIONS, {}, "use 1 to 600"),
        ("60", COMPLETIONS, {"stream": False}, "add stream"),
        ("60", COMPLETIONS, {"prompt": ["a", "b"]}, "one prompt"),
        ("60", COMPLETIONS, {"max_tokens": 0, "echo": True}, "about its prompt"),
        ("60", RESPONSES, {"store": True}, "no response with store"),
        ("60", RESPONSES, {"previous_response_id": f"resp_{'0' * 32}"}, "items as input"),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    store: EmbeddedStore,
    decode: FakeNode,
    value: str,
    path: str,
    changes: dict[str, Any],
    says: str,
) -> None:
    async with pools.running(decode, index_url=store.index_url) as client:
        headers = {"x-baton-resume": value}
        body = (RESPONSE if path == RESPONSES else PROMPT) | changes
        async with stream(client, path, headers, **body) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 400
            assert says in error["message"]
            assert len(error["message"]) < 300
        assert not decode.got_of(RunJob)


async def test_a_router_without_an_index_or_with_max_resume_0_keeps_nothing(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    for settings in ({}, {"index_url": store.index_url, "max_resume_s": 0.0}):
        async with pools.running(decode, **settings) as client:
            async with stream(client, **PROMPT) as answer:
                assert answer.status == 400
                assert "leave the header out" in await answer.text()
            assert (await rest(client, f"{'a' * 32}:1"))[0] == 404


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("ID:99999", 400),
        ("ID:999999999999", 400),
        ("ID:-1", 400),
        ("ID:1 ", 200),  # HTTP strips it
        ("ID", 400),
        (f"{'0' * 32}:1", 404),
        ("../../secrets:1", 400),
        ("*:1", 400),
        ("x" * 5000, 400),
        ("\x80:1", 400),
    ],
)
async def test_a_hostile_last_event_id_is_refused(
    store: EmbeddedStore, decode: FakeNode, last: str, status: int
) -> None:
    decode.script.run = "half"
    async with kept(store, decode) as (client, answer):
        arrived = await read_events(answer, 2)
        id = EVENT.findall(arrived)[0][1].decode()
        decode.script.run = "answer"
        given = await rest(client, last.replace("ID", id), post_to=COMPLETIONS)
        assert given[0] == status, given
        # A wrong position ends the stream of the client that has it, but loses nothing.
        _, data = await rest(client, f"{id}:2", post_to=COMPLETIONS)
        assert whole(first_events(arrived, 2) + data)


async def test_only_its_tenant_and_its_route_find_a_stream(
    store: EmbeddedStore, decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice key-a\nbob key-b\n")
    async with pools.running(decode, index_url=store.index_url, api_keys=str(keys)) as client:
        headers = KEEP | pools.bearer("key-a")
        async with stream(client, headers=headers, **PROMPT) as answer:
            data = await answer.read()
        id = EVENT.findall(data)[0][1].decode()
        assert (await rest(client, f"{id}:1", tenant="key-b"))[0] == 404
        assert (await rest(client, f"{id}:1", tenant="wrong"))[0] == 401
        assert (await rest(client, f"{id}:1"))[0] == 401
        assert (await rest(client, f"{id}:1", tenant="key-a", post_to=CHAT))[0] == 404
        assert (await rest(client, f"{id}:1", tenant="key-a"))[0] == 200
        with plain_client(store.index_url) as redis:
            [key] = [key for key in redis.keys(f"r1:*{id}") if not key.endswith(b":log")]
            assert 0 < redis.pttl(key) <= 62_000
            assert 0 < redis.pttl(key + b":log") <= 62_000
            redis.pexpire(key, 0)
        assert (await rest(client, f"{id}:1", tenant="key-a"))[0] == 404


async def test_a_stream_that_goes_on_is_charged_for_what_is_new(
    store: EmbeddedStore, decode: FakeNode, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants"
    tenants.write_text("[defaults]\nrequests_per_minute = 2\nburst_seconds = 60\n")
    settings = {"index_url": store.index_url, "tenants": str(tenants), "pool": "charged"}
    decode.script.run = "half"
    half = len(REPLY[: len(REPLY) // 2].decode())  # events: one per character
    async with pools.running(decode, **settings) as client:
        async with stream(client, **PROMPT) as answer:
            last = EVENT.findall(await read_events(answer, half))[-1][0].decode()
        for count in range(3):  # as often as its client likes
            async with client.session.get(f"{client.url}/requests/{last[:32]}/events") as again:
                await read_events(again, half)
                jobs = count + 2
                await until(lambda jobs=jobs: len(decode.got_of(RunJob)) == jobs)  # type: ignore[misc]
        decode.script.run = "answer"
        assert (await rest(client, last))[0] == 200
        await until_is(client.unfinished, 0)
        charged = [
            await client.figure(f'baton_router_tenant_tokens_total{{kind="{kind}",tenant=""}}')
            for kind in ("prompt", "completion")
        ]
        assert charged == [len(PROMPT["prompt"]), len(REPLY)]
        for status in (200, 429):
            async with stream(client, headers={}, **PROMPT) as answer:
                await answer.read()
                assert answer.status == status


async def test_a_stream_without_the_header_leaves_nothing_on_the_index(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    with plain_client(store.index_url) as redis:
        redis.flushall()
        async with pools.running(decode, index_url=store.index_url) as client:
            async with stream(client, headers={}, **PROMPT) as answer:
                assert b"id:" not in await answer.read()
                assert "x-baton-resume" not in answer.headers
            assert redis.keys("r1:*") == []


# --- the index fails ------------------------------------------------------------------------------


async def test_without_the_index_a_stream_goes_on_and_takes_its_ids_back(decode: FakeNode) -> None:
    decode.script.token_s = 0.05
    with EmbeddedStore() as own:
        async with kept(own, decode) as (_, answer):
            data = await read_events(answer, 2)
            with plain_client(own.index_url) as redis:
                redis.flushall()
            data += await answer.read()
        events = [event for event in data.split(b"\n\n") if event]
        numbered = [event.startswith(b"id: ") for event in events]
        first = numbered.index(False)
        assert all(numbered[:first])
        assert not any(numbered[first:])
        assert events[first].startswith(b"id:\ndata: ")
        assert all(event.startswith(b"data: ") for event in events[first + 1 :])
        texts = [json.loads(event.partition(b"data: ")[2]) for event in events[:-1]]
        assert "".join(each["choices"][0]["text"] for each in texts) == REPLY.decode()


async def test_while_the_index_is_down_a_stream_begins_without_ids(decode: FakeNode) -> None:
    url = "unix:///nonexistent/redis.sock"
    async with pools.running(decode, index_url=url) as client:
        async with stream(client, **PROMPT) as answer:
            assert (answer.status, answer.headers["x-baton-resume"]) == (200, "0")
            assert b"id:" not in await answer.read()
        assert (await rest(client, f"{'a' * 32}:1"))[0] == 503


# --- clients --------------------------------------------------------------------------------------


async def test_openai_s_client_reads_a_kept_stream_with_pauses(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.token_s = 0.05
    settings = {"index_url": store.index_url, "keepalive_s": 0.02}
    async with (
        pools.running(decode, **settings) as client,
        openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none") as sdk,
    ):
        answer = await sdk.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
            extra_headers=KEEP,
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in answer]
        assert "".join(texts) == REPLY[:12].decode(errors="ignore")


async def test_anthropic_s_client_reads_a_kept_stream_with_pauses(
    store: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.token_s = 0.05
    settings = {"index_url": store.index_url, "keepalive_s": 0.02}
    async with (
        pools.running(decode, **settings) as client,
        anthropic.AsyncAnthropic(base_url=client.url, api_key="none") as sdk,
        sdk.messages.stream(
            model="fake-model",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            extra_headers=KEEP,
        ) as answer,
    ):
        assert await answer.get_final_text() == REPLY[:12].decode(errors="ignore")
