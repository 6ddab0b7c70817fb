"""Real node processes over real WebSockets, as routers and operators see them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from baton_engine.config.engine_config import SimConfig
from baton_engine.vectors import numbers_of
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.registry import Registry
from baton_node.settings import NodeSettings
from baton_protocol import PROTOCOL_VERSION
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    Abort,
    CacheEvents,
    DrainNode,
    FirstTokens,
    JobFailed,
    Load,
    PrefillDone,
    PrefillJob,
    ResumeNode,
    Resync,
    RunJob,
)
from baton_protocol.store import NodeReport, Role
from baton_text.tokenizer import Tokenizer
from tests.support.engines.pooling import pooling_request
from tests.support.nodes.processes import (
    LinkClient,
    NodeProcess,
    SharedNodes,
    free_port,
    is_alive,
    linked,
    make_request,
    running,
    until_gone,
)
from tests.support.stores.kvstore import frozen

# Tests share nodes, which know requests by their ids: no two tests use the same id.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

PROMPT = bytes((i * 11) % 95 + 32 for i in range(300))
SLOW = SimConfig(decode_ms=20.0)
MAX_MODEL_LEN = 7000  # tokens; of the slow node


def settings(store: EmbeddedStore | None, role: Role = "decode", **fields: Any) -> NodeSettings:
    urls = {} if store is None else {"index_url": store.index_url, "data_urls": store.data_urls}
    defaults: dict[str, Any] = {
        "node": f"{role}-0",
        "role": role,
        "port": free_port(),
        "engine": "sim",
        "chunk_blocks": 1,
        "fetch": "always",
        "write_behind_bandwidth": 0,
    }
    return NodeSettings(**(defaults | urls | fields))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_nodes() -> AsyncIterator[SharedNodes]:
    nodes = SharedNodes()
    yield nodes
    await nodes.close()


@pytest_asyncio.fixture(loop_scope="module")
async def slow(shared_nodes: SharedNodes) -> NodeProcess:
    """A node without a store, with slow steps and long timeouts."""
    return await shared_nodes.node(
        "slow",
        lambda: settings(
            None, sim=SLOW, drain_timeout_s=600.0, link_grace_s=600.0, max_model_len=MAX_MODEL_LEN
        ),
    )


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(shared_nodes: SharedNodes) -> NodeProcess:
    """A node without a store, with slow steps and short timeouts."""
    return await shared_nodes.node(
        "impatient", lambda: settings(None, sim=SLOW, drain_timeout_s=0.2, link_grace_s=0.2)
    )


@pytest_asyncio.fixture(loop_scope="module")
async def prefill(shared_nodes: SharedNodes, store: EmbeddedStore) -> NodeProcess:
    return await shared_nodes.node(f"prefill {store.index_url}", lambda: settings(store, "prefill"))


@pytest_asyncio.fixture(loop_scope="module")
async def decode(shared_nodes: SharedNodes, store: EmbeddedStore) -> NodeProcess:
    return await shared_nodes.node(f"decode {store.index_url}", lambda: settings(store))


async def get(node: NodeProcess, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(f"{node.url}{path}") as response:
        return response.status, await response.read()


def text_of(client: LinkClient, name: str, choice: int = 0) -> str:
    return "".join(delta.text for delta in client.of(name) if delta.choice == choice)


async def test_a_node_of_a_pooling_model_says_so_and_answers_with_one_vector(
    shared_nodes: SharedNodes,
) -> None:
    node = await shared_nodes.node("pooling", lambda: settings(None, runner="pooling"))
    request = pooling_request("pooled", PROMPT, dimensions=8)
    async with linked(node) as link:
        assert link.hello.report.pooling == "embed"
        await link.send(RunJob(request))
        [delta] = await link.finished("pooled")
        assert (delta.finish, delta.ids, delta.text) == ("stop", (), "")
        assert delta.stats is not None
        assert delta.stats.prompt_tokens == len(PROMPT)
        assert len(numbers_of(delta.vector)) == 8
    async with linked(node) as again:  # the router missed the answer, and sends its job again
        await again.send(RunJob(request))
        assert [each.vector for each in await again.finished("pooled")] == [delta.vector]


async def test_a_hand_off_between_nodes_has_the_tokens_of_a_single_node(
    prefill: NodeProcess, decode: NodeProcess
) -> None:
    async with linked(prefill) as prefill_link, linked(decode) as decode_link:
        published, fetched = (await prefill_link.load()).load, (await decode_link.load()).load
        request = make_request("r", PROMPT, max_tokens=12, n=2, temperature=1.0, seed=4)
        await decode_link.send(RunJob(request, await_first=True))
        report = decode_link.hello.report
        await prefill_link.send(PrefillJob(request, report.node, report.epoch))
        done = await prefill_link.prefilled("r")
        assert isinstance(done, PrefillDone)
        assert [choice.choice for choice in done.choices] == [0, 1]
        await decode_link.send(
            FirstTokens(request.id, 1, tuple(choice.ids for choice in done.choices))
        )
        deltas = await decode_link.finished("r", 2)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.fetched_tokens == 288
        assert deltas[0].offset == 1

        await prefill_link.send(
            RunJob(make_request("alone", PROMPT, max_tokens=12, n=2, temperature=1.0, seed=4))
        )
        await prefill_link.finished("alone", 2)
        for choice in range(2):
            split = done.choices[choice].text + text_of(decode_link, "r", choice)
            assert split == text_of(prefill_link, "alone", choice)

        def handed_off() -> bool:
            load = decode_link.last_load().load
            handoffs = load.handoffs_total - fetched.handoffs_total
            return (handoffs, load.reused_chunks_total - fetched.reused_chunks_total) == (1, 18)

        chunks = published.published_chunks_total + 18
        await decode_link.until(handed_off)
        await prefill_link.until(
            lambda: prefill_link.last_load().load.published_chunks_total == chunks
        )
        await prefill_link.until(lambda: prefill_link.last_load().speeds.put_bytes_per_s > 0)
        await decode_link.until(lambda: decode_link.last_load().speeds.get_bytes_per_s > 0)
        _, page = await get(prefill, "/metrics")
        families = {f.name: f for f in text_string_to_metric_families(page.decode())}
        metric = families["baton_kv_published_bytes"].samples[0]
        assert metric.labels == {"node": "prefill-0"}
        assert metric.value == chunks * report.layout.chunk_bytes
        await decode_link.until(lambda: len(decode_link.cached()) >= 18)
        assert await prefill.stop() == 0


async def test_the_hello_has_the_node_s_identity_and_artifact_digests(
    store: EmbeddedStore, decode: NodeProcess
) -> None:
    async with linked(decode) as link:
        report = link.hello.report
        assert (report.node, report.role, report.address) == ("decode-0", "decode", decode.url)
        assert (report.pid, report.state, report.model) == (decode.process.pid, "ready", "sim")
        assert report.store == "up"
        assert report.speeds.prefill_tokens_per_s > 0
        files = {}
        for name, digest in report.artifacts.items():
            status, files[name] = await get(decode, f"/artifacts/{digest}")
            assert status == 200
            assert hashlib.sha256(files[name]).hexdigest() == digest
        assert Tokenizer.from_artifacts(files).vocab_size == report.vocab_size
        assert (await get(decode, "/artifacts/feed"))[0] == 404
        await link.until(lambda: len(link.frames) >= 3)
        first, second = link.frames[1:3]
        assert isinstance(first, CacheEvents)
        assert first.reset
        assert isinstance(second, Load)
        assert [node.epoch for node in await registered(store, 1)] == [report.epoch]


async def check_node_computes_alone(node: NodeProcess) -> None:
    async with linked(node) as link:
        await link.send(RunJob(make_request("alone-1", b"!!" + PROMPT, max_tokens=4)))
        deltas = await link.finished("alone-1")
        assert sum(len(delta.ids) for delta in deltas) == 4
        report = link.hello.report
        await link.send(PrefillJob(make_request("p", b"!" + PROMPT), report.node, report.epoch))
        assert not isinstance(await link.prefilled("p"), JobFailed)


async def registered(store: EmbeddedStore, count: int) -> list[NodeReport]:
    """Wait until the registry lists `count` nodes, and return their reports."""
    async with Registry(store.index_url, "default") as registry, asyncio.timeout(120):
        while len(reports := await registry.nodes()) != count:
            await asyncio.sleep(0.02)
        return reports


async def test_a_node_whose_data_servers_freeze_computes_without_them(
    store: EmbeddedStore, decode: NodeProcess
) -> None:
    with frozen(store.pid("data0"), store.pid("data1")):
        await check_node_computes_alone(decode)


async def test_a_node_that_has_ended_is_removed_from_the_registry(
    store: EmbeddedStore, decode: NodeProcess
) -> None:
    await registered(store, 1)
    assert await decode.stop() == 0
    await registered(store, 0)


async def test_a_second_link_gets_the_chunks_in_the_cache(slow: NodeProcess) -> None:
    async with linked(slow) as first:
        await first.load()
        before = first.cached()
        await first.send(RunJob(make_request("first", b"first" + PROMPT)))
        await first.finished("first")
        await first.until(lambda: len(first.cached() - before) == 19)
    async with linked(slow) as second:
        await second.load()
        assert second.cached() == first.cached()
        assert second.hello.report.store == "none"


async def test_cache_events_are_numbered_from_the_listing_on_and_listed_again_on_request(
    slow: NodeProcess,
) -> None:
    async with linked(slow) as link:

        def events() -> list[CacheEvents]:
            return [frame for frame in link.frames if isinstance(frame, CacheEvents)]

        await link.load()
        start, before = events()[0].seq, link.cached()
        await link.send(RunJob(make_request("counted", b"counted" + PROMPT)))
        await link.finished("counted")
        await link.until(lambda: len(link.cached() - before) == 19)
        count, cached = len(events()), link.cached()
        assert [frame.seq for frame in events()] == list(range(start, start + count))
        assert [frame.reset for frame in events()] == [True] + [False] * (count - 1)
        await link.send(Resync())
        await link.until(lambda: len(events()) == count + 1)
        assert (events()[-1].reset, events()[-1].seq) == (True, start + count - 1)
        assert link.cached() == cached


async def test_a_stop_string_ends_the_request_and_frees_its_blocks(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        await link.send(RunJob(make_request("free", PROMPT, max_tokens=16)))
        await link.finished("free")
        text = text_of(link, "free")
        stop = text[10:13]
        await link.send(RunJob(make_request("stops", PROMPT, max_tokens=4000, stop=(stop,))))
        deltas = await link.finished("stops")
        assert text_of(link, "stops") == text[: text.index(stop)]
        assert (deltas[-1].finish, deltas[-1].stop) == ("stop", stop)
        assert sum(len(delta.ids) for delta in deltas) == text.index(stop) + 3

        def idle() -> bool:
            load = link.last_load().load
            return load.running == 0 and load.free_blocks == load.total_blocks

        await link.until(idle)
        assert link.of("stops") == deltas


async def test_an_aborted_request_sends_no_last_delta(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        await link.send(RunJob(make_request("aborted", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("aborted")) > 2)
        await link.send(Abort(RequestId("aborted"), 1))
        await link.until(lambda: link.last_load().load.running == 0)
        assert all(delta.finish is None for delta in link.of("aborted"))


async def test_a_lost_link_aborts_its_requests_after_the_grace_period(
    impatient: NodeProcess,
) -> None:
    async with linked(impatient) as link:
        await link.send(RunJob(make_request("orphan", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("orphan")) > 2)
    async with linked(impatient) as later:
        await later.load()
        await later.until(lambda: later.last_load().load.running == 0)


async def test_a_router_that_reconnects_gets_every_token_once(slow: NodeProcess) -> None:
    request = make_request("twice", PROMPT, max_tokens=40)
    async with linked(slow) as link:
        await link.send(RunJob(request))
        await link.until(lambda: len(link.of("twice")) > 4)
    seen = link.of("twice")[:3]  # the later ones were lost with the link
    ids = tuple(id for delta in seen for id in delta.ids)
    async with linked(slow) as later:
        await later.send(RunJob(msgspec.structs.replace(request, outputs=(ids,))))
        deltas = [*seen, *await later.finished("twice")]
        assert [delta.offset for delta in deltas] == list(range(40))
        await later.send(RunJob(make_request("once", PROMPT, max_tokens=40)))
        once = await later.finished("once")
        assert [delta.ids for delta in deltas] == [delta.ids for delta in once]
        assert "".join(delta.text for delta in deltas) == text_of(later, "once")


async def test_a_request_past_its_deadline_fails_with_a_final_error(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        late = msgspec.structs.replace(make_request("overdue", PROMPT), time_left=0.0)
        await link.send(RunJob(late, await_first=True))
        error = (await link.failure("overdue")).error
        assert (error.code, error.retryable) == ("deadline_exceeded", False)


async def test_a_prompt_that_cannot_fit_fails_with_a_final_error(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        await link.send(RunJob(make_request("long", bytes(MAX_MODEL_LEN))))
        failed = await link.failure("long")
        assert failed.error.code == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in failed.error.message
        assert not failed.error.retryable


async def test_a_node_drains_and_resumes_as_a_router_asks(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        await link.send(RunJob(make_request("stays", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("stays")) > 2)
        await link.send(DrainNode(0.0, "scale-down", "r2"))
        await link.until(lambda: link.last_load().leaving)
        load = link.last_load()
        assert (load.state, load.reason, load.load.requests) == ("draining", "scale-down", 1)
        assert load.replaced_by == "r2"
        assert (await get(slow, "/ready"))[0] == 503
        before = len(link.of("stays"))
        await link.until(lambda: len(link.of("stays")) > before)  # it runs until a router moves it
        await link.send(Abort(RequestId("stays"), 1))
        await link.until(lambda: link.last_load().load.requests == 0)
        await link.send(RunJob(make_request("too late", PROMPT)))
        assert (await link.failure("too late")).error.code == "draining"
        await link.send(ResumeNode())
        await link.until(lambda: link.last_load().state == "ready")
        assert (await get(slow, "/ready"))[0] == 200
        await link.send(RunJob(make_request("next", PROMPT, max_tokens=3)))
        assert len(await link.finished("next")) == 3


async def post(node: NodeProcess, path: str) -> tuple[int, bytes]:
    url = f"{node.url}{path}"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return response.status, await response.read()


async def test_a_node_sleeps_and_wakes_up_as_an_operator_asks(decode: NodeProcess) -> None:
    awake = b'{"is_sleeping": false, "away": []}'
    async with linked(decode) as link:
        await link.send(RunJob(make_request("awake", PROMPT)))
        await link.finished("awake")
        for level in (2, 1):
            status, state = await post(decode, f"/sleep?level={level}")
            assert (status, state) == (
                200,
                b'{"is_sleeping": true, "away": ["weights", "kv_cache"]}',
            )
            await link.until(lambda: link.last_load().asleep and not link.cached())
            load = link.last_load()
            assert (load.state, load.reason) == ("draining", "the node sleeps")
            await link.send(ResumeNode())  # wakes nobody up
            status, state = await post(decode, "/wake_up?tags=weights")
            assert (status, state) == (200, b'{"is_sleeping": true, "away": ["kv_cache"]}')
            assert await get(decode, "/is_sleeping") == (status, state)
            assert await post(decode, "/wake_up") == (200, awake)
            await link.until(lambda: link.last_load().state == "ready")
            await link.send(RunJob(make_request(f"after {level}", PROMPT)))
            await link.finished(f"after {level}")
            assert text_of(link, f"after {level}") == text_of(link, "awake")
    for path, why in (
        ("/sleep?level=3", b"level '3'"),
        ("/sleep?mode=keep", b"mode 'keep'"),
        ("/sleep?idle_s=-1", b"idle_s: Expected"),
        ("/wake_up?tags=kv", b"tags: Invalid"),
    ):
        status, text = await post(decode, path)
        assert (status, text[: len(why)]) == (400, why)
    assert (await post(decode, "/update_weights"))[0] == 400


async def test_a_node_that_sleeps_until_it_is_needed_counts_as_ready(decode: NodeProcess) -> None:
    async with linked(decode) as link:
        status, text = await post(decode, "/sleep?idle_s=600")
        assert (status, b"the node was in use" in text) == (409, True)
        assert (await post(decode, "/sleep?idle_s=0"))[0] == 200
        await link.until(lambda: link.last_load().asleep)
        assert (link.last_load().state, link.last_load().wakes) == ("draining", True)
        assert (await get(decode, "/ready"))[0] == 200
        assert (await post(decode, "/sleep"))[0] == 200  # from now on only a person wakes it
        await link.until(lambda: not link.last_load().wakes)
        assert (await get(decode, "/ready"))[0] == 503
        assert (await post(decode, "/wake_up"))[0] == 200


async def test_a_node_whose_requests_nobody_takes_does_not_go_to_sleep(
    impatient: NodeProcess,
) -> None:
    async with linked(impatient) as link:
        await link.send(RunJob(make_request("stays awake", PROMPT[:20], max_tokens=300)))
        await link.until(lambda: bool(link.of("stays awake")))
        status, text = await post(impatient, "/sleep")
        assert (status, b"requests are still here" in text) == (409, True)
        await link.until(lambda: link.last_load().state == "ready")
        await link.send(Abort(RequestId("stays awake"), 1))


async def test_an_unknown_frame_closes_only_the_link_of_its_sender(
    slow: NodeProcess,
) -> None:
    """So a router checks the node's protocol version before it sends a newer frame."""
    async with linked(slow) as link:
        assert link.hello.report.protocol == PROTOCOL_VERSION
        await link.send(RunJob(make_request("undisturbed", PROMPT, max_tokens=40)))
        await link.until(lambda: len(link.of("undisturbed")) > 2)
        async with linked(slow) as other:
            newer = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, {"type": "dance"}])
            await other.send_bytes(newer)
            await other.until(lambda: other.closed)
        assert sum(len(delta.ids) for delta in await link.finished("undisturbed")) == 40


