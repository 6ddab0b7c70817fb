"""Nodes with wrong reports: the router discards the reports and serves every request."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_protocol import PROTOCOL_VERSION
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.link import (
    MAX_FRAME_BYTES,
    CacheEvents,
    Delta,
    Deltas,
    Hello,
    JobFailed,
    Load,
    RequestStats,
    RunJob,
    to_router_codec,
)
from baton_protocol.store import DataInstance, NodeLoad, Speeds
from baton_protocol.wire import WireError
from baton_router.http.pool_status import RouterStatus, pool_status
from baton_router.metrics.demand import DemandCounter
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.link_table import LinkTable
from baton_router.nodes.model_store import FetchError
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.costs import RequestFacts
from baton_router.placement.placement import Placement
from baton_router.placement.policy import PlacementPolicy, place
from tests.router import pools
from tests.support.nodes.fake_node import LAYOUT, SPEEDS, FakeNode, make_report
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

NAN, INF = math.nan, math.inf


def refused(reason: str) -> str:
    return f'baton_router_node_reports_refused_total{{reason="{reason}"}}'


async def until_refused(client: pools.Client, reason: str, count: int) -> None:
    await until_is(lambda: client.figure(refused(reason)), count)


# --- values out of range --------------------------------------------------------------------------

OUT_OF_RANGE: list[dict[str, Any]] = [
    *({"speeds": Speeds(prefill_tokens_per_s=bad)} for bad in (NAN, INF, -INF, -1.0, 1e300)),
    {"speeds": Speeds(decode_step_ms=NAN)},
    {"speeds": Speeds(get_bytes_per_s=-5.0)},
    {"speeds": Speeds(get_latency_ms=INF)},
    {"load": NodeLoad(queued_tokens=-1)},
    {"load": NodeLoad(running=2**63)},
    {"load": NodeLoad(engine_steps_total=-5)},
    {"instances": (DataInstance(get_latency_ms=NAN),)},
    {"instances": (DataInstance(used_bytes=-1),)},
    {"reason": "x" * 100_000},
]


@pytest.mark.parametrize("changes", OUT_OF_RANGE)
async def test_a_load_out_of_range_is_dropped_and_counted_and_the_last_one_is_kept(
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
) -> None:
    epoch = decode.report.epoch
    async with pools.running(decode, other) as client:
        await decode.say(Load(epoch, "ready", SPEEDS, NodeLoad(engine_steps_total=7)))
        load = msgspec.structs.replace(Load(epoch, "ready", SPEEDS, NodeLoad()), **changes)
        for _ in range(3):
            await decode.say(load)
        await until_refused(client, "unreadable", 3)
        for _ in range(3):
            assert pools.text_of(await pools.completing(client)) == pools.REPLY
        node, _ = (await client.get("/pool"))[1]["nodes"]
        assert (node["speeds"], node["load"]["engine_steps_total"]) == (
            msgspec.structs.asdict(SPEEDS),
            7,
        )
        assert (node["load"]["queued_tokens"], node["state"]) == (0, "ready")
        warnings = [
            record for record in caplog.records if "that the router cannot use" in record.message
        ]
        assert [record.levelname for record in warnings] == ["WARNING"]
        assert "decode-0" in warnings[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"speeds": Speeds(prefill_tokens_per_s=NAN)},
        {"load": NodeLoad(waiting=-1)},
        {"layout": msgspec.structs.replace(LAYOUT, block_size=0)},
        {"layout": msgspec.structs.replace(LAYOUT, dtype="float7")},
        {"max_model_len": -1},
        {"vocab_size": 0},
        {"node": NodeId("decode-1\r\nx-evil: 1")},
        {"node": NodeId("")},
        {"artifacts": {"tokenizer.json": "../../secret"}},
        {"artifacts": {f"file-{number}": "0" * 64 for number in range(300)}},
    ],
)
async def test_a_node_with_an_invalid_hello_is_not_used_and_is_shown_with_the_reason(
    decode: FakeNode, other: FakeNode, changes: dict[str, Any]
) -> None:
    other.report = msgspec.structs.replace(other.report, **changes)
    async with pools.running(decode) as client:
        client.dial(other.address)
        await until_is(client.unreachable, [other.address])
        pool = (await client.get("/pool"))[1]
        assert [node["id"] for node in pool["nodes"]] == ["decode-0"]
        assert "is not a readable hello" in pool["unreachable"][0]["reason"]
        assert await client.figure(refused("unreadable")) >= 1
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


@pytest.mark.parametrize(
    "stats",
    [
        RequestStats(computed_tokens=-1),
        RequestStats(queue_ms=NAN),
        RequestStats(fetch_ms=INF, fetched_tokens=1),
        RequestStats(fetch_predicted_ms=-1.0),
        RequestStats(cached_tokens=2**64 - 1),
    ],
)
async def test_statistics_out_of_range_do_not_affect_the_request(
    decode: FakeNode, prefill: FakeNode, stats: RequestStats
) -> None:
    decode.script.stats = prefill.script.stats = stats
    async with pools.running(decode, prefill, handoff="always") as client:
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert await pools.streamed(client) == pools.REPLY
        assert "NaN" not in (page := await client.text("/metrics"))
        assert "-1.0" not in page
        assert await client.figure(refused("unreadable")) >= 2
        assert all(pools.is_ready(client, node) for node in (decode, prefill))


@pytest.mark.parametrize(
    "changes", [{"status": 7}, {"status": 99999}, {"retry_after": NAN}, {"retry_after": -INF}]
)
async def test_an_invalid_error_moves_the_request_to_another_node(
    decode: FakeNode, other: FakeNode, changes: dict[str, Any]
) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await pools.join(client, other)
        request = pools.only_job(decode).request
        error = ErrorRecord("no", "engine_error", **changes)
        await decode.say(JobFailed(request.id, request.attempt, error))
        assert pools.text_of(await answer) == pools.REPLY
        assert other.got_of(RunJob)


async def test_a_node_that_sends_unreadable_tokens_is_lost_at_once(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.half_answered(decode, link_patience_s=600.0) as (client, answer):
        await pools.join(client, other)
        request = pools.only_job(decode).request
        decode.script.run = "silent"
        await decode.say(Deltas((Delta(request.id, request.attempt, 0, 6, ids=(-1,)),)))
        assert pools.text_of(await answer) == pools.REPLY
        assert pools.only_job(other, attempt=2)


async def test_bytes_that_are_not_a_frame_end_the_link_without_failing_requests(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, other) as client:
        await decode.say_raw(b"\xc1 this is no frame")
        await until(lambda: decode.links == 2)
        await client.ready(2)
        assert await client.figure(refused("unreadable")) == 1
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


async def test_a_frame_of_an_unknown_type_is_ignored(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.say_raw(msgspec.msgpack.encode((PROTOCOL_VERSION + 1, {"type": "later"})))
        await until_refused(client, "unreadable", 1)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert decode.links == 1


@pytest.mark.parametrize("stored", [(b"",), (b"x" * 65,), (b"x" * 16, b"")])
async def test_chunks_with_invalid_hashes_are_not_listed(
    decode: FakeNode, stored: tuple[bytes, ...]
) -> None:
    async with pools.running(decode) as client:
        names = tuple(map(BlockHash, stored))
        await decode.say(CacheEvents(decode.report.epoch, stored=names, seq=1))
        await until_refused(client, "unreadable", 1)
        assert await client.chunks("decode-0") == 0
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


# --- sizes ----------------------------------------------------------------------------------------


async def test_a_frame_that_is_too_large_closes_the_link_and_moves_the_requests(
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pools.half_answered(decode, link_patience_s=600.0) as (client, answer):
        await pools.join(client, other)
        decode.script.run = "silent"
        await decode.say_raw(b"x" * MAX_FRAME_BYTES)
        assert pools.text_of(await answer) == pools.REPLY
        assert pools.only_job(other, attempt=2)
        await until_refused(client, "too_large", 1)
        assert str(MAX_FRAME_BYTES) in caplog.text
        assert "decode-0" in caplog.text


async def test_a_node_with_files_that_are_too_large_is_not_used_and_is_logged(
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = {name: b" " * (600 << 10) + name.encode() for name in ("a.jinja", "b.jinja")}
    other.serve_artifacts(files)
    async with pools.running(decode, tunables={"max_artifact_bytes": 1 << 20}) as client:
        client.dial(other.address)
        await until_refused(client, "artifact", 1)
        assert "exceed 1048576 bytes" in caplog.text
        assert "b.jinja" in caplog.text
        assert not pools.is_ready(client, other)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


async def test_artifact_downloads_follow_no_redirects_and_accept_no_compression(
    decode: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect would leak the link token, and a compressed file may expand to any size."""
    headers: list[dict[str, str]] = []

    async def redirect(request: web.Request) -> web.Response:
        headers.append(dict(request.headers))
        raise web.HTTPTemporaryRedirect(location=f"{decode.address}{request.path}")

    application = web.Application()
    application.add_routes([web.get("/artifacts/{digest}", redirect)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with pools.running(decode) as client:
        store = client.router._models
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        report = msgspec.structs.replace(
            decode.report, artifacts={"x": next(iter(decode.artifacts))}
        )
        with pytest.raises(FetchError, match="answered 307"):
            await store.fetch_model(report, address)
        assert headers[0]["Accept-Encoding"] == "identity"
    await runner.cleanup()


# --- arbitrary reports ----------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 5e-324, 1e-9, 1e15, 2**53]),
)


def figures(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), NUMBERS, max_size=6)


