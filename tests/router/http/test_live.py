"""GET /pool/events: who sees what, what a snapshot says of real requests, and how streams end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.decisions import Decisions
from baton_protocol.store import ScalingDecision
from baton_router.live.feed import MOST_VIEWERS
from baton_router.live.records import RunningCall, Snapshot
from tests.router import pools
from tests.support.clients.raw_http import raw_request
from tests.support.nodes.fake_node import FakeNode
from tests.support.stores.kvstore import frozen
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.integration

ACME, GLOBEX, ADMIN = "sk-key-of-acme", "sk-key-of-globex", "sk-key-of-an-admin"
SOON: dict[str, Any] = {"tunables": {"snapshot_every_s": 0.02}}
EVENTS = "/pool/events"
HOSTILE = '</script><img src=x onerror=alert(1)>\u2028"\\'


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router with two tenants and an admin."""
    path = tmp_path / "keys"
    path.write_text(f"acme {ACME}\nglobex {GLOBEX}\nops {ADMIN} admin\n")
    return {"api_keys": str(path)} | SOON


class Stream:
    """The snapshots that one viewer gets."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Snapshot:
        async with asyncio.timeout(WAIT_S):
            name, data, end = [await self.response.content.readline() for _ in range(3)]
        assert (name, end) == (b"event: snapshot\n", b"\n")
        return msgspec.json.decode(data.removeprefix(b"data: "), type=Snapshot)

    async def until(self, holds: Callable[[Snapshot], object]) -> Snapshot:
        async with asyncio.timeout(WAIT_S):
            while not holds(snapshot := await self.next()):
                pass
        return snapshot

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.response.content.read()


@asynccontextmanager
async def watching(client: pools.Client, key: str = "") -> AsyncIterator[Stream]:
    headers = pools.bearer(key) if key else {}
    async with client.session.get(client.url + EVENTS, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        yield Stream(response)


def only(snapshot: Snapshot) -> RunningCall | None:
    return snapshot.requests[0] if len(snapshot.requests) == 1 else None


async def test_a_running_request_is_shown_with_its_nodes_and_then_as_ended(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with (
        pools.handing_off(decode, prefill, **SOON) as (client, answer),
        watching(client) as stream,
    ):
        snapshot = await stream.until(only)
        call = only(snapshot)
        assert call is not None
        assert (call.endpoint, call.phase, call.attempts) == ("completions", "handoff", 1)
        assert (call.prefill, call.decode) == ("prefill-0", "decode-0")
        assert (call.prompt_tokens, call.completion_tokens) == (9, 0)
        assert (snapshot.totals.running, snapshot.totals.waiting) == (1, 0)
        (flow,) = snapshot.flows
        assert (flow.source, flow.target, flow.requests) == ("prefill-0", "decode-0", 1)
        assert [(node.id, node.role, node.state) for node in snapshot.nodes] == [
            ("decode-0", "decode", "ready"),
            ("prefill-0", "prefill", "ready"),
        ]
        prefill.script.prefill = "answer"
        await prefill.drop_links()  # its job comes again
        _, _, headers = await answer
        (ended,) = (await stream.until(lambda snapshot: snapshot.ended)).ended
        assert (ended.id, ended.status) == (headers["x-baton-request-id"], 200)
        assert (ended.prompt_tokens, ended.completion_tokens) == (9, len(pools.REPLY))
        assert ended.first_token_ms is not None
        assert ended.first_token_ms <= ended.total_ms
        after = await stream.next()
        assert (after.requests, after.ended, after.flows) == ([], [], [])


async def test_tenants_see_only_their_own_requests(decode: FakeNode, keys: dict[str, Any]) -> None:
    decode.script.run = "half"
    async with pools.running(decode, **keys) as client:
        body = {"prompt": "Say hello", "max_tokens": 50}
        asking = [
            asyncio.create_task(client.post(pools.COMPLETIONS, body, pools.bearer(key)))
            for key in (ACME, GLOBEX)
        ]
        try:
            async with (
                watching(client, ACME) as acme,
                watching(client, GLOBEX) as globex,
                watching(client, ADMIN) as admin,
            ):
                every = await admin.until(lambda snapshot: len(snapshot.requests) == 2)
                own = [await stream.until(only) for stream in (acme, globex)]
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
    assert [[call.tenant for call in snapshot.requests] for snapshot in own] == [
        ["acme"],
        ["globex"],
    ]
    assert {call.tenant for call in every.requests} == {"acme", "globex"}
    assert every.viewer.admin
    assert not own[0].viewer.admin
    assert decode.address not in str(own)
    assert [node.total_blocks for node in own[0].nodes] == [None]


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, "", 401),
        ({}, "sk-unknown", 401),
        ({}, ACME, 200),
        ({}, ADMIN, 200),
        ({"admin_key": "key-of-up"}, "key-of-up", 200),
        # Without a file of keys everybody may ask, but only an admin may look.
        ({"api_keys": "", "admin_key": "key-of-up"}, "", 401),
        ({"api_keys": "", "admin_key": "key-of-up"}, "key-of-up", 200),
    ],
)
async def test_who_may_look(
    decode: FakeNode, keys: dict[str, Any], settings: dict[str, Any], key: str, status: int
) -> None:
    async with pools.running(decode, **(keys | settings)) as client:
        headers = pools.bearer(key) if key else {}
        async with client.session.get(client.url + EVENTS, headers=headers) as response:
            assert response.status == status


async def test_a_stream_ends_when_its_key_is_revoked(
    decode: FakeNode, keys: dict[str, Any], tmp_path: Path
) -> None:
    async with (
        pools.running(decode, **keys) as client,
        watching(client, ACME) as revoked,
        watching(client, GLOBEX) as other,
    ):
        await revoked.next()
        (tmp_path / "keys").write_text(f"globex {GLOBEX}\n")
        await revoked.rest()
        await other.next()


async def test_names_and_reasons_of_nodes_are_data(decode: FakeNode) -> None:
    """A hostile node's words stay inside one JSON string of one event."""
    async with pools.running(decode, **SOON) as client:
        decode.report = msgspec.structs.replace(decode.report, reason=f"{HOSTILE}\n\ndata: {{}}")
        await decode.say_load("draining")
        async with watching(client) as stream:
            snapshot = await stream.until(lambda snapshot: snapshot.nodes[0].state == "draining")
    assert snapshot.nodes[0].reason == f"{HOSTILE}\n\ndata: {{}}"


