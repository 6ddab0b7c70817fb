"""Links, table and engine put together, without processes: who is refused, what a hello says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_decode_node.admission import DecodeRole
from baton_node.ipc.engine_process import EngineProcess
from baton_node.ipc.messages import Drain, Drained, Ready, Saved, Step, ToEngine, Undrain
from baton_node.server.draining import EndWaits
from baton_node.server.identity import Identity, model_made
from baton_node.server.metrics import NodeMetrics
from baton_node.server.node import MAX_UNREAD_BYTES, Node
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
from baton_protocol.store import NodeLoad, Speeds
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import TOKENIZER, Pipe, tokens_of
from tests.support.stores.kvstore import FINGERPRINT, LAYOUT
from tests.support.waiting import until


class Engine(EngineProcess):
    """Hears everything and does nothing."""

    def __init__(self) -> None:
        self.heard: list[ToEngine] = []
        self.unread = 0

    def send(self, record: ToEngine) -> None:
        self.heard.append(record)

    @property
    def unread_bytes(self) -> int:
        return self.unread


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def service(engine: Engine) -> Node:
    return make_service(engine)


def make_service(engine: Engine, waits: EndWaits | None = None, **settings: Any) -> Node:
    ready = Ready("sim", FINGERPRINT, LAYOUT, 100, 259, (), Speeds(), NodeLoad(), store="down")
    told = NodeSettings(node="n", role="decode", **settings)
    identity = Identity(told, Epoch("e"), ready, "http://127.0.0.1:1", {})
    metrics = NodeMetrics(NodeId("n"), lambda: Load(Epoch("e"), "ready", Speeds(), NodeLoad()))
    return Node(identity, engine, TOKENIZER, DecodeRole(), metrics, waits=waits)


def refusals(link: Pipe) -> list[tuple[str, bool]]:
    failed = [frame for frame in link.frames if isinstance(frame, JobFailed)]
    return [(each.error.code, each.error.retryable) for each in failed]


def test_a_hello_and_the_first_load_say_how_the_store_is(service: Node) -> None:
    link = Pipe()
    service.joined(link)
    hello, load = link.frames[0], link.frames[2]
    assert isinstance(hello, Hello)
    assert isinstance(load, Load)
    assert (hello.report.store, load.store) == ("down", "down")


def test_jobs_that_the_engine_does_not_read_pile_up_to_a_bound(
    service: Node, engine: Engine
) -> None:
    link = Pipe()
    engine.unread = MAX_UNREAD_BYTES + 1
    service.heard(link, RunJob(make_request("r", b"p")))
    assert (refusals(link), engine.heard) == ([("saturated", True)], [])
    engine.unread = 0
    service.heard(link, RunJob(make_request("r", b"p")))
    assert engine.heard == [RunJob(make_request("r", b"p"))]


async def test_a_draining_node_refuses_what_is_new_and_knows_its_own(
    service: Node, engine: Engine
) -> None:
    request = make_request("r", b"p", max_tokens=3)
    first, second = Pipe(), Pipe()
    service.heard(first, RunJob(request))
    service.heard(first, DrainNode(60.0, "scale-down"))
    service.said(Step(tuple(tokens_of(request, 0, b"abc"))))
    service.heard(second, RunJob(make_request("late", b"p")))
    service.heard(second, RunJob(request))
    assert refusals(second) == [("draining", True)]
    assert [delta.text for delta in second.deltas()] == ["a", "b", "c"]


async def test_a_draining_node_says_so_why_and_what_is_left(service: Node) -> None:
    service.heard(Pipe(), RunJob(make_request("r", b"p")))
    service.heard(Pipe(), DrainNode(60.0, "scale-down"))
    for told in (service.load, service.report()):
        assert (told.state, told.reason, told.load.requests) == ("draining", "scale-down", 1)
    assert not service.load.leaving


async def test_a_draining_node_says_what_replaces_it_until_it_resumes(service: Node) -> None:
    service.heard(Pipe(), DrainNode(60.0, "roll-out", "r2"))
    assert (service.load.replaced_by, service.report().replaced_by) == ("r2", "r2")
    service.heard(Pipe(), DrainNode(60.0, "roll-out"))
    assert service.load.replaced_by == ""
    service.heard(Pipe(), DrainNode(60.0, "roll-out", "r3"))
    service.heard(Pipe(), ResumeNode())
    assert (service.load.replaced_by, service.report().replaced_by) == ("", "")


async def test_a_draining_node_has_its_chunks_published_while_requests_still_run(
    service: Node, engine: Engine
) -> None:
    service.heard(Pipe(), RunJob(make_request("r", b"p")))
    service.heard(Pipe(), DrainNode())
    assert service.requests == 1
    assert engine.heard[-1] == Drain()


async def test_the_same_words_again_change_nothing_and_others_count(
    service: Node, engine: Engine
) -> None:
    for _ in range(2):
        service.heard(Pipe(), DrainNode(60.0, "roll-out"))
    assert engine.heard == [Drain()]
    service.heard(Pipe(), DrainNode(0.0, "spot"))
    await until(lambda: len(engine.heard) == 3)
    service.said(Saved())
    assert (service.load.reason, service.load.leaving) == ("spot", True)
    service.heard(Pipe(), DrainNode(60.0, "later"))
    assert not service.load.leaving


async def test_past_its_deadline_a_node_is_leaving_once_its_chunks_are_saved(
    service: Node, engine: Engine
) -> None:
    service.heard(Pipe(), RunJob(make_request("r", b"p")))
    service.heard(Pipe(), DrainNode(0.0))
    service.said(Saved())  # of what it had at the start: more may have come since
    await until(lambda: engine.heard[1:] == [Drain(), Drain()])
    assert not service.load.leaving
    service.said(Saved())
    assert (service.load.leaving, service.requests) == (True, 1)


async def test_a_node_that_is_told_no_deadline_has_that_of_its_own_end(engine: Engine) -> None:
    service = make_service(engine, drain_s=0.0)
    service.heard(Pipe(), DrainNode())
    await until(lambda: len(engine.heard) == 2)
    service.said(Saved())
    assert service.load.leaving


async def test_a_store_that_saves_nothing_does_not_keep_a_node(engine: Engine) -> None:
    service = make_service(engine, EndWaits(save_s=0.01))
    service.heard(Pipe(), DrainNode(0.0))
    await until(lambda: service.load.leaving)


async def test_a_node_that_resumes_takes_requests_and_publishes_as_before(
    service: Node, engine: Engine
) -> None:
    link = Pipe()
    service.heard(link, DrainNode(0.0, "by mistake"))
    await until(lambda: len(engine.heard) == 2)
    service.heard(link, ResumeNode())
    service.said(Saved())
    assert (service.state, service.load.reason, service.load.leaving) == ("ready", "", False)
    job = RunJob(make_request("r", b"p"))
    service.heard(link, job)
    assert (refusals(link), engine.heard[2:]) == ([], [Undrain(), job])
    service.heard(link, DrainNode(60.0, "by mistake"))
    assert service.state == "draining"


async def test_a_node_that_ends_hands_back_what_nobody_took_and_is_not_called_back(
    engine: Engine,
) -> None:
    # The test says when the chunks are saved and published; only the move ends by time.
    waits = EndWaits(save_s=600.0, move_s=0.05, publish_s=600.0)
    service, link = make_service(engine, waits, drain_s=0.0), Pipe()
    request = make_request("r", b"p")
    service.heard(link, RunJob(request))
    ending = asyncio.create_task(service.drain())
    await until(lambda: engine.heard[1:] == [Drain(), Drain()])
    service.heard(link, ResumeNode())
    service.said(Saved())
    await until(lambda: service.requests == 0)
    assert refusals(link) == [("drained", True)]
    assert engine.heard[3:] == [Abort(request.id, request.attempt)]
    assert not ending.done()
    service.said(Drained())
    await ending


async def test_a_node_that_ends_has_no_longer_than_it_was_given_before(engine: Engine) -> None:
    service = make_service(engine, drain_s=600.0)
    service.heard(Pipe(), RunJob(make_request("r", b"p")))
    service.heard(Pipe(), DrainNode(0.0, "scale-down"))
    await until(lambda: len(engine.heard) == 3)
    service.said(Saved())
    ending = asyncio.create_task(service.drain())
    await until(lambda: len(engine.heard) > 3)
    assert (service.load.leaving, service.load.reason) == (True, "scale-down")
    service.heard(Pipe(), Abort(RequestId("r"), 1))  # a router has moved it
    service.said(Drained())
    await ending


def test_a_refusal_is_logged_with_request_and_attempt(
    service: Node, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.unread = MAX_UNREAD_BYTES + 1
    with caplog.at_level("INFO"):
        service.heard(Pipe(), RunJob(make_request("r", b"p")))
    (told,) = caplog.records
    assert (vars(told)["request"], vars(told)["attempt"]) == ("r", 1)


# --- whose requests they are ----------------------------------------------------------------------

REQUEST = make_request("r", b"p", max_tokens=3)
FOREIGN: dict[str, ToNode] = {
    "an abort": Abort(REQUEST.id, 1),
    "an abort of any attempt": Abort(REQUEST.id, 1 << 40),
    "the first token": FirstTokens(REQUEST.id, 1, ((120,),)),
    "the end of the request": FirstTokens(REQUEST.id, 1, ((120,),), finished=(0,)),
    "that there is none": NoFirstTokens(REQUEST.id, 1, "b says so"),
    "the same job": RunJob(REQUEST, await_first=True),
    "a newer attempt": RunJob(msgspec.structs.replace(REQUEST, attempt=2)),
    "a prefill job": PrefillJob(REQUEST, NodeId("d"), Epoch("e")),
}


@pytest.mark.parametrize("word", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("away", [False, True], ids=["linked", "its router is away"])
async def test_what_one_router_says_changes_nothing_of_another_s_request(
    service: Node, engine: Engine, word: ToNode, away: bool
) -> None:
    owner, other = Pipe("a"), Pipe("b")
    service.heard(owner, RunJob(REQUEST, await_first=True))
    if away:
        service.left(owner)
    service.heard(other, word)
    if away:
        owner = Pipe("a")
        service.heard(owner, RunJob(REQUEST, await_first=True))
    service.heard(owner, FirstTokens(REQUEST.id, 1, ((97,),)))
    service.said(Step(tuple(tokens_of(REQUEST, 0, b"abc"))[1:]))
    assert [delta.text for delta in owner.deltas()] == ["b", "c"]
    assert engine.heard == [RunJob(REQUEST, await_first=True), FirstTokens(REQUEST.id, 1, ((97,),))]
    assert other.deltas() == []
    jobs = isinstance(word, RunJob | PrefillJob)
    assert refusals(other) == ([("request_taken", False)] if jobs else [])


def test_an_abort_that_comes_before_another_router_s_job_does_not_keep_it_away(
    service: Node, engine: Engine
) -> None:
    service.heard(Pipe("b"), Abort(REQUEST.id, 1 << 40))
    service.heard(Pipe("a"), RunJob(REQUEST))
    assert engine.heard == [RunJob(REQUEST)]


def test_a_router_ends_its_request_through_a_new_link(service: Node, engine: Engine) -> None:
    service.heard(Pipe("a"), RunJob(REQUEST))
    service.heard(Pipe("a"), Abort(REQUEST.id, 1))
    assert engine.heard == [RunJob(REQUEST), Abort(REQUEST.id, 1)]


def test_a_model_was_made_when_its_configuration_was_written(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    os.utime(config, (1_700_000_000, 1_700_000_000))
    assert model_made(NodeSettings(node="n", role="decode", model=str(tmp_path))) == 1_700_000_000
    config.unlink()
    assert model_made(NodeSettings(node="n", role="decode", model=str(tmp_path))) == 0
    assert model_made(NodeSettings(node="n", role="decode", engine="sim")) == 0
