"""/v1/responses: answers, responses that are kept and continued at any router, and those that are
made in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.responses import ResponseLimits, Responses
from baton_kvstore.keys import response_lease_key
from baton_protocol.errors import ErrorRecord
from baton_protocol.link import JobFailed, RunJob
from baton_router.openai.answers import CommonFields
from baton_router.responses.call import ResponseCall
from baton_router.responses.event_log import EventLog
from baton_router.responses.events import ResponseCreated, event_bytes
from baton_router.responses.kept import KeptResponses
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.stores.kvstore import plain_client
from tests.support.waiting import until

pytestmark = pytest.mark.integration

ROUTE = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi"}
UNKNOWN = f"resp_{'0' * 32}"


@pytest.fixture(scope="module")
def index() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(64 << 20) as running:
        yield running


def with_index(index: EmbeddedStore, *nodes: FakeNode, **settings: Any) -> Any:
    return pools.running(*nodes, index_url=index.index_url, **settings)


def prompt(node: FakeNode) -> str:
    """The text of the last prompt that the node got."""
    return bytes(id for id in prompt_ids(node) if id < 256).decode()


def prompt_ids(node: FakeNode) -> tuple[int, ...]:
    ids: tuple[int, ...] = node.got_of(RunJob)[-1].request.prompt_ids
    return ids


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-key-of-{name}"}


async def post(client: pools.Client, body: Any, **more: Any) -> Any:
    status, answer, _ = await client.post(ROUTE, body, **more)
    assert status == 200, answer
    return answer


def text_of(response: Any) -> str:
    [item] = response["output"]
    return str(item["content"][0]["text"])


async def streamed(client: pools.Client, **more: Any) -> list[Any]:
    """The data of a stream's events."""
    body = BODY | {"stream": True} | more
    async with client.session.post(client.url + ROUTE, json=body) as stream:
        return await events_of(stream)


async def read_again(client: pools.Client, id: str, after: int | None = None) -> list[Any]:
    """The data of a kept response's events."""
    query = {"stream": "true"} | ({} if after is None else {"starting_after": f"{after}"})
    async with client.session.get(f"{client.url}{ROUTE}/{id}", params=query) as stream:
        return await events_of(stream)


async def events_of(stream: aiohttp.ClientResponse) -> list[Any]:
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    blocks = (await stream.text()).split("\n\n")[:-1]
    shown = [block for block in blocks if not block.startswith(":")]
    return [msgspec.json.decode(block.partition("data: ")[2]) for block in shown]


async def test_an_answer_in_one_piece_and_its_stream_are_one_response(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        answer = await post(client, BODY)
        assert (text_of(answer), answer["status"]) == (pools.REPLY, "completed")
        assert (answer["store"], answer["model"]) == (False, "fake-model")
        shown = await streamed(client)
        assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
        deltas = [event["delta"] for event in shown if event["type"].endswith("text.delta")]
        assert (len(deltas), "".join(deltas)) == (len(pools.REPLY), pools.REPLY)
        document = (await client.get("/openapi.json"))[1]
        content = document["paths"][ROUTE]["post"]["responses"]["200"]["content"]
        data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][1]
        for schema, values in (
            (data["contentSchema"], shown),
            (content["application/json"]["schema"], [answer]),
        ):
            components = {"components": document["components"]}
            validator = jsonschema_rs.validator_for({**schema, **components})
            for value in values:
                validator.validate(value)
        last = shown[-1]["response"]
        changing = {"id", "created_at", "output"}
        assert {name: value for name, value in last.items() if name not in changing} == {
            name: value for name, value in answer.items() if name not in changing
        }


