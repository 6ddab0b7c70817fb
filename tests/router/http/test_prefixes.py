"""/prefixes: who may pin, what nodes get and when, what routers tell, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import pin_key
from baton_protocol.hashing import tenant_salt
from baton_protocol.link import PINS_SINCE, PinPrefix, UnpinPrefix
from baton_protocol.store import MAX_PINS
from baton_router.http.prefixes import PREFIXES_PATH
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.stores.kvstore import plain_client
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TEXT = "You are a helpful assistant of many words. " * 3
BODY = {"prompt": TEXT, "ttl_s": 600}


@pytest.fixture
def index() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(64 << 20) as running:
        yield running


def pins_of(*nodes: FakeNode) -> list[int]:
    return [len(node.got_of(PinPrefix)) for node in nodes]


async def listed(client: pools.Client) -> Any:
    status, body, _ = await client.get(PREFIXES_PATH)
    assert status == 200, body
    return body["prefixes"]


async def test_all_nodes_pin_a_prefix_one_before_the_others(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.pins_as, other.pins_as = ("loading", ""), None
    async with pools.running(decode, other) as client:
        status, prefix, _ = await client.post(PREFIXES_PATH, BODY)
        assert status == 200, prefix
        names = [str(node.report.node) for node in (decode, other)]
        states = {node["node"]: node["state"] for node in prefix["nodes"]}
        assert states == {names[0]: "loading", names[1]: "waiting"}
        size = decode.report.layout.block_size
        assert prefix["tokens"] == len(TEXT) // size * size
        assert prefix["chunks"] == prefix["tokens"] // decode.report.layout.chunk_tokens
        assert (prefix["tenant"], pins_of(decode, other)) == (None, [1, 0])
        [frame] = decode.got_of(PinPrefix)
        assert bytes(frame.prompt_ids) == TEXT.encode()[: prefix["tokens"]]
        assert (frame.id, frame.until, frame.salt) == (prefix["id"], prefix["until"], "")
        assert 590 < frame.ttl_s <= 600
        decode.pins_as = other.pins_as = ("pinned", "")
        decode.pins[frame.id] = msgspec.structs.replace(decode.pins[frame.id], state="pinned")
        await decode.say_load()
        await until(lambda: pins_of(decode, other) == [1, 1])
        await until(lambda: len(other.pins) == 1)
        [again] = await listed(client)
        assert again["id"] == prefix["id"]


async def test_a_new_engine_gets_the_prefix_again(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        assert (await client.post(PREFIXES_PATH, BODY))[0] == 200
        decode.pins.clear()
        await decode.restart("another")
        await until(lambda: pins_of(decode) == [2])


async def test_the_same_prompt_again_is_the_same_prefix_with_another_end(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        first = (await client.post(PREFIXES_PATH, BODY))[1]
        second = (await client.post(PREFIXES_PATH, BODY | {"ttl_s": 9000}))[1]
        assert first["id"] == second["id"]
        assert second["until"] >= first["until"] + 8400
        assert [each["until"] for each in await listed(client)] == [second["until"]]
        frames = decode.got_of(PinPrefix)
        assert [frame.until for frame in frames] == [first["until"], second["until"]]


async def test_a_deleted_prefix_is_unpinned_and_unknown_afterwards(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        prefix = (await client.post(PREFIXES_PATH, BODY))[1]
        path = f"{PREFIXES_PATH}/{prefix['id']}"
        async with client.session.delete(client.url + path) as response:
            assert (response.status, (await response.json())["id"]) == (200, prefix["id"])
        await until(lambda: decode.got_of(UnpinPrefix) == [UnpinPrefix(prefix["id"])])
        assert await listed(client) == []
        async with client.session.delete(client.url + path) as response:
            assert response.status == 404


async def test_a_prefix_that_all_nodes_refuse_is_refused_with_the_reason(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.pins_as = other.pins_as = ("refused", "the prefix needs 9 blocks; 4 of 16 may be pinned")
    async with pools.running(decode, other) as client:
        status, answer, _ = await client.post(PREFIXES_PATH, BODY)
        assert (status, answer["error"]["code"]) == (400, "prefix_refused")
        assert "needs 9 blocks; 4 of 16 may be pinned" in answer["error"]["message"]
        assert await listed(client) == []
        await until(lambda: not (decode.pins or other.pins))


async def test_nodes_of_an_older_version_get_no_prefix() -> None:
    older = FakeNode("decode-0", "decode", protocol=PINS_SINCE - 1)
    async with older, pools.running(older) as client:
        status, answer, _ = await client.post(PREFIXES_PATH, BODY)
        assert (status, answer["error"]["message"]) == (
            503,
            "no node is ready that can pin a prefix",
        )
        assert older.got == []


async def test_a_chats_prefix_ends_with_its_last_message(decode: FakeNode) -> None:
    chat = {"messages": [{"role": "system", "content": TEXT}], "ttl_s": 60}
    async with pools.running(decode) as client:
        for more in ({}, {"add_generation_prompt": True}):
            assert (await client.post(PREFIXES_PATH, chat | more))[0] == 200
        short, long = (frame.prompt_ids for frame in decode.got_of(PinPrefix))
        assert short == long[: len(short)]
        assert TEXT.encode() in bytes(id for id in short if id < 256)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": TEXT}, "ttl_s", "ttl_s is missing"),
        (BODY | {"ttl_s": 0}, "ttl_s", "ttl_s is 0; it must be in [1, 604800]"),
        (BODY | {"ttl_s": 604801}, "ttl_s", "it must be in [1, 604800]"),
        (BODY | {"tenant": "acme"}, "tenant", "tenant 'acme' has no key here"),
        (
            BODY | {"prompt": "Hi"},
            "prompt",
            "the prefix has 2 tokens, and caches have whole blocks",
        ),
        (BODY | {"prompt": [TEXT, TEXT]}, "prompt", "a prefix is one prompt"),
        (BODY | {"model": "other"}, "model", "model 'other' does not exist"),
        (BODY | {"massages": []}, "massages", "is not a field"),
        ({"ttl_s": 9}, "prompt", "prompt is missing"),
        (BODY | {"messages": []}, "prompt", "is not a field of /v1/chat/completions"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(
    decode: FakeNode, body: dict[str, Any], param: str, message: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(PREFIXES_PATH, body)
        assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)
        assert message in answer["error"]["message"]
        assert decode.got == []


@pytest.mark.parametrize(
    ("key", "code"), [("sk-of-acme", "admin_key_required"), ("sk-unknown", "invalid_api_key")]
)
async def test_only_an_admin_may_pin_list_and_unpin(
    decode: FakeNode, tmp_path: Path, key: str, code: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\nops sk-of-ops admin\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for method, path in (
            ("POST", PREFIXES_PATH),
            ("GET", PREFIXES_PATH),
            ("DELETE", f"{PREFIXES_PATH}/{'a' * 16}"),
        ):
            async with client.session.request(
                method, client.url + path, headers=pools.bearer(key)
            ) as response:
                assert (await response.json())["error"]["code"] == code
        assert (await client.post(PREFIXES_PATH, BODY, pools.bearer("sk-of-ops")))[0] == 200


@pytest.mark.parametrize(
    ("sharing", "key", "tenant", "salted"),
    [
        ("tenant", "sk-of-ops", None, "ops"),
        ("tenant", "sk-of-ops", "acme", "acme"),
        ("tenant", "t0ken-of-the-tests", "acme", "acme"),
        ("tenant", "t0ken-of-the-tests", None, "refused"),
        ("tenant", "sk-of-ops", "nobody", "refused"),
        ("pool", "sk-of-ops", None, ""),
        ("pool", "t0ken-of-the-tests", None, ""),
    ],
)
async def test_a_prefix_is_that_of_the_named_tenant_or_of_the_caller(
    decode: FakeNode, tmp_path: Path, sharing: str, key: str, tenant: str | None, salted: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\nops sk-of-ops admin\n")
    settings = {"api_keys": str(keys), "sharing": sharing, "tenant_secret": "s" * 32}
    async with pools.running(decode, **settings) as client:
        body = BODY if tenant is None else BODY | {"tenant": tenant}
        status, answer, _ = await client.post(PREFIXES_PATH, body, pools.bearer(key))
        if salted == "refused":
            assert (status, answer["error"]["param"]) == (400, "tenant")
            return
        assert (status, answer["tenant"]) == (200, salted or None)
        [frame] = decode.got_of(PinPrefix)
        assert frame.salt == (tenant_salt(b"s" * 32, salted) if salted else "")


async def test_a_pool_has_at_most_64_prefixes(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for number in range(MAX_PINS):
            body = BODY | {"prompt": f"{number:3}{TEXT}"}
            assert (await client.post(PREFIXES_PATH, body))[0] == 200
        status, answer, _ = await client.post(PREFIXES_PATH, BODY)
        assert (status, answer["error"]["code"]) == (400, "prefix_refused")
        assert f"{MAX_PINS} prefixes are pinned" in answer["error"]["message"]
        assert (await client.post(PREFIXES_PATH, body | {"ttl_s": 900}))[0] == 200


async def test_routers_share_prefixes_by_the_index_and_a_later_router_learns_them(
    decode: FakeNode, other: FakeNode, index: EmbeddedStore
) -> None:
    url = index.index_url
    async with (
        pools.running(decode, index_url=url) as first,
        pools.running(other, index_url=url) as second,
    ):
        prefix = (await first.post(PREFIXES_PATH, BODY))[1]
        await until(lambda: pins_of(other) == [1])
        [seen] = await listed(second)
        assert seen["id"] == prefix["id"]
        path = f"{PREFIXES_PATH}/{prefix['id']}"
        async with second.session.delete(second.url + path) as response:
            assert response.status == 200
        await until(lambda: decode.got_of(UnpinPrefix) == [UnpinPrefix(prefix["id"])])
        again = (await second.post(PREFIXES_PATH, BODY))[1]
        assert again["id"] == prefix["id"]
        await until(lambda: pins_of(decode) == [2])
    async with pools.running(decode, index_url=url) as third:
        await until(lambda: third.router.api.pins.find(prefix["id"]) is not None)


async def test_an_index_that_lost_everything_gets_the_prefixes_again(
    decode: FakeNode, index: EmbeddedStore
) -> None:
    async with pools.running(decode, index_url=index.index_url) as client:
        prefix = (await client.post(PREFIXES_PATH, BODY))[1]
        with plain_client(index.index_url) as redis:
            redis.flushall()
            key = pin_key("default", prefix["id"])
            await until(lambda: redis.exists(key))
        assert len(await listed(client)) == 1
