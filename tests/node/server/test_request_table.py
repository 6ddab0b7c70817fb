"""Whose requests are on a node: attempts, aborts, the grace period, and what goes out."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from baton_node.ipc.messages import FinishChoice, Prompted, Step, Token
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
    Pipe,
    TableNode,
    begin,
    come_back,
    lose,
    prefill,
    tokens_of,
    values_of,
)

REPLY = b"one two three"


@pytest.fixture
def node() -> TableNode:
    return TableNode()


# --- attempts, aborts, grace --------------------------------------------------------------------


def test_choices_that_ended_elsewhere_are_not_waited_for(node: TableNode) -> None:
    outputs = ((97, 98), (120,))
    request = msgspec.structs.replace(
        make_request("r", b"p", n=2, max_tokens=3, attempt=2), outputs=outputs
    )
    job = RunJob(request, finished=(1,))
    link = begin(node, job)
    assert node.sent == [job]
    node.say(*tokens_of(request, 0, b"abc")[2:])
    (delta,) = link.deltas()
    assert (delta.offset, delta.text, delta.stats) == (2, "c", RequestStats())
    assert len(node.table) == 0


def test_a_job_without_an_open_choice_is_not_run(node: TableNode) -> None:
    request = make_request("r", b"p")
    begin(node, RunJob(request, finished=(0,)))
    assert (node.sent, len(node.table)) == ([], 0)


def test_a_choice_that_came_with_all_its_tokens_shows_the_text_that_was_held_back(
    node: TableNode,
) -> None:
    request = make_request("r", b"x", max_tokens=3, stop=("cde",))
    job = RunJob(msgspec.structs.replace(request, outputs=(tuple(b"abc"),)))
    link = begin(node, job)
    node.say(Token(request.id, request.attempt, 0, 3, None, "length"))
    [delta] = link.deltas()
    assert (delta.offset, delta.ids, delta.text, delta.finish) == (3, (), "c", "length")


def test_a_newer_attempt_takes_the_place_of_an_older_one(node: TableNode) -> None:
    old = make_request("r", b"p", max_tokens=3)
    new = msgspec.structs.replace(old, attempt=2, outputs=((97,),))
    before = begin(node, RunJob(old))
    after = begin(node, RunJob(new))
    node.say(*tokens_of(old, 0, b"abc"), *tokens_of(new, 0, b"abc")[1:])
    assert (len(before.frames), len(after.deltas())) == (0, 2)
    assert node.sent == [RunJob(old), Abort(old.id, 1), RunJob(new)]
    assert node.table.goes_on(RunJob(old), Pipe())


def test_an_abort_that_was_faster_than_its_job_keeps_it_away(node: TableNode) -> None:
    request = make_request("r", b"p")
    node.table.abort(Abort(request.id, 1))
    assert node.table.goes_on(RunJob(request), Pipe())
    assert node.sent == []
    begin(node, RunJob(msgspec.structs.replace(request, attempt=2)))


def test_an_aborted_request_says_no_more(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = begin(node, RunJob(request))
    node.table.abort(Abort(request.id, 1))
    node.say(*tokens_of(request, 0, b"abc"))
    assert link.frames == []
    assert node.sent[-1] == Abort(request.id, 1)
    node.table.abort(Abort(request.id, 1))
    assert node.sent.count(Abort(request.id, 1)) == 1


def test_words_about_another_attempt_are_not_heard(node: TableNode) -> None:
    request = make_request("r", b"p", attempt=2)
    begin(node, RunJob(request, await_first=True))
    node.table.first(FirstTokens(request.id, 1, ((97,),)))
    node.table.no_first(NoFirstTokens(request.id, 3, "early"))
    node.table.abort(Abort(request.id, 1))
    assert len(node.sent) == 1


def test_a_router_that_stays_away_has_its_requests_aborted(
    node: TableNode, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request("r", b"secret", max_tokens=30)
    link = begin(node, RunJob(request))
    assert node.table.orphan(link)
    node.clock.advance(GRACE_S - 0.1)
    node.table.tidy()
    assert len(node.table) == 1
    node.clock.advance(0.2)
    with caplog.at_level(logging.INFO):
        node.table.tidy()
    assert len(node.table) == 0
    assert node.sent[-1] == Abort(request.id, 1)
    (told,) = caplog.records
    assert (vars(told)["request"], vars(told)["attempt"]) == ("r", 1)


def test_each_loss_of_a_link_starts_the_grace_period_anew(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=30)
    lose(node, begin(node, RunJob(request)))
    node.clock.advance(GRACE_S - 1)
    lose(node, come_back(node, RunJob(request)))
    node.clock.advance(GRACE_S - 1)
    node.table.tidy()
    assert len(node.table) == 1


def test_a_link_without_requests_leaves_nothing_to_do(node: TableNode) -> None:
    assert not node.table.orphan(Pipe())


# --- tokens -------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_choice_in_the_engine_too(node: TableNode) -> None:
    request = make_request("r", b"p", stop=("two",), max_tokens=100)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, REPLY, None))
    assert node.sent[-1] == FinishChoice(request.id, 1, 0)
    assert "".join(delta.text for delta in link.deltas()) == "one "
    assert len(link.deltas()) == len(b"one two")


def test_all_tokens_of_a_step_for_one_router_are_one_frame(node: TableNode) -> None:
    first, second = make_request("r1", b"p"), make_request("r2", b"p")
    link = begin(node, RunJob(first))
    node.table.open(RunJob(second), link)
    node.say(*tokens_of(first, 0, b"a", None), *tokens_of(second, 0, b"b", None))
    (frame,) = link.frames
    assert isinstance(frame, Deltas)
    assert [delta.request for delta in frame.items] == ["r1", "r2"]


def prompted(request: Request, **more: Any) -> Step:
    stats = RequestStats(prompt_tokens=3, queue_ms=20.0)
    use = Prompted(request.id, 1, stats, **more)
    return Step(tuple(tokens_of(request, 0, b"ab", None)), (use,))


@pytest.mark.parametrize("job", [RunJob, prefill])
def test_the_prompts_own_logprobs_go_out_with_the_first_token(node: TableNode, job: Any) -> None:
    positions = tuple(
        PositionLogprobs(TokenLogprob(id, -1.0, 1), (TokenLogprob(65, -0.5, 1),)) for id in b"xy"
    )
    request = make_request("r", b"pxy", prompt_logprobs=1)
    link = begin(node, job(request))
    node.table.stepped(prompted(request, logprobs=positions))
    frame = link.frames[0]
    assert isinstance(frame, Deltas | PrefillDone)
    deltas = frame.items if isinstance(frame, Deltas) else frame.choices
    named = deltas[0].prompt_logprobs
    assert [each.sampled.text for each in named] == ["x", "y"]
    assert [each.top[0].raw for each in named] == [b"A", b"A"]
    assert all(not delta.prompt_logprobs for delta in deltas[1:])


async def test_waits_become_histograms(node: TableNode) -> None:
    request = make_request("r", b"p")
    begin(node, RunJob(request, await_first=True))
    node.clock.advance(0.3)
    node.table.no_first(NoFirstTokens(request.id, 1, "lost"))
    node.table.stepped(prompted(request))
    values = values_of(node.metrics.page())
    assert values["baton_handoff_wait_seconds_sum"] == pytest.approx(0.3)
    assert values["baton_queue_seconds_sum"] == pytest.approx(0.02)
    counts = [values[f"baton_{name}_seconds_count"] for name in ("handoff_wait", "queue", "fetch")]
    assert counts == [1, 1, 0]


def test_a_token_for_nobody_is_dropped(node: TableNode) -> None:
    node.say(Token(make_request("r", b"p").id, 1, 0, 0, 97))
    node.table.failed(JobFailed(make_request("r", b"p").id, 1, DeadlineExceeded("x").record()))
    assert node.sent == []
