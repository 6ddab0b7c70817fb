"""A Node with fake links and a fake engine: hello, refusals, drain, and who owns a request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_decode_node.admission import DecodeRole
from baton_engine.interface import PARTS, EngineInfo
from baton_node.ipc.engine_process import EngineProcess
from baton_node.ipc.messages import (
    Drain,
    Drained,
    EngineReady,
    Saved,
    Sleep,
    Slept,
    Step,
    ToEngine,
    Undrain,
    WakeUp,
)
from baton_node.server.draining import EndWaits
from baton_node.server.identity import Identity, model_made
from baton_node.server.metrics import NodeMetrics
from baton_node.server.node import MAX_UNREAD_BYTES, Node
from baton_node.server.sleeping import SleepRefusedError
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.link import (
    Abort,
    DrainNode,
    FirstTokens,
    Hello,
    JobFailed,
    Load,
    NoFirstTokens,
    PrefillJob,
    ResumeNode,
    RunJob,
    ToNode,
)
from baton_protocol.node_sleep import NodeSleepMode
from baton_protocol.store import NodeLoad, Speeds
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import TOKENIZER, FakeLink, tokens_of
from tests.support.stores.kvstore import FINGERPRINT, LAYOUT
from tests.support.waiting import until

INFO = EngineInfo(
    kind="sim",
    model="",
    fingerprint=FINGERPRINT,
    layout=LAYOUT,
    num_blocks=8,
    max_model_len=100,
    max_batched_tokens=100,
    max_num_seqs=1,
    vocab_size=259,
    eos_ids=(),
)


class FakeEngine(EngineProcess):
    """Records the frames that it receives, and does nothing."""

    def __init__(self) -> None:
        self.received: list[ToEngine] = []
        self.unread = 0

    def send(self, record: ToEngine) -> None:
        self.received.append(record)

    @property
    def unread_bytes(self) -> int:
        return self.unread


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def node(engine: FakeEngine) -> Node:
    return make_node(engine)


def make_node(engine: FakeEngine, waits: EndWaits | None = None, **settings: Any) -> Node:
    load = Load(Epoch("e"), "ready", Speeds(), NodeLoad(), store="down")
    ready = EngineReady(INFO, load)
    node_settings = NodeSettings(node="n", role="decode", **settings)
    identity = Identity(node_settings, Epoch("e"), ready, "http://127.0.0.1:1", {})
    metrics = NodeMetrics(NodeId("n"), lambda: Load(Epoch("e"), "ready", Speeds(), NodeLoad()))
    return Node(identity, engine, TOKENIZER, DecodeRole(), metrics, waits=waits)


def refusals(link: FakeLink) -> list[tuple[str, bool]]:
    failed = [frame for frame in link.frames if isinstance(frame, JobFailed)]
    return [(frame.error.code, frame.error.retryable) for frame in failed]


def test_the_hello_and_the_first_load_have_the_store_s_health(node: Node) -> None:
    link = FakeLink()
    node.add_link(link)
    hello, load = link.frames[0], link.frames[2]
    assert isinstance(hello, Hello)
    assert isinstance(load, Load)
    assert (hello.report.store, load.store) == ("down", "down")


def test_a_node_refuses_jobs_while_its_engine_has_too_many_unread_bytes(
    node: Node, engine: FakeEngine
) -> None:
    link = FakeLink()
    engine.unread = MAX_UNREAD_BYTES + 1
    node.handle_router_frame(link, RunJob(make_request("r", b"p")))
    assert (refusals(link), engine.received) == ([("saturated", True)], [])
    engine.unread = 0
    node.handle_router_frame(link, RunJob(make_request("r", b"p")))
    assert engine.received == [RunJob(make_request("r", b"p"))]


async def test_a_draining_node_refuses_new_requests_and_continues_its_own(
    node: Node, engine: FakeEngine
) -> None:
    request = make_request("r", b"p", max_tokens=3)
    first, second = FakeLink(), FakeLink()
    node.handle_router_frame(first, RunJob(request))
    node.handle_router_frame(first, DrainNode(60.0, "scale-down"))
    node.handle_engine_frame(Step(tuple(tokens_of(request, 0, b"abc"))))
    node.handle_router_frame(second, RunJob(make_request("late", b"p")))
    node.handle_router_frame(second, RunJob(request))
    assert refusals(second) == [("draining", True)]
    assert [delta.text for delta in second.deltas()] == ["a", "b", "c"]


async def test_a_draining_node_reports_its_state_the_reason_and_its_requests(node: Node) -> None:
    node.handle_router_frame(FakeLink(), RunJob(make_request("r", b"p")))
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "scale-down"))
    for report in (node.load, node.report()):
        assert (report.state, report.reason, report.load.requests) == ("draining", "scale-down", 1)
    assert not node.load.leaving


async def test_a_draining_node_reports_its_replacement_until_it_resumes(node: Node) -> None:
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "roll-out", "r2"))
    assert (node.load.replaced_by, node.report().replaced_by) == ("r2", "r2")
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "roll-out"))
    assert node.load.replaced_by == ""
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "roll-out", "r3"))
    node.handle_router_frame(FakeLink(), ResumeNode())
    assert (node.load.replaced_by, node.report().replaced_by) == ("", "")


async def test_a_draining_node_publishes_its_chunks_while_requests_still_run(
    node: Node, engine: FakeEngine
) -> None:
    node.handle_router_frame(FakeLink(), RunJob(make_request("r", b"p")))
    node.handle_router_frame(FakeLink(), DrainNode())
    assert node.requests == 1
    assert engine.received[-1] == Drain()


async def test_a_repeated_drain_frame_is_idempotent_and_a_different_one_applies(
    node: Node, engine: FakeEngine
) -> None:
    for _ in range(2):
        node.handle_router_frame(FakeLink(), DrainNode(60.0, "roll-out"))
    assert engine.received == [Drain()]
    node.handle_router_frame(FakeLink(), DrainNode(0.0, "spot"))
    await until(lambda: len(engine.received) == 3)
    node.handle_engine_frame(Saved())
    assert (node.load.reason, node.load.leaving) == ("spot", True)
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "later"))
    assert not node.load.leaving


async def test_after_its_deadline_a_node_is_leaving_once_its_chunks_are_saved(
    node: Node, engine: FakeEngine
) -> None:
    node.handle_router_frame(FakeLink(), RunJob(make_request("r", b"p")))
    node.handle_router_frame(FakeLink(), DrainNode(0.0))
    node.handle_engine_frame(Saved())  # answers the first Drain; more chunks may have filled
    await until(lambda: engine.received[1:] == [Drain(), Drain()])
    assert not node.load.leaving
    node.handle_engine_frame(Saved())
    assert (node.load.leaving, node.requests) == (True, 1)


async def test_a_drain_without_a_deadline_uses_the_node_s_own_limit(engine: FakeEngine) -> None:
    node = make_node(engine, drain_timeout_s=0.0)
    node.handle_router_frame(FakeLink(), DrainNode())
    await until(lambda: len(engine.received) == 2)
    node.handle_engine_frame(Saved())
    assert node.load.leaving


async def test_a_store_that_saves_nothing_does_not_delay_leaving_for_long(
    engine: FakeEngine,
) -> None:
    node = make_node(engine, EndWaits(save_s=0.01))
    node.handle_router_frame(FakeLink(), DrainNode(0.0))
    await until(lambda: node.load.leaving)


async def test_a_node_that_resumes_accepts_requests_and_publishes_as_before(
    node: Node, engine: FakeEngine
) -> None:
    link = FakeLink()
    node.handle_router_frame(link, DrainNode(0.0, "by mistake"))
    await until(lambda: len(engine.received) == 2)
    node.handle_router_frame(link, ResumeNode())
    node.handle_engine_frame(Saved())
    assert (node.state, node.load.reason, node.load.leaving) == ("ready", "", False)
    job = RunJob(make_request("r", b"p"))
    node.handle_router_frame(link, job)
    assert (refusals(link), engine.received[2:]) == ([], [Undrain(), job])
    node.handle_router_frame(link, DrainNode(60.0, "by mistake"))
    assert node.state == "draining"


async def test_a_drain_that_a_router_asks_for_outlasts_a_sleep(
    node: Node, engine: FakeEngine
) -> None:
    link, away = FakeLink(), PARTS
    for frames, state in ((DrainNode(60.0, "scale-down"), "draining"), (ResumeNode(), "ready")):
        sleeping = asyncio.create_task(node.sleeping.sleep(1))
        await until(lambda: engine.received[-1:] == [Sleep(1)])
        node.handle_engine_frame(Slept(away))
        await sleeping
        assert (node.load.state, node.load.asleep) == ("draining", True)
        node.handle_router_frame(link, frames)
        assert node.report().asleep
        waking = asyncio.create_task(node.sleeping.wake_up())
        await until(lambda: engine.received[-1:] == [WakeUp(away)])
        node.handle_engine_frame(Slept())
        await waking
        assert (node.load.state, node.load.asleep) == (state, False)


async def test_a_node_sleeps_because_its_pool_is_idle_only_if_it_was_not_in_use_itself(
    node: Node, engine: FakeEngine
) -> None:
    request = make_request("r", b"p")
    node.handle_router_frame(FakeLink(), RunJob(request))
    with pytest.raises(SleepRefusedError, match=r"in use 0\.0 s ago"):
        await node.sleeping.sleep(1, idle_s=0.1)
    node.handle_engine_frame(Step(tokens=tuple(tokens_of(request, 0, b"x"))))
    with pytest.raises(SleepRefusedError, match="in use"):
        await node.sleeping.sleep(1, idle_s=600.0)
    assert (node.requests, node.state, node.load.wakes) == (0, "ready", False)


async def test_a_node_that_sleeps_until_it_is_needed_says_so_unless_a_router_drains_it(
    node: Node, engine: FakeEngine
) -> None:
    sleeping = asyncio.create_task(node.sleeping.sleep(1, idle_s=0.0))
    await until(lambda: engine.received[-1:] == [Sleep(1)])
    assert (node.state, node.load.asleep, node.load.wakes) == ("draining", False, True)
    node.handle_engine_frame(Slept(PARTS))
    await sleeping
    assert node.report().asleep
    assert node.report().serves
    node.handle_router_frame(FakeLink(), DrainNode(60.0, "scale-down"))
    assert (node.load.wakes, node.report().serves) == (False, False)
    node.handle_router_frame(FakeLink(), ResumeNode())
    assert node.load.wakes
    await node.sleeping.sleep(2, idle_s=0.0)  # it sleeps already
    waking = asyncio.create_task(node.sleeping.wake_up())
    await until(lambda: engine.received[-1:] == [WakeUp(PARTS)])
    node.handle_engine_frame(Slept())
    await waking
    assert (node.state, node.load.wakes) == ("ready", False)
    with pytest.raises(SleepRefusedError, match="in use"):  # the wake-up counts as use
        await node.sleeping.sleep(1, idle_s=600.0)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_node_that_goes_to_sleep_lets_its_requests_end_or_hands_them_back(
    engine: FakeEngine, mode: NodeSleepMode
) -> None:
    node, link, request = (
        make_node(engine, drain_timeout_s=0.0),
        FakeLink(),
        make_request("r", b"p"),
    )
    node.handle_router_frame(link, RunJob(request))
    sleeping = asyncio.create_task(node.sleeping.sleep(1, mode))
    if mode == "wait":
        await asyncio.sleep(0.2)
        assert (node.state, node.load.leaving, Sleep(1) in engine.received) == (
            *("draining", False, False),
        )
        node.handle_engine_frame(Step(tokens=tuple(tokens_of(request, 0, b"x"))))
    await until(lambda: Sleep(1) in engine.received)
    node.handle_engine_frame(Slept(PARTS))
    await sleeping
    assert refusals(link) == ([] if mode == "wait" else [("drained", True)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [(Slept((), "the engine cannot sleep now"), "cannot sleep now"), (None, "within 0 s")],
)
async def test_an_engine_that_does_not_obey_leaves_its_node_as_it_was(
    engine: FakeEngine, answer: Slept | None, message: str
) -> None:
    node = make_node(engine, EndWaits(sleep_s=600.0 if answer is not None else 0.0))
    asleep = asyncio.create_task(node.sleeping.sleep(2))
    await until(lambda: Sleep(2) in engine.received)
    if answer is not None:
        node.handle_engine_frame(answer)
    with pytest.raises(SleepRefusedError, match=message):
        await asleep
    assert (node.load.state, node.load.asleep) == ("ready", False)


async def test_a_node_that_shuts_down_hands_back_remaining_requests_and_cannot_resume(
    engine: FakeEngine,
) -> None:
    # The test sends Saved and Drained itself; only the wait for routers ends by time.
    waits = EndWaits(save_s=600.0, move_s=0.05, publish_s=600.0)
    node, link = make_node(engine, waits, drain_timeout_s=0.0), FakeLink()
    request = make_request("r", b"p")
    node.handle_router_frame(link, RunJob(request))
    ending = asyncio.create_task(node.drain())
    await until(lambda: engine.received[1:] == [Drain(), Drain()])
    node.handle_router_frame(link, ResumeNode())
    node.handle_engine_frame(Saved())
    await until(lambda: node.requests == 0)
    assert refusals(link) == [("drained", True)]
    assert engine.received[3:] == [Abort(request.id, request.attempt)]
    assert not ending.done()
    node.handle_engine_frame(Drained())
    await ending


async def test_shutdown_keeps_the_deadline_of_an_earlier_drain_if_it_is_sooner(
    engine: FakeEngine,
) -> None:
    node = make_node(engine, drain_timeout_s=600.0)
    node.handle_router_frame(FakeLink(), RunJob(make_request("r", b"p")))
    node.handle_router_frame(FakeLink(), DrainNode(0.0, "scale-down"))
    await until(lambda: len(engine.received) == 3)
    node.handle_engine_frame(Saved())
    ending = asyncio.create_task(node.drain())
    await until(lambda: len(engine.received) > 3)
    assert (node.load.leaving, node.load.reason) == (True, "scale-down")
    node.handle_router_frame(FakeLink(), Abort(RequestId("r"), 1))  # a router has moved the request
    node.handle_engine_frame(Drained())
    await ending


def test_a_refusal_is_logged_with_request_and_attempt(
    node: Node, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.unread = MAX_UNREAD_BYTES + 1
    with caplog.at_level("INFO"):
        node.handle_router_frame(FakeLink(), RunJob(make_request("r", b"p")))
    (record,) = caplog.records
    assert (vars(record)["request"], vars(record)["attempt"]) == ("r", 1)


# --- which router owns a request ------------------------------------------------------------------

REQUEST = make_request("r", b"p", max_tokens=3)
FOREIGN: dict[str, ToNode] = {
    "an abort": Abort(REQUEST.id, 1),
    "an abort of any attempt": Abort(REQUEST.id, 1 << 40),
    "the first token": FirstTokens(REQUEST.id, 1, ((120,),)),
    "the end of the request": FirstTokens(REQUEST.id, 1, ((120,),), finished=(0,)),
    "no first token": NoFirstTokens(REQUEST.id, 1, "router b lost it"),
    "the same job": RunJob(REQUEST, await_first=True),
    "a newer attempt": RunJob(msgspec.structs.replace(REQUEST, attempt=2)),
    "a prefill job": PrefillJob(REQUEST, NodeId("d"), Epoch("e")),
}


@pytest.mark.parametrize("frame", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("away", [False, True], ids=["linked", "its router is away"])
async def test_a_router_cannot_change_the_request_of_another_router(
    node: Node, engine: FakeEngine, frame: ToNode, away: bool
) -> None:
    owner, other = FakeLink("a"), FakeLink("b")
    node.handle_router_frame(owner, RunJob(REQUEST, await_first=True))
    if away:
        node.remove_link(owner)
    node.handle_router_frame(other, frame)
    if away:
        owner = FakeLink("a")
        node.handle_router_frame(owner, RunJob(REQUEST, await_first=True))
    node.handle_router_frame(owner, FirstTokens(REQUEST.id, 1, ((97,),)))
    node.handle_engine_frame(Step(tuple(tokens_of(REQUEST, 0, b"abc"))[1:]))
    assert [delta.text for delta in owner.deltas()] == ["b", "c"]
    assert engine.received == [
        RunJob(REQUEST, await_first=True),
        FirstTokens(REQUEST.id, 1, ((97,),)),
    ]
    assert other.deltas() == []
    is_job = isinstance(frame, RunJob | PrefillJob)
    assert refusals(other) == ([("request_taken", False)] if is_job else [])


def test_an_early_abort_does_not_cancel_the_job_of_another_router(
    node: Node, engine: FakeEngine
) -> None:
    node.handle_router_frame(FakeLink("b"), Abort(REQUEST.id, 1 << 40))
    node.handle_router_frame(FakeLink("a"), RunJob(REQUEST))
    assert engine.received == [RunJob(REQUEST)]


def test_a_router_can_abort_its_request_through_a_new_link(node: Node, engine: FakeEngine) -> None:
    node.handle_router_frame(FakeLink("a"), RunJob(REQUEST))
    node.handle_router_frame(FakeLink("a"), Abort(REQUEST.id, 1))
    assert engine.received == [RunJob(REQUEST), Abort(REQUEST.id, 1)]


def test_a_model_s_creation_time_is_that_of_its_config_file(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    os.utime(config, (1_700_000_000, 1_700_000_000))
    assert model_made(NodeSettings(node="n", role="decode", model=str(tmp_path))) == 1_700_000_000
    config.unlink()
    assert model_made(NodeSettings(node="n", role="decode", model=str(tmp_path))) == 0
    assert model_made(NodeSettings(node="n", role="decode", engine="sim")) == 0