SPEED, COUNT = figures(Speeds.__struct_fields__), figures(NodeLoad.__struct_fields__)
SERVER = figures(("used_bytes", "limit_bytes", "evicted_keys", "get_latency_ms"))
SHAPE = figures(
    ("num_layers", "num_kv_heads", "head_dim", "block_size", "chunk_blocks", "kv_shards")
)


@st.composite
def frames(draw: st.DrawFn) -> dict[str, Any]:
    """A hello or a load with arbitrary numbers in some fields."""
    sent = {
        "speeds": msgspec.to_builtins(SPEEDS) | draw(SPEED),
        "load": draw(COUNT),
        "instances": draw(st.lists(SERVER, max_size=2)),
    }
    if draw(st.booleans()):
        return {"type": "load", "epoch": "epoch-1", "state": "ready", **sent}
    report = msgspec.to_builtins(make_report("d0", draw(st.sampled_from(["decode", "prefill"]))))
    report |= sent | draw(figures(("max_model_len", "vocab_size", "max_num_seqs", "pid")))
    report["layout"] |= draw(SHAPE)
    return {"type": "hello", "report": report}


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_every_request_is_placed_whatever_nodes_report(count: int) -> None:
    sent = st.lists(frames(), min_size=1, max_size=6)
    settings(max_examples=count, deadline=None)(given(sent)(check_served))()


