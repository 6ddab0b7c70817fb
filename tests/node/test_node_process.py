"""Real node processes over real WebSockets: what a router and an operator of a node see."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_kvstore.embedded import EmbeddedStore
from baton_kvstore.registry import Registry
from baton_node.settings import NodeSettings, SimOptions
from baton_protocol import PROTOCOL_VERSION
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    Abort,
    CacheEvents,
    DrainNode,
    First,
    JobFailed,
    Load,
    PrefillDone,
    PrefillJob,
    ResumeNode,
    Resync,
    RunJob,
)
from baton_protocol.store import Role
from baton_text.tokenizer import Tokenizer
from tests.support.nodes.processes import (
    LinkClient,
    NodeProcess,
    free_port,
    gone,
    is_alive,
    linked,
    make_request,
    running,
)
from tests.support.stores.kvstore import plain_client

PROMPT = bytes((i * 11) % 95 + 32 for i in range(300))
SLOW = SimOptions(decode_ms=20.0)


def settings(store: EmbeddedStore | None, role: Role = "decode", **more: Any) -> NodeSettings:
    where = {} if store is None else {"index_url": store.index_url, "data_urls": store.data_urls}
    facts: dict[str, Any] = {
        "node": f"{role}-0",
        "role": role,
        "port": free_port(),
        "engine": "sim",
        "chunk_blocks": 1,
        "fetch": "always",
        "write_behind_bandwidth": 0,
    }
    return NodeSettings(**(facts | where | more))


async def get(node: NodeProcess, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(f"{node.url}{path}") as answer:
        return answer.status, await answer.read()


def text_of(client: LinkClient, name: str, choice: int = 0) -> str:
    return "".join(delta.text for delta in client.of(name) if delta.choice == choice)


async def test_a_pair_of_nodes_hands_a_request_over_with_the_tokens_of_one(
    store: EmbeddedStore,
) -> None:
    nodes = running(settings(store, "prefill"), settings(store, "decode"))
    async with nodes as (p, d), linked(p) as lp, linked(d) as ld:
        request = make_request("r", PROMPT, max_tokens=12, n=2, temperature=1.0, seed=4)
        await ld.send(RunJob(request, await_first=True))
        about = ld.hello.report
        await lp.send(PrefillJob(request, about.node, about.epoch))
        done = await lp.prefilled("r")
        assert isinstance(done, PrefillDone)
        assert [choice.choice for choice in done.choices] == [0, 1]
        await ld.send(First(request.id, 1, tuple(choice.ids for choice in done.choices)))
        deltas = await ld.finished("r", 2)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.fetched_tokens == 288
        assert deltas[0].offset == 1

        await lp.send(
            RunJob(make_request("alone", PROMPT, max_tokens=12, n=2, temperature=1.0, seed=4))
        )
        await lp.finished("alone", 2)
        for choice in range(2):
            split = done.choices[choice].text + text_of(ld, "r", choice)
            assert split == text_of(lp, "alone", choice)

        def handed_over() -> bool:
            load = ld.last_load().load
            return load.handoffs_total == 1 and load.reused_chunks_total == 18

        await ld.until(handed_over)
        await lp.until(lambda: lp.last_load().load.published_chunks_total == 18)
        _, page = await get(p, "/metrics")
        families = {f.name: f for f in text_string_to_metric_families(page.decode())}
        published = families["baton_kv_published_bytes"].samples[0]
        assert published.labels == {"node": "prefill-0"}
        assert published.value == 18 * about.layout.chunk_bytes
        await ld.until(lambda: len(ld.cached()) >= 18)
        assert await p.stop() == 0
        assert await d.stop() == 0


async def test_the_hello_says_who_the_node_is_and_names_its_artifacts(
    store: EmbeddedStore,
) -> None:
    async with running(settings(store)) as (node,), linked(node) as link:
        report = link.hello.report
        assert (report.node, report.role, report.address) == ("decode-0", "decode", node.url)
        assert (report.pid, report.state, report.model) == (node.process.pid, "ready", "sim")
        assert report.store == "up"
        assert report.speeds.prefill_tokens_per_s > 0
        assert report.speeds.put_bytes_per_s > 0
        files = {}
        for name, digest in report.artifacts.items():
            status, files[name] = await get(node, f"/artifacts/{digest}")
            assert status == 200
            assert hashlib.sha256(files[name]).hexdigest() == digest
        assert Tokenizer.from_artifacts(files).vocab_size == report.vocab_size
        assert (await get(node, "/artifacts/feed"))[0] == 404
        await link.until(lambda: len(link.frames) >= 3)
        first, second = link.frames[1:3]
        assert isinstance(first, CacheEvents)
        assert first.reset
        assert isinstance(second, Load)
        async with Registry(store.index_url, "default") as registry:
            async with asyncio.timeout(120):
                while not (found := await registry.nodes()):
                    await asyncio.sleep(0.02)
            assert found[0].epoch == report.epoch
            await node.stop()
            async with asyncio.timeout(120):
                while await registry.nodes():
                    await asyncio.sleep(0.02)


async def test_a_second_link_is_told_what_the_cache_holds() -> None:
    async with running(settings(None)) as (node,):
        async with linked(node) as first:
            await first.send(RunJob(make_request("r", PROMPT)))
            await first.finished("r")
            await first.until(lambda: len(first.cached()) == 19)
        async with linked(node) as second:
            await second.until(lambda: len(second.frames) >= 2)
            assert second.cached() == first.cached()
            assert second.hello.report.store == "none"


async def test_cache_events_are_counted_from_the_listing_on_and_listed_again_on_demand() -> None:
    async with running(settings(None)) as (node,), linked(node) as link:

        def told() -> list[CacheEvents]:
            return [frame for frame in link.frames if isinstance(frame, CacheEvents)]

        await link.send(RunJob(make_request("r", PROMPT)))
        await link.finished("r")
        await link.until(lambda: len(link.cached()) == 19)
        counted = len(told())
        assert [frame.seq for frame in told()] == list(range(counted))
        assert [frame.reset for frame in told()] == [True] + [False] * (counted - 1)
        await link.send(Resync())
        await link.until(lambda: len(told()) == counted + 1)
        assert (told()[-1].reset, told()[-1].seq) == (True, counted - 1)
        assert len(link.cached()) == 19


async def test_a_stop_string_ends_the_request_and_frees_its_blocks() -> None:
    async with running(settings(None)) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("free", PROMPT, max_tokens=40)))
        await link.finished("free")
        text = text_of(link, "free")
        stop = text[10:13]
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000, stop=(stop,))))
        deltas = await link.finished("r")
        assert text_of(link, "r") == text[: text.index(stop)]
        assert (deltas[-1].finish, deltas[-1].stop) == ("stop", stop)
        assert sum(len(delta.ids) for delta in deltas) == text.index(stop) + 3

        def idle() -> bool:
            load = link.last_load().load
            return load.running == 0 and load.free_blocks == load.total_blocks

        await link.until(idle)
        assert link.of("r") == deltas


async def test_aborting_a_request_ends_it_without_a_word() -> None:
    async with running(settings(None, sim=SLOW)) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("r")) > 2)
        await link.send(Abort(make_request("r", b"").id, 1))
        await link.until(lambda: link.last_load().load.running == 0)
        assert all(delta.finish is None for delta in link.of("r"))


async def test_a_lost_link_aborts_its_requests_after_the_grace_period() -> None:
    async with running(settings(None, sim=SLOW, link_grace_s=0.2)) as (node,):
        async with linked(node) as link:
            await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000)))
            await link.until(lambda: len(link.of("r")) > 2)
        async with linked(node) as later:
            await later.until(
                lambda: (
                    any(isinstance(f, Load) for f in later.frames)
                    and later.last_load().load.running == 0
                )
            )


async def test_a_router_that_comes_back_has_every_token_once() -> None:
    async with running(settings(None, sim=SLOW)) as (node,):
        request = make_request("r", PROMPT, max_tokens=40)
        async with linked(node) as link:
            await link.send(RunJob(request))
            await link.until(lambda: len(link.of("r")) > 4)
        seen = link.of("r")[:3]  # the others were lost on their way
        ids = tuple(id for delta in seen for id in delta.ids)
        async with linked(node) as later:
            await later.send(RunJob(msgspec.structs.replace(request, outputs=(ids,))))
            deltas = [*seen, *await later.finished("r")]
            assert [delta.offset for delta in deltas] == list(range(40))
            await later.send(RunJob(make_request("alone", PROMPT, max_tokens=40)))
            alone = await later.finished("alone")
            assert [delta.ids for delta in deltas] == [delta.ids for delta in alone]
            assert "".join(delta.text for delta in deltas) == text_of(later, "alone")


async def test_a_link_is_read_and_a_node_ends_though_its_engine_stands_still() -> None:
    made = settings(None, sim=SLOW, drain_s=0.2)
    async with running(made) as (node,), linked(node) as link, linked(node) as other:
        request = make_request("r", PROMPT, max_tokens=4000)
        await link.send(RunJob(request))
        await link.until(lambda: len(link.of("r")) > 2)
        engine = node.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        for number in range(40):  # far more than the sockets between the processes hold
            await other.send(RunJob(make_request(f"more{number}", bytes([200]) * 60_000)))
        await other.send(RunJob(request))
        await other.until(lambda: len(other.of("r")) > 2)
        node.process.send_signal(signal.SIGTERM)
        assert await node.ended() == 0
        await gone(engine)


async def test_a_request_past_its_deadline_is_a_final_error() -> None:
    async with running(settings(None)) as (node,), linked(node) as link:
        late = msgspec.structs.replace(make_request("r", PROMPT), time_left=0.0)
        await link.send(RunJob(late, await_first=True))
        error = (await link.failure("r")).error
        assert (error.code, error.retryable) == ("deadline_exceeded", False)


async def test_a_prompt_that_cannot_fit_is_a_final_error() -> None:
    async with running(settings(None, max_model_len=64)) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("r", PROMPT)))
        failed = await link.failure("r")
        assert failed.error.code == "context_length_exceeded"
        assert not failed.error.retryable


async def test_a_terminated_node_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running(settings(None, sim=SLOW)) as (node,), linked(node) as link:
        # Some seconds of work, in which the others are asked.
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=300)))
        await link.until(lambda: len(link.of("r")) > 2)
        node.process.send_signal(signal.SIGTERM)
        await link.until(lambda: link.last_load().state == "draining")
        assert (await get(node, "/ready"))[0] == 503
        assert (await get(node, "/health"))[0] == 200
        await link.send(RunJob(make_request("late", PROMPT)))
        refused = await link.failure("late")
        assert (refused.error.code, refused.error.retryable) == ("draining", True)
        deltas = await link.finished("r")
        assert sum(len(delta.ids) for delta in deltas) == 300
        assert await node.ended() == 0


async def test_a_node_that_ends_hands_back_what_outlives_its_deadline() -> None:
    made = settings(None, sim=SLOW, drain_s=0.2)
    async with running(made) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("r")) > 2)
        node.process.send_signal(signal.SIGTERM)
        await link.until(lambda: link.last_load().leaving)
        error = (await link.failure("r")).error
        assert (error.code, error.retryable) == ("drained", True)
        assert await node.ended() == 0


async def test_a_node_drains_and_resumes_by_a_router_s_word() -> None:
    async with running(settings(None, sim=SLOW)) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("r")) > 2)
        await link.send(DrainNode(0.0, "scale-down", "r2"))
        await link.until(lambda: link.last_load().leaving)
        told = link.last_load()
        assert (told.state, told.reason, told.load.requests) == ("draining", "scale-down", 1)
        assert told.replaced_by == "r2"
        assert (await get(node, "/ready"))[0] == 503
        before = len(link.of("r"))
        await link.until(lambda: len(link.of("r")) > before)  # it goes on until it is moved
        await link.send(Abort(RequestId("r"), 1))
        await link.until(lambda: link.last_load().load.requests == 0)
        await link.send(RunJob(make_request("late", PROMPT)))
        assert (await link.failure("late")).error.code == "draining"
        await link.send(ResumeNode())
        await link.until(lambda: link.last_load().state == "ready")
        assert (await get(node, "/ready"))[0] == 200
        await link.send(RunJob(make_request("next", PROMPT, max_tokens=3)))
        assert len(await link.finished("next")) == 3


async def test_a_frame_that_a_node_does_not_know_costs_its_sender_the_link_only() -> None:
    """So a router asks for the node's version before it sends what is new."""
    async with running(settings(None, sim=SLOW)) as (node,), linked(node) as link:
        assert link.hello.report.protocol == PROTOCOL_VERSION
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=40)))
        await link.until(lambda: len(link.of("r")) > 2)
        async with linked(node) as other:
            newer = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, {"type": "dance"}])
            await other._socket.send_bytes(newer)
            await other.until(lambda: other.closed)
        assert sum(len(delta.ids) for delta in await link.finished("r")) == 40


