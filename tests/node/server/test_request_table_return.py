"""A router that reconnects gets each delta that it missed, complete and once."""

from __future__ import annotations

import msgspec
import pytest

from baton_node.server.request_table import KeptLimits
from baton_protocol.errors import DeadlineExceeded
from baton_protocol.link import (
    Abort,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillDone,
    RunJob,
)
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import (
    GRACE_S,
    FakeLink,
    Reader,
    TableNode,
    lose_link,
    open_job,
    prefill,
    reconnect,
    tokens_of,
)

REPLY = b"one two three"


@pytest.mark.parametrize("seen", range(1, 7))
def test_a_router_that_reconnects_gets_the_missed_deltas_and_the_later_ones(
    node: TableNode, seen: int
) -> None:
    request = make_request("r", b"p", max_tokens=len(REPLY))
    tokens, router = tokens_of(request, 0, REPLY), Reader(request)
    link = open_job(node, RunJob(request))
    node.emit(*tokens[:3])
    node.emit(*tokens[3:6])
    router.read(link.deltas()[:seen])
    lose_link(node, link)
    node.emit(*tokens[6:9])
    back = reconnect(node, router.job())
    node.emit(*tokens[9:])
    router.read(back.deltas())
    assert router.texts == [REPLY.decode()]
    assert router.ends == {0: ("length", None)}
    assert router.stats == 1


def test_a_router_that_reconnects_gets_a_choice_that_ended_meanwhile(node: TableNode) -> None:
    request = make_request("r", b"p", n=2, max_tokens=3)
    router = Reader(request)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 1, b"xyz"))
    router.read(link.deltas())
    lose_link(node, link)
    node.emit(*tokens_of(request, 0, b"abc"))
    assert len(node.table) == 0
    router.read(reconnect(node, router.job()).deltas())
    assert (router.texts, router.stats) == (["abc", "xyz"], 1)


def test_a_last_delta_that_was_lost_with_its_link_is_sent_again(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    router = Reader(request)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"abc"))
    router.read(link.deltas()[:2])
    node.clock.advance(GRACE_S - 1)
    lose_link(node, link)
    node.clock.advance(GRACE_S - 1)
    node.table.drop_expired()
    router.read(reconnect(node, router.job()).deltas())
    assert router.texts == ["abc"]


def test_a_first_token_that_was_lost_with_its_link_is_sent_again(node: TableNode) -> None:
    request = make_request("r", b"p", n=2)
    link = open_job(node, prefill(request))
    node.emit(*(token for c in (0, 1) for token in tokens_of(request, c, b"a", None)))
    (done,) = link.frames
    assert isinstance(done, PrefillDone)
    assert [delta.text for delta in done.choices] == ["a", "a"]
    lose_link(node, link)
    assert reconnect(node, prefill(request)).frames == [done]


def test_a_first_token_sampled_after_the_link_was_lost_goes_to_the_new_link(
    node: TableNode,
) -> None:
    request = make_request("r", b"p")
    link = open_job(node, prefill(request))
    lose_link(node, link)
    back = reconnect(node, prefill(request))
    assert back.frames == []
    node.emit(*tokens_of(request, 0, b"a", None))
    assert isinstance(back.frames[0], PrefillDone)


def test_a_failure_that_was_lost_with_its_link_is_sent_again(node: TableNode) -> None:
    request = make_request("r", b"p")
    link = open_job(node, RunJob(request))
    failed = JobFailed(request.id, 1, DeadlineExceeded("too late").record())
    node.table.fail_request(failed)
    assert link.frames == [failed]
    lose_link(node, link)
    assert reconnect(node, RunJob(request)).frames == [failed]


def test_the_same_job_on_the_same_link_changes_nothing(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"abc")[:2])
    assert node.table.resume_job(RunJob(request), link)
    assert len(link.deltas()) == 2
    assert node.sent == [RunJob(request)]


def test_a_router_that_lost_nothing_gets_nothing_twice(node: TableNode) -> None:
    request = make_request("r", b"p")
    router = Reader(request)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"abc", None))
    router.read(link.deltas())
    lose_link(node, link)
    assert reconnect(node, router.job()).frames == []


def test_a_new_link_replaces_one_that_the_node_does_not_know_to_be_broken(
    node: TableNode,
) -> None:
    request = make_request("r", b"p", max_tokens=3)
    old = open_job(node, RunJob(request))
    new = reconnect(node, RunJob(request))
    node.table.orphan_requests(old)
    node.clock.advance(2 * GRACE_S)
    node.table.drop_expired()
    node.emit(*tokens_of(request, 0, b"abc"))
    assert (len(old.frames), len(new.deltas())) == (0, 3)