async def test_a_stream_continues_at_another_node(decode: FakeNode, other: FakeNode) -> None:
    decode.script.run = "half"
    async with pools.running(decode, link_patience_s=0.05) as client:
        asked = asyncio.create_task(streamed(client))
        await pools.half_sent(client)
        client.dial(other.address)
        await client.ready(2)
        await decode.stop()
        shown = await asked
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    deltas = [event["delta"] for event in shown if event["type"].endswith("text.delta")]
    last = shown[-1]["response"]
    assert "".join(deltas) == text_of(last) == pools.REPLY
    assert last["status"] == "completed"
    assert other.got_of(RunJob)


async def test_a_response_is_kept_and_continued_at_another_router(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        first = await post(one, BODY | {"store": True, "instructions": "Be brief."})
        assert "Be brief." in prompt(decode)
        status, read, _ = await two.get(f"{ROUTE}/{first['id']}")
        assert (status, read) == (200, first)
        more = {"input": "And?", "previous_response_id": first["id"], "store": True}
        second = await post(two, more)
        assert second["previous_response_id"] == first["id"]
        rendered = prompt(decode)
        places = [rendered.index(text) for text in ("Hi", pools.REPLY, "And?")]
        assert places == sorted(places)
        assert "Be brief." not in rendered, "instructions are of one response"
        asked = {name: more[name] for name in ("input", "previous_response_id")}
        status, counted, _ = await one.post(f"{ROUTE}/input_tokens", asked)
        assert counted == {
            "object": "response.input_tokens",
            "input_tokens": second["usage"]["input_tokens"],
        }
        assert len(prompt_ids(decode)) == second["usage"]["input_tokens"]
        await check_input(one, second["id"])
        status, gone, _ = await delete(two, second["id"])
        assert gone == {"id": second["id"], "object": "response", "deleted": True}
        for path in (f"{ROUTE}/{second['id']}", f"{ROUTE}/{second['id']}/input_items"):
            status, error, _ = await one.get(path)
            assert (status, error["error"]["code"]) == (404, "response_not_found")
        assert (await delete(two, second["id"]))[0] == 404


async def delete(client: pools.Client, id: str, headers: Any = None) -> pools.Reply:
    async with client.session.delete(f"{client.url}{ROUTE}/{id}", headers=headers) as response:
        return response.status, await response.json(), {}


async def check_input(client: pools.Client, id: str) -> None:
    """The input of the second response, in pages of either order."""
    path = f"{ROUTE}/{id}/input_items"
    _, page, _ = await client.get(f"{path}?order=asc")
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert (texts, page["has_more"]) == (["Hi", pools.REPLY, "And?"], False)
    ids = [item["id"] for item in page["data"]]
    assert len(set(ids)) == 3
    _, page, _ = await client.get(f"{path}?limit=2")
    assert [item["id"] for item in page["data"]] == ids[:0:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    _, page, _ = await client.get(f"{path}?after={ids[1]}")
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:1], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x"):
        status, error, _ = await client.get(f"{path}?{query}")
        assert (status, error["error"]["param"]) == (400, query.partition("=")[0])


async def test_no_tenant_finds_the_responses_of_another(
    index: EmbeddedStore, decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-key-of-acme\nother sk-key-of-other\n")
    async with with_index(index, decode, api_keys=str(keys)) as client:
        mine = await post(client, BODY | {"store": True}, headers=key("acme"))
        path = f"{ROUTE}/{mine['id']}"
        for one in (path, f"{path}/input_items"):
            assert (await client.get(one, key("acme")))[0] == 200
            assert (await client.get(one, key("other")))[0] == 404
        assert (await client.post(f"{path}/cancel", {}, key("other")))[0] == 404
        assert (await delete(client, mine["id"], key("other")))[0] == 404
        continued = BODY | {"previous_response_id": mine["id"]}
        status, error, _ = await client.post(ROUTE, continued, key("other"))
        assert (status, error["error"]["param"]) == (404, "previous_response_id")
        assert (await delete(client, mine["id"], key("acme")))[0] == 200


async def test_what_is_not_kept_is_named(index: EmbeddedStore, decode: FakeNode) -> None:
    async with with_index(index, decode, response_bytes=4096) as client:
        for id in (UNKNOWN, "resp_1", "x"):
            assert (await client.get(f"{ROUTE}/{id}"))[0] == 404
        plain = await post(client, BODY)
        assert (await client.get(f"{ROUTE}/{plain['id']}"))[0] == 404
        kept = await post(client, BODY | {"store": True})
        for query in ("stream=1", "starting_after=1", "starting_after=x&stream=true"):
            status, error, _ = await client.get(f"{ROUTE}/{kept['id']}?{query}")
            assert (status, error["error"]["param"]) == (400, query.partition("=")[0])
        for id in (UNKNOWN, "x"):
            assert (await client.get(f"{ROUTE}/{id}?stream=true"))[0] == 404
        status, error, _ = await client.post(f"{ROUTE}/{kept['id']}/cancel", {})
        assert (status, "background" in error["error"]["message"]) == (400, True)
        status, error, _ = await client.post(ROUTE, {"input": "x" * 4096, "store": True})
        assert (status, error["error"]["param"]) == (400, "store")


@pytest.mark.parametrize("settings", [{}, {"response_ttl_s": 0}], ids=str)
async def test_a_router_that_keeps_none_refuses_to(
    index: EmbeddedStore, decode: FakeNode, settings: dict[str, Any]
) -> None:
    urls = {"index_url": index.index_url} if settings else {}
    async with pools.running(decode, **urls, **settings) as client:
        assert (await client.get(f"{ROUTE}/{UNKNOWN}"))[0] == 404
        for field in ({"store": True}, {"previous_response_id": UNKNOWN}):
            status, error, _ = await client.post(ROUTE, BODY | field)
            assert (status, error["error"]["param"]) == (400, next(iter(field)))


async def test_an_answer_is_given_even_if_the_index_fails(decode: FakeNode) -> None:
    decode.script.token_s = 0.02
    with EmbeddedStore(64 << 20) as index:
        async with with_index(index, decode) as client:
            asked = asyncio.create_task(client.post(ROUTE, BODY | {"store": True}))
            await until(lambda: bool(decode.got_of(RunJob)))
            index.stop()
            status, answer, _ = await asked
            assert (status, text_of(answer)) == (200, pools.REPLY)
            status, error, _ = await client.get(f"{ROUTE}/{answer['id']}")
            assert (status, error["error"]["code"]) == (503, "unavailable")


# --- in the background ----------------------------------------------------------------------------

BACKGROUND = BODY | {"store": True, "background": True}


async def ended(client: pools.Client, id: str) -> Any:
    """The response once it has ended."""
    async with asyncio.timeout(20):
        while True:
            _, response, _ = await client.get(f"{ROUTE}/{id}")
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.05)


async def test_a_response_in_the_background_is_read_later_at_any_router(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        begun = await post(one, BACKGROUND)
        assert (begun["status"], begun["output"], begun["model"]) == ("queued", [], "fake-model")
        response = await ended(two, begun["id"])
        assert (response["status"], text_of(response)) == ("completed", pools.REPLY)
        assert response["background"]
        more = await post(two, BODY | {"previous_response_id": begun["id"]})
        assert text_of(more) == pools.REPLY
        document = (await one.get("/openapi.json"))[1]
        headers = document["paths"][ROUTE]["post"]["responses"]["200"]["headers"]
        _, _, given = await one.post(ROUTE, BACKGROUND)
        assert {name for name, each in headers.items() if each.get("required")} <= given.keys()


async def test_a_response_in_the_background_is_cancelled_at_another_router(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        begun = await post(one, BACKGROUND)
        await until(lambda: bool(decode.got_of(RunJob)))
        status, error, _ = await two.post(ROUTE, BODY | {"previous_response_id": begun["id"]})
        assert (status, error["error"]["param"]) == (400, "previous_response_id")
        for _ in range(2):  # an ended one stays as it is
            status, response, _ = await two.post(f"{ROUTE}/{begun['id']}/cancel", {})
            assert (status, response["status"]) == (200, "cancelled")
        assert await one.unfinished() == 0


async def test_a_failure_in_the_background_is_in_the_response(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "fail"
    decode.script.failure = ErrorRecord("too hot", "engine_error", status=500)
    async with with_index(index, decode) as client:
        response = await ended(client, (await post(client, BACKGROUND))["id"])
        assert response["status"] == "failed"
        assert response["error"] == {"code": "engine_error", "message": "too hot"}
        status, error, _ = await client.post(ROUTE, BACKGROUND | {"model": "unknown"})
        assert (status, error["error"]["code"]) == (404, "model_not_found")


async def test_a_response_of_a_router_that_stops_has_failed(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with with_index(index, decode) as two:
        async with with_index(index, decode) as one:
            begun = await post(one, BACKGROUND)
            await until(lambda: bool(decode.got_of(RunJob)))
        _, response, _ = await two.get(f"{ROUTE}/{begun['id']}")
        assert (response["status"], response["error"]["code"]) == ("failed", "unavailable")


async def test_a_response_whose_router_is_lost_has_failed_after_its_lease(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with with_index(index, decode) as client:
        begun = await post(client, BACKGROUND)
        await until(lambda: bool(decode.got_of(RunJob)))
        with plain_client(index.index_url) as redis:
            redis.delete(response_lease_key("default", "", begun["id"]))
        _, response, _ = await client.get(f"{ROUTE}/{begun['id']}")
        assert (response["status"], response["error"]["code"]) == ("failed", "unavailable")


# --- streams of kept responses --------------------------------------------------------------------


def text_deltas(shown: list[Any]) -> str:
    return "".join(event["delta"] for event in shown if event["type"].endswith("text.delta"))


def numbers(shown: list[Any]) -> list[int]:
    return [event["sequence_number"] for event in shown]


async def check_rests(client: pools.Client, id: str, shown: list[Any]) -> None:
    """The stream can be read again, from each of some places on."""
    for after in (0, 1, len(shown) // 2, len(shown) - 2, len(shown) - 1, len(shown) + 5):
        assert await read_again(client, id, after) == shown[after + 1 :]


async def test_a_kept_stream_is_read_again_with_its_numbers_at_another_router(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        shown = await streamed(one, store=True)
        id = shown[-1]["response"]["id"]
        assert (text_deltas(shown), len(shown)) == (pools.REPLY, len(pools.REPLY) + 8)
        assert await read_again(two, id) == shown
        await check_rests(two, id, shown)


async def test_a_response_that_was_not_streamed_has_a_stream_with_one_delta(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    async with with_index(index, decode) as client:
        whole = await post(client, BODY | {"store": True})
        shown = await read_again(client, whole["id"])
        assert (text_deltas(shown), len(shown)) == (pools.REPLY, 9)
        assert numbers(shown) == list(range(9))
        assert (shown[-1]["type"], shown[-1]["response"]) == ("response.completed", whole)
        await check_rests(client, whole["id"], shown)
        begun = await post(client, BACKGROUND)
        later = await read_again(client, begun["id"])
        assert (text_deltas(later), len(later)) == (pools.REPLY, 9)


async def test_a_stream_in_the_background_is_followed_at_another_router_while_it_is_made(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.token_s = 0.1
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        asked = asyncio.create_task(streamed(one, store=True, background=True))
        await until(lambda: bool(decode.got_of(RunJob)))
        id = f"resp_{decode.got_of(RunJob)[-1].request.id}"
        followed = asyncio.create_task(read_again(two, id))
        rest = asyncio.create_task(read_again(two, id, 3))
        _, begun, _ = await two.get(f"{ROUTE}/{id}")
        assert begun["status"] in ("queued", "in_progress")
        shown = await asked
        assert await followed == shown
        assert await rest == shown[4:]
        assert numbers(shown) == list(range(len(pools.REPLY) + 8))
        assert (shown[0]["response"]["status"], text_deltas(shown)) == ("queued", pools.REPLY)
        assert shown[-1]["response"] == (await two.get(f"{ROUTE}/{id}"))[1]
        await check_rests(two, id, shown)


async def test_a_stream_in_the_background_outlives_its_client(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.token_s = 0.05
    body = BACKGROUND | {"stream": True}
    async with with_index(index, decode) as client:
        async with client.session.post(client.url + ROUTE, json=body) as stream:
            first = await stream.content.readuntil(b"\n\n")
        begun = msgspec.json.decode(first.partition(b"data: ")[2])
        assert (begun["type"], begun["sequence_number"]) == ("response.created", 0)
        rest = await read_again(client, begun["response"]["id"], 0)
        assert numbers(rest) == list(range(1, len(pools.REPLY) + 8))
        assert text_deltas(rest) == pools.REPLY


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_stream_that_does_not_finish_ends_with_its_response(
    index: EmbeddedStore, decode: FakeNode, how: str
) -> None:
    decode.script.run = "half"
    async with with_index(index, decode) as one, with_index(index, decode) as two:
        asked = asyncio.create_task(streamed(one, store=True, background=True))
        await until(lambda: bool(decode.got_of(RunJob)))
        id = f"resp_{decode.got_of(RunJob)[-1].request.id}"
        if how == "cancelled":
            await two.post(f"{ROUTE}/{id}/cancel", {})
        else:
            job = decode.got_of(RunJob)[-1].request
            error = ErrorRecord("too hot", "engine_error", status=500)
            await decode.say(JobFailed(job.id, job.attempt, error))
        shown = await asked
        last = shown[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", how)
        assert numbers(shown) == list(range(len(shown)))
        assert await read_again(two, id) == shown


async def test_events_without_room_leave_the_end_of_the_stream(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    async with with_index(index, decode, response_bytes=3600) as client:
        shown = await streamed(client, store=True)
        id = shown[-1]["response"]["id"]
        [last] = await read_again(client, id, 3)
        assert (last["type"], last["sequence_number"]) == ("response.completed", 4)
        assert last["response"] == shown[-1]["response"]


async def test_a_stream_whose_router_was_lost_ends_with_a_failure(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    log, limits = EventLog(), ResponseLimits(60.0, 1 << 20, 1 << 20)
    common = CommonFields(id=UNKNOWN, created=5, model="m", system_fingerprint="f")
    begun = ResponseCall.from_body(BACKGROUND).response(common, "in_progress")
    log.add(event_bytes(ResponseCreated(sequence_number=0, response=begun)))
    async with with_index(index, decode) as client:
        kept = KeptResponses(Responses(index.index_url, "default", limits), 1 << 20)
        await kept.write("", begun, [], log)  # nobody has its lease
        await kept.close()
        created, failed = await read_again(client, UNKNOWN)
    assert (created["type"], created["response"]["created_at"]) == ("response.created", 5)
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 1)
    assert failed["response"]["error"]["code"] == "unavailable"


async def test_a_router_that_shuts_down_ends_the_streams_of_another_s_responses(
    index: EmbeddedStore, decode: FakeNode
) -> None:
    decode.script.run = "half"
    async with with_index(index, decode) as one:
        body = BACKGROUND | {"stream": True}
        async with one.session.post(one.url + ROUTE, json=body) as stream:
            first = await stream.content.readuntil(b"\n\n")
        begun = msgspec.json.decode(first.partition(b"data: ")[2])
        path = f"{ROUTE}/{begun['response']['id']}"
        async with with_index(index, decode) as two:
            query = {"stream": "true", "starting_after": "0"}
            async with two.session.get(two.url + path, params=query) as stream:
                await stream.content.readuntil(b"\n\n")
                two.router.api.generation.draining = True
                shown = await events_of(stream)
        assert (shown[-1]["type"], shown[-1]["code"]) == ("error", "unavailable")