async def test_a_second_signal_ends_a_node_at_once() -> None:
    async with running(settings(None, sim=SLOW, drain_s=300.0)) as (node,), linked(node) as link:
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("r")) > 2)
        engine = node.engine_pid()
        node.process.send_signal(signal.SIGINT)
        await link.until(lambda: link.last_load().state == "draining")
        node.process.send_signal(signal.SIGINT)
        assert await node.ended() == 0
        await gone(engine)


async def test_the_engine_dies_with_its_server() -> None:
    async with running(settings(None)) as (node,):
        engine = node.engine_pid()
        assert is_alive(engine)
        await node.kill()
        await gone(engine)


async def test_the_server_ends_when_its_engine_dies() -> None:
    async with running(settings(None)) as (node,), linked(node) as link:
        os.kill(node.engine_pid(), signal.SIGKILL)
        await link.until(lambda: link.closed)
        with pytest.raises(aiohttp.ClientConnectionError):  # who dials again is not let in
            await get(node, "/health")
        assert await node.ended() == 1
        assert "killed by signal 9" in await node.errors()


async def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        node = NodeProcess(settings(None, port=taken.getsockname()[1]))
        await node.start()
        assert await node.ended() == 1
        error = await node.errors()
        assert error.count("\n") == 1
        assert f"127.0.0.1:{node.settings.port} is in use" in error


