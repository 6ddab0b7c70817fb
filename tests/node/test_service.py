"""Links, table and engine put together, without processes: who is refused, what a hello says."""

from __future__ import annotations

import pytest

from baton_decode_node import DecodeRole
from baton_node.engine_process import EngineProcess
from baton_node.frames import Ready, Step, ToEngine
from baton_node.identity import Identity
from baton_node.metrics import NodeMetrics
from baton_node.service import MAX_UNREAD_BYTES, Service
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Hello, JobFailed, Load, RunJob
from baton_protocol.store import NodeLoad, Speeds
from tests.support.kvstore import FINGERPRINT, LAYOUT
from tests.support.nodes import make_request
from tests.support.tables import TOKENIZER, Pipe, tokens_of


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
def service(engine: Engine) -> Service:
    ready = Ready("sim", FINGERPRINT, LAYOUT, 100, 259, (), Speeds(), NodeLoad(), store="down")
    settings = NodeSettings(node="n", role="decode")
    identity = Identity(settings, Epoch("e"), ready, "http://127.0.0.1:1", {})
    metrics = NodeMetrics(NodeId("n"), lambda: (NodeLoad(), Speeds()))
    return Service(identity, engine, TOKENIZER, DecodeRole(), metrics)


def refusals(link: Pipe) -> list[tuple[str, bool]]:
    failed = [frame for frame in link.frames if isinstance(frame, JobFailed)]
    return [(each.error.code, each.error.retryable) for each in failed]


def test_a_hello_and_the_first_load_say_how_the_store_is(service: Service) -> None:
    link = Pipe()
    service.joined(link)
    hello, load = link.frames[0], link.frames[2]
    assert isinstance(hello, Hello)
    assert isinstance(load, Load)
    assert (hello.report.store, load.store) == ("down", "down")


def test_jobs_that_the_engine_does_not_read_pile_up_to_a_bound(
    service: Service, engine: Engine
) -> None:
    link = Pipe()
    engine.unread = MAX_UNREAD_BYTES + 1
    service.heard(link, RunJob(make_request("r", b"p")))
    assert (refusals(link), engine.heard) == ([("saturated", True)], [])
    engine.unread = 0
    service.heard(link, RunJob(make_request("r", b"p")))
    assert engine.heard == [RunJob(make_request("r", b"p"))]


async def test_a_draining_node_refuses_what_is_new_and_knows_its_own(
    service: Service, engine: Engine
) -> None:
    request = make_request("r", b"p", max_tokens=3)
    first, second = Pipe(), Pipe()
    service.heard(first, RunJob(request))
    assert not await service.drain(deadline_s=0.0)
    service._said(Step(tuple(tokens_of(request, 0, b"abc"))))
    service.heard(second, RunJob(make_request("late", b"p")))
    service.heard(second, RunJob(request))
    assert refusals(second) == [("draining", True)]
    assert [delta.text for delta in second.deltas()] == ["a", "b", "c"]


def test_a_refusal_is_logged_with_request_and_attempt(
    service: Service, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.unread = MAX_UNREAD_BYTES + 1
    with caplog.at_level("INFO"):
        service.heard(Pipe(), RunJob(make_request("r", b"p")))
    (told,) = caplog.records
    assert (vars(told)["request"], vars(told)["attempt"]) == ("r", 1)
