"""POST /reset_prefix_cache: who may, what nodes get, and what the answer says."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_protocol.link import RESET_SINCE, ResetPrefixCache
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

RESET = "/reset_prefix_cache"


async def test_each_node_receives_a_reset(decode: FakeNode, other: FakeNode) -> None:
    async with pools.running(decode, other) as client:
        status, reply, _ = await client.post(f"{RESET}?reset_running_requests=true", b"")
        names = [node["id"] for node in (await client.get("/pool"))[1]["nodes"]]
        assert (status, reply) == (200, {"success": True, "nodes": names, "missed": []})
        await until(lambda: decode.got == other.got == [ResetPrefixCache()])
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


async def test_nodes_of_an_older_version_are_missed() -> None:
    older = FakeNode("decode-0", "decode", protocol=RESET_SINCE - 1)
    async with older, pools.running(older) as client:
        status, reply, _ = await client.post(RESET, b"")
        assert (status, reply) == (200, {"success": False, "nodes": [], "missed": ["decode-0"]})
        assert older.got == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("reset_external=true", "the KV store is not cleared"),
        ("reset_external=yes", "reset_external is 'yes'; use true or false"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    query: str, message: str, decode: FakeNode
) -> None:
    async with pools.running(decode) as client:
        status, reply, _ = await client.post(f"{RESET}?{query}", b"")
        assert (status, reply["error"]["param"]) == (400, "reset_external")
        assert message in reply["error"]["message"]
        assert decode.got == []


@pytest.mark.parametrize(
    ("key", "code"), [("sk-of-acme", "admin_key_required"), ("sk-unknown", "invalid_api_key")]
)
async def test_only_an_admin_may_reset(
    decode: FakeNode, tmp_path: Path, key: str, code: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\nops sk-of-ops admin\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        _, reply, _ = await client.post(RESET, b"", {"Authorization": f"Bearer {key}"})
        assert reply["error"]["code"] == code
        assert (await client.post(RESET, b"", {"Authorization": "Bearer sk-of-ops"}))[0] == 200
        await until(lambda: decode.got == [ResetPrefixCache()])