async def test_a_model_folder_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    node = NodeProcess(settings(None, model=str(tmp_path)))
    await node.start()
    assert await node.ended() == 1
    error = await node.errors()
    assert error.count("\n") == 1
    assert str(tmp_path) in error


async def test_an_engine_that_cannot_be_built_is_one_clear_line() -> None:
    node = NodeProcess(settings(None, kv_blocks=0))
    await node.start()
    assert await node.ended() == 1
    assert "num_blocks is 0" in await node.errors()


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_node_whose_store_is_away_computes_by_itself(
    store: EmbeddedStore, when: str
) -> None:
    made = settings(store, sim=SimOptions(decode_ms=1.0))
    if when == "before":
        made = settings(
            None, index_url="unix:///nowhere/index.sock", data_urls=("unix:///nowhere/data.sock",)
        )
    async with running(made) as (node,), linked(node) as link:
        if when == "during":
            for url in store.data_urls:
                with plain_client(url) as client:
                    client.client_pause(3000)
        await link.send(RunJob(make_request("r", PROMPT, max_tokens=4)))
        deltas = await link.finished("r")
        assert sum(len(delta.ids) for delta in deltas) == 4
        me = link.hello.report
        await link.send(PrefillJob(make_request("p", b"!" + PROMPT), me.node, me.epoch))
        assert not isinstance(await link.prefilled("p"), JobFailed)