def check_served(sent: list[dict[str, Any]]) -> None:
    view, codec = PoolView(lambda: 1.0, 100), to_router_codec()
    for name, role in (("d0", "decode"), ("d1", "decode"), ("p0", "prefill")):
        view.hello(make_report(name, role)).usable = True  # type: ignore[arg-type]
    for raw in sent:
        try:
            frame = codec.decode(msgspec.msgpack.encode((PROTOCOL_VERSION, raw)))
        except WireError:
            continue
        if isinstance(frame, Hello):
            view.hello(frame.report).usable = True
        elif isinstance(frame, Load):
            view.load(NodeId("d0"), frame)
    view.book(NodeId("d0"), RequestId("r"), 100, 1)
    for kind in {node.kind for node in view.nodes.values()}:
        for sample in view.ready(kind):
            layout = sample.report.layout
            facts = RequestFacts(
                prompt_tokens=100_000,
                chunk_tokens=layout.chunk_tokens,
                chunk_bytes=layout.chunk_bytes,
                stored=(True, False, True),
            )
            groups = view.groups([BlockHash(bytes([n]) * 16) for n in range(3)], kind)
            for handoff in ("auto", "always", "never"):
                policy = PlacementPolicy(handoff=handoff)
                placed = place(facts, groups["prefill"], groups["decode"], policy, random.Random(0))
                assert isinstance(placed, Placement)
                assert math.isfinite(placed.predicted_ms)
                assert placed.header_line()
    own = RouterStatus(
        pool="p",
        router="r",
        model=None,
        links=LinkTable(lambda address: pytest.fail(address)),
        has_store=False,
        store_reachable=None,
        running=0,
    )
    page = pool_status(view, own)
    assert b"null" not in msgspec.json.encode([node.speeds for node in page.nodes])

    async def scraped() -> bytes:
        return RouterMetrics(view, DemandCounter("r", lambda: 1.0)).page()

    assert b"nan" not in asyncio.run(scraped()).lower()
