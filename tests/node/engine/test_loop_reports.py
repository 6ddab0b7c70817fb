"""A step loop sends its load soon after a request arrives, has its prompt computed, or ends."""

from __future__ import annotations

import pytest

from baton_engine.sim.build import SimSettings
from baton_node.engine.reporter import AT_LEAST_EVERY_S, SOON_S
from baton_protocol.link import Load, PrefillJob, RunJob
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import LoopNode

HOUR_S = 3600.0


@pytest.fixture
def node() -> LoopNode:
    settings = SimSettings(chunk_blocks=1, max_batched_tokens=64)
    return LoopNode("n0", settings, load_every_s=HOUR_S)


def loads(node: LoopNode) -> list[tuple[int, int, int]]:
    """Return for each sent load the numbers of received jobs, requests and queued tokens."""
    sent = [frame.load for frame in node.port.sent if isinstance(frame, Load)]
    return [
        (load.jobs_total, load.waiting + load.running + load.parked, load.queued_tokens)
        for load in sent
    ]


def turn(node: LoopNode, times: int = 1) -> None:
    for _ in range(times):
        node.clock_ahead_s += SOON_S
        node.loop.turn()


def test_a_load_follows_each_arrival_each_computed_prompt_and_each_end(node: LoopNode) -> None:
    turn(node, 3)
    assert loads(node) == [(0, 0, 0)]
    node.take(RunJob(make_request("r", b"p" * 100, max_tokens=3)))
    turn(node, 2)
    assert loads(node)[1:] == [(1, 1, 36), (1, 1, 0)]
    turn(node)  # one more token causes no load
    assert loads(node)[3:] == []
    turn(node, 3)
    assert loads(node)[3:] == [(1, 0, 0)]
    node.close()


def test_arrivals_within_soon_s_share_a_load(node: LoopNode) -> None:
    turn(node)
    for number in range(5):
        node.take(RunJob(make_request(f"r{number}", b"p" * 10, max_tokens=1)))
        node.loop.turn()
    turn(node)
    assert len(loads(node)) < 5
    assert loads(node)[-1] == (5, 0, 0)
    assert SOON_S < AT_LEAST_EVERY_S
    node.close()


def test_a_parked_prompt_counts_as_queued_unless_a_prefill_node_computes_it(node: LoopNode) -> None:
    request = make_request("r", b"p" * 100)
    node.take(RunJob(request, await_first=True))
    turn(node)
    assert loads(node)[-1] == (1, 1, 0)
    node.take(PrefillJob(make_request("q", b"q" * 100), node.name, node.epoch))
    turn(node)
    jobs, requests, tokens = loads(node)[-1]
    assert (jobs, requests) == (2, 2)
    assert 0 < tokens <= 100
    node.close()


def test_each_choice_of_a_parked_request_counts_as_one_sequence(node: LoopNode) -> None:
    """A router compares the sum with the number of sequences that it has booked on this node."""
    turn(node)
    node.take(RunJob(make_request("r", b"p" * 100, n=3, max_tokens=3), await_first=True))
    turn(node)
    parked = [frame.load for frame in node.port.sent if isinstance(frame, Load)][-1]
    assert (parked.parked, parked.waiting + parked.running) == (3, 0)
    node.close()