async def test_streams_end_at_a_drain_and_new_ones_are_refused(decode: FakeNode) -> None:
    async with (
        pools.running(decode, drain_timeout_s=WAIT_S, **SOON) as client,
        watching(client) as stream,
    ):
        await stream.next()
        await client.router.drain(asyncio.Event())
        await stream.rest()
        assert client.router.api.generation.observers.live.viewers == 0


async def test_too_many_viewers_get_503_with_the_reason(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        feed = client.router.api.generation.observers.live
        tenant = client.router.api.tenants.viewer(None)
        viewers = [feed.join(tenant, pytest.fail) for _ in range(MOST_VIEWERS)]
        status, body, headers = await client.get(EVENTS)
        assert (status, body["error"]["code"]) == (503, "too_many_viewers")
        assert headers["retry-after"] == "1"
        for viewer in viewers:
            feed.leave(viewer)


async def test_a_client_that_leaves_is_forgotten(decode: FakeNode) -> None:
    async with pools.running(decode, **SOON) as client:
        feed = client.router.api.generation.observers.live
        async with watching(client) as stream:
            await stream.next()
            assert feed.viewers == 1
            stream.response.close()
        await until(lambda: feed.viewers == 0)


async def test_a_client_that_does_not_read_is_cut_off(
    decode: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a unix socket, whose buffers are small."""
    monkeypatch.chdir(tmp_path)
    settings = {"uds": "router.sock", "tunables": {"snapshot_every_s": 0.001}}
    async with pools.running(decode, **settings) as client:
        feed = client.router.api.generation.observers.live
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect("router.sock")
            slow.sendall(raw_request("GET", EVENTS, {"Host": "localhost"}))
            await until(lambda: feed.viewers == 1)
            await until(lambda: feed.viewers == 0)


async def test_decisions_of_the_planner_are_read_from_the_index(decode: FakeNode) -> None:
    """Snapshots do not wait for them."""
    record = ScalingDecision(at_ms=7, prefill=1, decode=2, reason="Demand", message=HOSTILE)
    with EmbeddedStore() as store:
        async with Decisions(store.index_url, "default") as decisions:
            await decisions.add([record])
        async with pools.running(decode, index_url=store.index_url, **SOON) as client:
            with frozen(store.pid("index")):
                async with watching(client) as stream:
                    for _ in range(3):
                        assert (await stream.next()).decisions == []
            async with watching(client) as stream:
                snapshot = await stream.until(lambda snapshot: snapshot.decisions)
    (decision,) = snapshot.decisions
    assert (decision.at_ms, decision.prefill, decision.decode) == (7, 1, 2)
    assert decision.reason == f"Demand: {HOSTILE}"
