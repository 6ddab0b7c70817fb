"""The server's table of requests: attempts, aborts, the grace period, and the frames it sends."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from baton_engine.interface import Complete, TokenOut
from baton_node.ipc.messages import FinishChoice, Prompted, Step
from baton_protocol.errors import DeadlineExceeded
from baton_protocol.link import (
    Abort,
    Deltas,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillDone,
    RequestStats,
    RunJob,
)
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import (
    GRACE_S,
    FakeLink,
    TableNode,
    lose_link,
    metric_values,
    open_job,
    prefill,
    reconnect,
    tokens_of,
)

REPLY = b"one two three"


# --- attempts, aborts, grace --------------------------------------------------------------------


def test_a_request_ends_without_the_choices_that_ended_on_another_node(node: TableNode) -> None:
    outputs = ((97, 98), (120,))
    request = msgspec.structs.replace(
        make_request("r", b"p", n=2, max_tokens=3, attempt=2), outputs=outputs
    )
    job = RunJob(request, finished=(1,))
    link = open_job(node, job)
    assert node.sent == [job]
    node.emit(*tokens_of(request, 0, b"abc")[2:])
    (delta,) = link.deltas()
    assert (delta.offset, delta.text, delta.stats) == (2, "c", RequestStats())
    assert len(node.table) == 0


def test_a_job_without_open_choices_does_not_reach_the_engine(node: TableNode) -> None:
    request = make_request("r", b"p")
    open_job(node, RunJob(request, finished=(0,)))
    assert (node.sent, len(node.table)) == ([], 0)


def test_a_choice_that_arrives_with_all_its_tokens_gets_its_held_back_text(
    node: TableNode,
) -> None:
    request = make_request("r", b"x", max_tokens=3, stop=("cde",))
    job = RunJob(msgspec.structs.replace(request, outputs=(tuple(b"abc"),)))
    link = open_job(node, job)
    node.emit(Complete(request.id, request.attempt, 0, 3, "length"))
    [delta] = link.deltas()
    assert (delta.offset, delta.ids, delta.text, delta.finish) == (3, (), "c", "length")


def test_a_newer_attempt_replaces_an_older_one(node: TableNode) -> None:
    old = make_request("r", b"p", max_tokens=3)
    new = msgspec.structs.replace(old, attempt=2, outputs=((97,),))
    old_link = open_job(node, RunJob(old))
    new_link = open_job(node, RunJob(new))
    node.emit(*tokens_of(old, 0, b"abc"), *tokens_of(new, 0, b"abc")[1:])
    assert (len(old_link.frames), len(new_link.deltas())) == (0, 2)
    assert node.sent == [RunJob(old), Abort(old.id, 1), RunJob(new)]
    assert node.table.resume_job(RunJob(old), FakeLink())


def test_an_abort_that_arrives_before_its_job_cancels_it(node: TableNode) -> None:
    request = make_request("r", b"p")
    node.table.abort_request(Abort(request.id, 1))
    assert node.table.resume_job(RunJob(request), FakeLink())
    assert node.sent == []
    open_job(node, RunJob(msgspec.structs.replace(request, attempt=2)))


def test_an_aborted_request_sends_no_more_frames(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = open_job(node, RunJob(request))
    node.table.abort_request(Abort(request.id, 1))
    node.emit(*tokens_of(request, 0, b"abc"))
    assert link.frames == []
    assert node.sent[-1] == Abort(request.id, 1)
    node.table.abort_request(Abort(request.id, 1))
    assert node.sent.count(Abort(request.id, 1)) == 1


def test_frames_for_another_attempt_are_ignored(node: TableNode) -> None:
    request = make_request("r", b"p", attempt=2)
    open_job(node, RunJob(request, await_first=True))
    node.table.use_first_tokens(FirstTokens(request.id, 1, ((97,),)))
    node.table.use_no_first_tokens(NoFirstTokens(request.id, 3, "early"))
    node.table.abort_request(Abort(request.id, 1))
    assert len(node.sent) == 1


def test_requests_are_aborted_if_their_router_does_not_reconnect_in_time(
    node: TableNode, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request("r", b"secret", max_tokens=30)
    link = open_job(node, RunJob(request))
    assert node.table.orphan_requests(link)
    node.clock.advance(GRACE_S - 0.1)
    node.table.drop_expired()
    assert len(node.table) == 1
    node.clock.advance(0.2)
    with caplog.at_level(logging.INFO):
        node.table.drop_expired()
    assert len(node.table) == 0
    assert node.sent[-1] == Abort(request.id, 1)
    (record,) = caplog.records
    assert (vars(record)["request"], vars(record)["attempt"]) == ("r", 1)


def test_each_loss_of_a_link_restarts_the_grace_period(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=30)
    lose_link(node, open_job(node, RunJob(request)))
    node.clock.advance(GRACE_S - 1)
    lose_link(node, reconnect(node, RunJob(request)))
    node.clock.advance(GRACE_S - 1)
    node.table.drop_expired()
    assert len(node.table) == 1


def test_a_lost_link_without_requests_needs_no_tidying(node: TableNode) -> None:
    assert not node.table.orphan_requests(FakeLink())


# --- tokens -------------------------------------------------------------------------------------


def test_a_stop_string_also_ends_the_choice_in_the_engine(node: TableNode) -> None:
    request = make_request("r", b"p", stop=("two",), max_tokens=100)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, REPLY, None))
    assert node.sent[-1] == FinishChoice(request.id, 1, 0)
    assert "".join(delta.text for delta in link.deltas()) == "one "
    assert len(link.deltas()) == len(b"one two")


def test_a_router_gets_all_its_tokens_of_a_step_in_one_frame(node: TableNode) -> None:
    first, second = make_request("r1", b"p"), make_request("r2", b"p")
    link = open_job(node, RunJob(first))
    node.table.open_request(RunJob(second), link)
    node.emit(*tokens_of(first, 0, b"a", None), *tokens_of(second, 0, b"b", None))
    (frame,) = link.frames
    assert isinstance(frame, Deltas)
    assert [delta.request for delta in frame.items] == ["r1", "r2"]


def prompted(request: Request, **fields: Any) -> Step:
    stats = RequestStats(prompt_tokens=3, queue_ms=20.0)
    frame = Prompted(request.id, 1, stats, **fields)
    return Step(tuple(tokens_of(request, 0, b"ab", None)), (frame,))


@pytest.mark.parametrize("job", [RunJob, prefill])
def test_prompt_logprobs_are_sent_with_the_first_token(node: TableNode, job: Any) -> None:
    positions = tuple(
        PositionLogprobs(TokenLogprob(id, -1.0, 1), (TokenLogprob(65, -0.5, 1),)) for id in b"xy"
    )
    request = make_request("r", b"pxy", prompt_logprobs=1)
    link = open_job(node, job(request))
    node.table.send_step(prompted(request, logprobs=positions))
    frame = link.frames[0]
    assert isinstance(frame, Deltas | PrefillDone)
    deltas = frame.items if isinstance(frame, Deltas) else frame.choices
    logprobs = deltas[0].prompt_logprobs
    assert [each.sampled.text for each in logprobs] == ["x", "y"]
    assert [each.top[0].raw for each in logprobs] == [b"A", b"A"]
    assert all(not delta.prompt_logprobs for delta in deltas[1:])


async def test_wait_times_are_observed_in_histograms(node: TableNode) -> None:
    request = make_request("r", b"p")
    open_job(node, RunJob(request, await_first=True))
    node.clock.advance(0.3)
    node.table.use_no_first_tokens(NoFirstTokens(request.id, 1, "lost"))
    node.table.send_step(prompted(request))
    values = metric_values(node.metrics.page())
    assert values["baton_handoff_wait_seconds_sum"] == pytest.approx(0.3)
    assert values["baton_queue_seconds_sum"] == pytest.approx(0.02)
    counts = [values[f"baton_{name}_seconds_count"] for name in ("handoff_wait", "queue", "fetch")]
    assert counts == [1, 1, 0]


def test_frames_of_an_unknown_request_are_dropped(node: TableNode) -> None:
    node.emit(TokenOut(make_request("r", b"p").id, 1, 0, 0, 97))
    node.table.fail_request(
        JobFailed(make_request("r", b"p").id, 1, DeadlineExceeded("x").record())
    )
    assert node.sent == []