# --- shutdown -------------------------------------------------------------------------------------


async def test_a_terminated_node_finishes_its_requests_and_refuses_new_ones(
    slow: NodeProcess,
) -> None:
    async with linked(slow) as link:
        # The long request keeps the node alive until the test has checked everything.
        await link.send(RunJob(make_request("keeps", PROMPT, max_tokens=4000)))
        await link.send(RunJob(make_request("runs", PROMPT, max_tokens=100)))
        await link.until(lambda: len(link.of("runs")) > 2)
        slow.process.send_signal(signal.SIGTERM)
        await link.until(lambda: link.last_load().state == "draining")
        assert (await get(slow, "/ready"))[0] == 503
        assert (await get(slow, "/health"))[0] == 200
        await link.send(RunJob(make_request("late", PROMPT)))
        refusal = await link.failure("late")
        assert (refusal.error.code, refusal.error.retryable) == ("draining", True)
        deltas = await link.finished("runs")
        assert sum(len(delta.ids) for delta in deltas) == 100
        assert slow.process.returncode is None
        await link.send(Abort(RequestId("keeps"), 1))
        assert await slow.ended() == 0


async def test_a_second_signal_ends_a_node_at_once(slow: NodeProcess) -> None:
    async with linked(slow) as link:
        await link.send(RunJob(make_request("cut off", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("cut off")) > 2)
        engine = slow.engine_pid()
        slow.process.send_signal(signal.SIGINT)
        await link.until(lambda: link.last_load().state == "draining")
        slow.process.send_signal(signal.SIGINT)
        assert await slow.ended() == 0
        await until_gone(engine)


async def test_a_terminated_node_hands_back_requests_that_outlive_its_deadline(
    impatient: NodeProcess,
) -> None:
    async with linked(impatient) as link:
        await link.send(RunJob(make_request("outlives", PROMPT, max_tokens=4000)))
        await link.until(lambda: len(link.of("outlives")) > 2)
        impatient.process.send_signal(signal.SIGTERM)
        await link.until(lambda: link.last_load().leaving)
        error = (await link.failure("outlives")).error
        assert (error.code, error.retryable) == ("drained", True)
        assert await impatient.ended() == 0


async def test_a_node_with_a_frozen_engine_still_reads_its_links_and_shuts_down(
    impatient: NodeProcess,
) -> None:
    async with linked(impatient) as link, linked(impatient) as other:
        request = make_request("r", PROMPT, max_tokens=4000)
        await link.send(RunJob(request))
        await link.until(lambda: len(link.of("r")) > 2)
        engine = impatient.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        for number in range(40):  # far more than the sockets between the processes buffer
            await other.send(RunJob(make_request(f"more{number}", bytes([200]) * 60_000)))
        await other.send(RunJob(request))
        await other.until(lambda: len(other.of("r")) > 2)
        impatient.process.send_signal(signal.SIGTERM)
        assert await impatient.ended() == 0
        await until_gone(engine)


async def test_the_engine_dies_with_its_server(impatient: NodeProcess) -> None:
    engine = impatient.engine_pid()
    assert is_alive(engine)
    await impatient.kill()
    await until_gone(engine)


async def test_the_server_ends_when_its_engine_dies(impatient: NodeProcess) -> None:
    async with linked(impatient) as link:
        os.kill(impatient.engine_pid(), signal.SIGKILL)
        await link.until(lambda: link.closed)
        with pytest.raises(aiohttp.ClientConnectionError):  # new connections are refused, too
            await get(impatient, "/health")
        assert await impatient.ended() == 1
        assert "killed by signal 9" in await impatient.errors()


# --- failed starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["port", "model", "blocks"])
async def test_a_setting_that_prevents_the_start_is_an_error_of_one_line(
    tmp_path: Path, wrong: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node_settings, message = {
            "port": (settings(None, port=port), f"127.0.0.1:{port} is in use"),
            "model": (settings(None, model=str(tmp_path)), str(tmp_path)),
            "blocks": (settings(None, kv_blocks=0), "num_blocks is 0"),
        }[wrong]
        node = NodeProcess(node_settings)
        await node.start()
        assert await node.ended() == 1
    error = await node.errors()
    assert error.count("\n") == 1
    assert message in error


# --- without a store ------------------------------------------------------------------------------


async def test_a_node_that_starts_without_its_store_computes_without_it() -> None:
    node_settings = settings(None, index_url="unix:///nowhere/i", data_urls=("unix:///nowhere/d",))
    async with running(node_settings) as (node,):
        await check_node_computes_alone(node)
