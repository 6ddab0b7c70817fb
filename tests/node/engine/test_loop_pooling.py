"""Pooling requests in a node's step loop: one answer, nothing in the store, refusals."""

from __future__ import annotations

from contextlib import closing

import pytest

from baton_engine.interface import Complete
from baton_engine.sim.build import SimSettings, build_sim
from baton_node.engine.measure_speeds import measure_compute
from baton_node.ipc.messages import Drain, Drained
from baton_protocol.link import RunJob
from tests.support.engines.pooling import pooling_request, vectors
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import LoopNode, NodeMaker, settle, spin

PROMPT = tuple((place * 5) % 95 + 32 for place in range(150))
EMBEDS = SimSettings(chunk_blocks=1, runner="pooling")


@pytest.mark.integration
def test_a_job_is_answered_by_one_vector_and_leaves_nothing_in_the_store(
    make_node: NodeMaker,
) -> None:
    node = make_node("n0", EMBEDS, write_behind=1 << 30)
    node.take(RunJob(pooling_request("r", PROMPT)))
    spin([node], lambda: bool(node.tokens("r")), "a vector")
    settle([node])
    [answer] = node.tokens("r")
    assert isinstance(answer, Complete)
    assert (answer.finish, answer.vector) == ("stop", vectors(build_sim(EMBEDS), [PROMPT])[0])
    assert node.prompted("r").stats.computed_tokens == len(PROMPT)
    assert node.freed
    assert node.loop.counters["published_chunks"] == 0


@pytest.mark.integration
def test_a_drain_waits_for_the_vector(make_node: NodeMaker) -> None:
    node = make_node("n0", EMBEDS, write_behind=1 << 30)
    node.take(RunJob(pooling_request("r", PROMPT)), Drain())
    spin([node], lambda: any(isinstance(each, Drained) for each in node.port.sent), "a drain")
    assert len(node.tokens("r")) == 1


@pytest.mark.parametrize("pools", [True, False])
def test_the_other_kind_of_request_is_refused_finally(pools: bool) -> None:
    with closing(LoopNode("n0", EMBEDS if pools else None)) as node:
        request = make_request("r", bytes(PROMPT)) if pools else pooling_request("r", PROMPT)
        node.take(RunJob(request))
        spin([node], lambda: bool(node.failures()), "a refusal")
        [failure] = node.failures()
        assert (failure.error.status, failure.error.retryable) == (400, False)
        assert f"--runner {'generate' if pools else 'pooling'}" in failure.error.message


def test_a_pooling_engine_s_speed_is_measured() -> None:
    engine = build_sim(EMBEDS)
    assert measure_compute(engine.info, engine.runner).prefill_tokens_per_s > 0