def test_deltas_that_are_no_longer_kept_are_a_retryable_failure() -> None:
    node = TableNode(KeptLimits(request_bytes=2000))
    request = make_request("r", b"p")
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"x" * 100, None))
    lose_link(node, link)
    (failed,) = reconnect(node, RunJob(request)).frames
    assert isinstance(failed, JobFailed)
    assert (failed.error.code, failed.error.retryable) == ("history_lost", True)
    assert node.sent[-1] == Abort(request.id, 1)
    assert len(node.table) == 0


def test_a_full_history_keeps_the_newest_deltas() -> None:
    node = TableNode(KeptLimits(request_bytes=2000))
    request = make_request("r", b"p")
    router = Reader(request)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"x" * 100, None))
    router.read(link.deltas()[:97])
    lose_link(node, link)
    router.read(reconnect(node, router.job()).deltas())
    assert router.texts == ["x" * 100]


def test_ended_requests_are_forgotten_after_the_grace_period(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = open_job(node, RunJob(request))
    node.emit(*tokens_of(request, 0, b"abc"))
    node.clock.advance(GRACE_S)
    node.table.drop_expired()
    lose_link(node, link)
    assert not node.table.resume_job(RunJob(request), FakeLink())


@pytest.mark.parametrize("limits", [KeptLimits(ended=3), KeptLimits(ended_bytes=3000)])
def test_the_number_and_the_bytes_of_ended_requests_are_bounded(limits: KeptLimits) -> None:
    node = TableNode(limits)
    requests = [make_request(f"r{i}", b"p", max_tokens=3) for i in range(10)]
    links = [open_job(node, RunJob(request)) for request in requests]
    for request in requests:
        node.emit(*tokens_of(request, 0, b"abc"))
    for link in links:
        lose_link(node, link)
    assert [node.table.resume_job(RunJob(request), FakeLink()) for request in requests] == (
        [False] * 7 + [True] * 3
    )


# --- first tokens on a new link ------------------------------------------------------------------


def test_a_resent_job_with_outputs_delivers_the_first_tokens(node: TableNode) -> None:
    request = make_request("r", b"p", n=2, max_tokens=3)
    link = open_job(node, RunJob(request, await_first=True))
    lose_link(node, link)
    resent = msgspec.structs.replace(request, outputs=((97,), (120,)))
    back = reconnect(node, RunJob(resent, finished=(1,)))
    assert node.sent[-1] == FirstTokens(request.id, 1, ((97,), (120,)), (1,))
    node.emit(*tokens_of(request, 0, b"abc")[1:])
    assert [delta.text for delta in back.deltas()] == ["b", "c"]
    assert back.deltas()[-1].finish == "length"


def test_a_resent_job_without_outputs_means_that_there_are_no_first_tokens(
    node: TableNode,
) -> None:
    request = make_request("r", b"p")
    link = open_job(node, RunJob(request, await_first=True))
    lose_link(node, link)
    reconnect(node, RunJob(request))
    assert isinstance(node.sent[-1], NoFirstTokens)


def test_a_resent_job_that_awaits_its_first_token_keeps_waiting(
    node: TableNode,
) -> None:
    job = RunJob(make_request("r", b"p"), await_first=True)
    lose_link(node, open_job(node, job))
    reconnect(node, job)
    assert node.sent == [job]


def test_repeated_first_tokens_are_ignored(node: TableNode) -> None:
    request = make_request("r", b"p")
    link = open_job(node, RunJob(request, await_first=True))
    first = FirstTokens(request.id, 1, ((0xC3,),))
    node.table.use_first_tokens(first)
    node.emit(*tokens_of(request, 0, "é!".encode(), None)[1:2])
    node.table.use_first_tokens(first)
    node.table.use_no_first_tokens(NoFirstTokens(request.id, 1, "late"))
    assert len(node.sent) == 2
    node.emit(*tokens_of(request, 0, "é!".encode(), None)[2:])
    assert "".join(delta.text for delta in link.deltas()) == "é!"


def test_first_tokens_for_the_wrong_number_of_choices_count_as_none(node: TableNode) -> None:
    request = make_request("r", b"p", n=2)
    open_job(node, RunJob(request, await_first=True))
    node.table.use_first_tokens(FirstTokens(request.id, 1, ((97,),)))
    assert isinstance(node.sent[-1], NoFirstTokens)


def test_first_tokens_that_end_every_choice_end_the_request(node: TableNode) -> None:
    request = make_request("r", b"p")
    open_job(node, RunJob(request, await_first=True))
    node.table.use_first_tokens(FirstTokens(request.id, 1, ((97,),), finished=(0,)))
    assert len(node.table) == 0
