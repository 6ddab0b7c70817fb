"""Links, models and the start of a router when the other end is wrong or down."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web

from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.link import Abort, RunJob
from baton_router.errors import StartError
from baton_router.nodes.link import MISSED_PINGS, NodeLink
from baton_router.nodes.model_store import KEPT_UNUSED, FetchError, ModelStore
from baton_router.server.router import Router
from baton_router.settings import RouterSettings, Tunables
from baton_text.artifacts import byte_artifacts
from tests.router import pools
from tests.support.nodes.fake_node import VOCAB, FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration
CHUNKS = [BlockHash(bytes([n]) * 16) for n in range(3)]


# --- links ----------------------------------------------------------------------------------------


async def test_after_a_reconnect_the_node_lists_its_chunks_again(decode: FakeNode) -> None:
    decode.chunks = tuple(CHUNKS)
    async with pools.running(decode) as client:
        await until_is(lambda: client.chunks("decode-0"), 3)
        decode.chunks = tuple(CHUNKS[:1])
        await decode.drop_links()
        await until(lambda: decode.links == 2)
        await until_is(lambda: client.chunks("decode-0"), 1)
        await client.ready(1)
        view = client.router.view
        kind = view.kind()
        assert kind is not None
        group = view.groups(CHUNKS, kind)["decode"]
        assert list(group.cached_chunks) == [1]


async def test_a_new_epoch_drops_the_old_epoch_s_chunks(decode: FakeNode) -> None:
    decode.chunks = tuple(CHUNKS)
    async with pools.running(decode) as client:
        view = client.router.view
        await until_is(lambda: client.chunks("decode-0"), 3)
        decode.chunks = ()
        await decode.restart("epoch-2")
        await until_is(lambda: client.epoch("decode-0"), "epoch-2")
        assert not view.chunks.prefixes(CHUNKS).any()


async def test_a_new_engine_with_the_same_name_replaces_the_old_one(decode: FakeNode) -> None:
    decode.script.run = "silent"
    successor = FakeNode("decode-0", "decode", epoch="epoch-2")
    async with successor, pools.running(decode) as client:
        body = {"prompt": "x", "max_tokens": 1}
        waiting = asyncio.create_task(client.post("/v1/completions", body))
        await until(lambda: decode.got_of(RunJob))
        client.dial(successor.address)
        assert (await waiting)[0] == 200
        (job,) = successor.got_of(RunJob)
        assert job.request.attempt == 2
        assert await client.epoch("decode-0") == "epoch-2"


async def test_aborts_for_a_dead_engine_are_not_sent_to_its_successor(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", {"prompt": "x"}))
        await until(lambda: decode.got_of(RunJob))
        decode.script.run = "answer"
        await decode.restart("epoch-2")
        assert (await waiting)[0] == 200
        assert decode.got_of(Abort) == []


async def test_a_node_that_sends_frames_keeps_its_link_without_answering_pings(
    decode: FakeNode,
) -> None:
    decode.pongs = False
    async with pools.running(decode, tunables={"ping_s": 0.05}):
        for _ in range(40):
            await decode.say_load()
            await asyncio.sleep(0.01)
        assert decode.links == 1
        await until(lambda: decode.links == 2)


async def test_pings_missed_because_the_router_was_blocked_do_not_count() -> None:
    class Socket:
        pings = 0

        async def ping(self) -> None:
            self.pings += 1

    async def silent_after(clock: Iterator[float], pings: int) -> bool:
        """Whether the link declares its node lost within this many pings."""
        link = NodeLink(
            "http://a:1",
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            pause_max_s=1.0,
            rng=None,  # type: ignore[arg-type]
            clock=clock.__next__,
            tunables=Tunables(ping_s=0.01),
        )
        socket = Socket()
        waiting = asyncio.create_task(link._until_silent(socket))  # type: ignore[arg-type]
        await until(lambda: waiting.done() or socket.pings > pings)
        waiting.cancel()
        return waiting.done()

    assert await silent_after(itertools.count(0.0, 0.004), MISSED_PINGS)
    assert not await silent_after(itertools.count(0.0, 5.0), 10 * MISSED_PINGS)


async def test_a_peer_that_sends_no_hello_is_not_a_node(decode: FakeNode) -> None:
    async def wrong(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        dialled.append(request.path)
        await socket.send_bytes(b"nonsense") if len(dialled) % 2 else await socket.send_str("hi")
        await socket.close()
        return socket

    dialled: list[str] = []
    app = web.Application()
    app.add_routes([web.get("/link", wrong)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with pools.running(decode) as client:
        client.dial(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await until(lambda: len(dialled) >= 3)
        assert await client.names() == ["decode-0"]
        await client.router._table.remove_link(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def test_one_node_at_two_addresses_is_listed_once(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        second_address = decode.address.replace("127.0.0.1", "localhost")
        client.dial(second_address)
        await until(lambda: decode.links >= 3)
        assert await client.names() == ["decode-0"]
        assert await client.state("decode-0") == "ready"
        status, _, _ = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 200


async def test_a_node_is_not_ready_before_its_tokenizer_is_fetched(decode: FakeNode) -> None:
    artifacts, decode.artifacts = decode.artifacts, {}
    settings = RouterSettings(port=0, nodes=(decode.address,))
    async with Router(settings) as router:
        await until(lambda: "decode-0" in router.view.nodes)
        assert list(router.view.ready()) == []
        assert "starting" in router.view.why_not_ready()
        decode.artifacts = artifacts
        await until(lambda: list(router.view.ready()))


async def test_an_artifact_that_does_not_match_its_digest_is_refused(decode: FakeNode) -> None:
    decode.artifacts = dict.fromkeys(decode.artifacts, b"{}")
    async with aiohttp.ClientSession() as session:
        store = ModelStore(session)
        with pytest.raises(FetchError, match="does not match its digest"):
            await store.fetch_model(decode.report, decode.address)
        assert store.find_built(decode.report) is None
        await store.cancel_builds()


async def test_artifacts_are_fetched_once_for_nodes_that_share_them(decode: FakeNode) -> None:
    async with aiohttp.ClientSession() as session:
        store = ModelStore(session)
        first, second = await asyncio.gather(
            store.fetch_model(decode.report, decode.address),
            store.fetch_model(decode.report, decode.address),
        )
        decode.artifacts = {}
        assert first is second is await store.fetch_model(decode.report, decode.address)
        await store.cancel_builds()


async def test_the_model_of_a_live_node_is_kept_however_many_models_are_fetched_later(
    decode: FakeNode,
) -> None:
    async with pools.running(decode) as client, AsyncExitStack() as stack:
        for number in range(KEPT_UNUSED + 2):
            canary = FakeNode(f"canary-{number}", "decode", fingerprint=Fingerprint("c" * 32))
            canary.serve_artifacts(byte_artifacts(VOCAB + 1 + number))
            await stack.enter_async_context(canary)
            await pools.join(client, canary)
        assert (await client.get("/ready"))[0] == 200
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        await stack.aclose()
        assert (await client.get("/ready"))[0] == 200


async def test_only_the_most_recently_used_unused_models_are_kept() -> None:
    async with (
        FakeNode("node-0", "decode") as node,
        aiohttp.ClientSession() as session,
    ):
        store, reports = ModelStore(session), []
        for number in range(KEPT_UNUSED + 3):
            node.serve_artifacts(byte_artifacts(VOCAB + number))
            reports.append(node.report)
            await store.fetch_model(node.report, node.address)
        await store.fetch_model(reports[0], node.address)
        for report in (reports[1], reports[2]):
            model = store.find_built(report)
            assert model is not None
            await model.grammar("regex", "a+")
        assert store.grammar_counts.compiled == 2
        store.forget_unused([reports[1]])
        assert store.grammar_counts.compiled == 2, "grammars of a forgotten model stay counted"
        kept = [
            number for number, report in enumerate(reports) if store.find_built(report) is not None
        ]
        assert kept == [0, 1, *range(4, KEPT_UNUSED + 3)]
        await store.cancel_builds()


async def test_a_port_in_use_is_a_start_error_that_names_it(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        settings = RouterSettings(port=client.router.port, nodes=(decode.address,))
        with pytest.raises(StartError, match=f"127.0.0.1:{client.router.port}"):
            async with Router(settings):
                pass


async def test_a_wrong_index_url_is_a_start_error() -> None:
    with pytest.raises(StartError):
        async with Router(RouterSettings(port=0, index_url="http://nonsense")):
            pass


def test_the_router_imports_no_torch_engine_or_kubernetes() -> None:
    code = (
        "import sys, baton_router, baton_router.server.router; "
        "bad = {'torch', 'transformers', 'baton_engine', 'baton_node', 'kopf', 'kubernetes'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
