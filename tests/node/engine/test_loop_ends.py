"""Requests that end before their last token: aborts at every stage, and deadlines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton_engine.sim.build import SimSettings
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Abort, NoFirstTokens, PrefillJob, RunJob
from tests.support.engines.short_of_memory import engine_on, samples_of
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import LoopNode, run_alone, settle, spin, with_deadline

PROMPT = bytes((i * 5) % 95 + 32 for i in range(150))
ONE_AT_A_TIME = SimSettings(chunk_blocks=1, max_num_seqs=1)


@pytest.fixture
def node() -> Iterator[LoopNode]:
    node = LoopNode("n0", ONE_AT_A_TIME)
    yield node
    settle([node])
    node.close()


def test_a_request_without_memory_for_a_step_of_its_own_fails_for_good_and_others_go_on() -> None:
    engine, _ = engine_on(lambda number, rows: samples_of(rows) > 4, max_model_len=1000)
    node = LoopNode("n0", engine=engine)
    node.take(RunJob(make_request("a", PROMPT)), RunJob(make_request("huge", PROMPT, n=6)))
    node.take(RunJob(make_request("b", PROMPT)))
    spin([node], lambda: bool(node.failures()), "the failure")
    settle([node])
    [failure] = node.failures()
    assert (failure.request, failure.error.code, failure.error.status) == (
        "huge",
        "out_of_memory",
        500,
    )
    assert not failure.error.retryable
    assert [len(node.ids(name)) for name in ("a", "huge", "b")] == [8, 0, 8]
    assert node.freed
    assert node.loop.idle
    node.close()


# --- aborts ---------------------------------------------------------------------------------------


def test_an_abort_frees_the_blocks_within_the_same_turn(node: LoopNode) -> None:
    request = make_request("r", PROMPT, max_tokens=4000)
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids("r")) > 2, "some tokens")
    assert not node.freed
    node.take(Abort(request.id, 1))
    node.loop.turn()
    assert node.freed
    assert node.loop.idle


def test_an_abort_removes_a_request_from_the_engine_s_queue(node: LoopNode) -> None:
    running = make_request("running", PROMPT, max_tokens=4000)
    queued = make_request("queued", PROMPT[::-1], max_tokens=4000)
    node.take(RunJob(running), RunJob(queued))
    spin([node], lambda: len(node.ids("running")) > 2, "some tokens")
    assert node.engine.load().waiting == 1
    node.take(Abort(queued.id, 1))
    node.loop.turn()
    assert node.engine.load().waiting == 0
    node.take(Abort(running.id, 1))
    node.loop.turn()
    assert not node.tokens("queued")


def test_an_abort_in_the_turn_of_the_last_token_prevents_it(node: LoopNode) -> None:
    request = make_request("r", PROMPT, max_tokens=5)
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids("r")) == 4, "all tokens but one")
    node.take(Abort(request.id, 1))
    node.loop.turn()
    assert (len(node.ids("r")), node.freed, node.loop.idle) == (4, True, True)


def test_an_abort_after_the_last_token_changes_nothing(node: LoopNode) -> None:
    request = make_request("r", PROMPT, max_tokens=5)
    run_alone(node, request)
    node.take(Abort(request.id, 1))
    node.loop.turn()
    assert not node.failures()
    assert run_alone(node, make_request("next", PROMPT))


def test_an_abort_of_a_job_that_waits_for_its_first_token_forgets_it(node: LoopNode) -> None:
    request = make_request("r", PROMPT)
    node.take(RunJob(request, await_first=True))
    node.loop.turn()
    node.take(Abort(request.id, 1), NoFirstTokens(request.id, 1, "late"))
    node.loop.turn()
    assert node.loop.idle
    assert not node.engine.has_work()


def test_an_aborted_prefill_job_emits_no_token(node: LoopNode) -> None:
    job = PrefillJob(make_request("r", bytes(2000)), NodeId("d"), Epoch("e"))
    node.take(job)
    spin([node], lambda: not node.freed, "blocks for the prompt")
    node.take(Abort(job.request.id, 1))
    settle([node])
    assert not node.tokens("r")


# --- deadlines ------------------------------------------------------------------------------------


def test_a_running_request_ends_at_its_deadline_with_a_final_error(node: LoopNode) -> None:
    request = with_deadline(make_request("r", PROMPT, max_tokens=4000), 1000.0)
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids("r")) > 2, "some tokens")
    node.clock_ahead_s += 900
    spin([node], lambda: len(node.ids("r")) > 100, "more tokens")
    node.clock_ahead_s += 100
    spin([node], lambda: bool(node.failures()), "the end")
    assert node.freed
    (failed,) = node.failures()
    assert (failed.error.code, failed.error.status) == ("deadline_exceeded", 504)
    assert not failed.error.retryable


@pytest.mark.parametrize("stage", ["queued", "parked", "prefill"])
def test_a_request_that_does_not_run_yet_also_ends_at_its_deadline(
    node: LoopNode, stage: str
) -> None:
    running = make_request("running", PROMPT, max_tokens=4000)
    node.take(RunJob(running))
    spin([node], lambda: len(node.ids("running")) > 2, "some tokens")
    request = with_deadline(make_request("r", PROMPT[::-1]), 1000.0)
    if stage == "prefill":
        node.take(PrefillJob(request, NodeId("d"), Epoch("e")))
    else:
        node.take(RunJob(request, await_first=stage == "parked"))
    spin([node], lambda: len(node.ids("running")) > 20, "some turns")
    assert not node.failures()
    node.clock_ahead_s += 1000
    spin([node], lambda: bool(node.failures()), "the end")
    node.take(Abort(running.id, 1))
    settle([node])
    assert [failed.request for failed in node.failures()] == ["r"]
    assert not node.tokens("r")


def test_a_request_that_ended_in_time_does_not_fail_later(node: LoopNode) -> None:
    request = with_deadline(make_request("r", PROMPT), 1000.0)
    run_alone(node, request)
    node.clock_ahead_s += 2000
    run_alone(node, make_request("next", PROMPT))
    assert not node.failures()
