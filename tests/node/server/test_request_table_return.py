"""A router comes back for its requests: it gets what it has not seen, once and whole."""

from __future__ import annotations

import msgspec
import pytest

from baton_node.server.request_table import Bounds
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
    Pipe,
    Reader,
    TableNode,
    begin,
    come_back,
    lose,
    prefill,
    tokens_of,
)

REPLY = b"one two three"


@pytest.fixture
def node() -> TableNode:
    return TableNode()


@pytest.mark.parametrize("seen", range(1, 7))
def test_a_router_that_comes_back_gets_what_it_has_not_seen_and_the_rest(
    node: TableNode, seen: int
) -> None:
    request = make_request("r", b"p", max_tokens=len(REPLY))
    tokens, router = tokens_of(request, 0, REPLY), Reader(request)
    link = begin(node, RunJob(request))
    node.say(*tokens[:3])
    node.say(*tokens[3:6])
    router.read(link.deltas()[:seen])
    lose(node, link)
    node.say(*tokens[6:9])
    back = come_back(node, router.job())
    node.say(*tokens[9:])
    router.read(back.deltas())
    assert router.texts == [REPLY.decode()]
    assert router.ends == {0: ("length", None)}
    assert router.stats == 1


def test_what_ended_while_its_link_was_gone_is_told_to_who_comes_back(node: TableNode) -> None:
    request = make_request("r", b"p", n=2, max_tokens=3)
    router = Reader(request)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 1, b"xyz"))
    router.read(link.deltas())
    lose(node, link)
    node.say(*tokens_of(request, 0, b"abc"))
    assert len(node.table) == 0
    router.read(come_back(node, router.job()).deltas())
    assert (router.texts, router.stats) == (["abc", "xyz"], 1)


def test_a_last_frame_that_was_lost_with_its_link_is_sent_again(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    router = Reader(request)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"abc"))
    router.read(link.deltas()[:2])
    node.clock.advance(GRACE_S - 1)
    lose(node, link)
    node.clock.advance(GRACE_S - 1)
    node.table.tidy()
    router.read(come_back(node, router.job()).deltas())
    assert router.texts == ["abc"]


def test_a_first_token_that_was_lost_with_its_link_is_sent_again(node: TableNode) -> None:
    request = make_request("r", b"p", n=2)
    link = begin(node, prefill(request))
    node.say(*(token for c in (0, 1) for token in tokens_of(request, c, b"a", None)))
    (done,) = link.frames
    assert isinstance(done, PrefillDone)
    assert [delta.text for delta in done.choices] == ["a", "a"]
    lose(node, link)
    assert come_back(node, prefill(request)).frames == [done]


def test_a_first_token_sampled_while_the_link_was_gone_is_told(node: TableNode) -> None:
    request = make_request("r", b"p")
    link = begin(node, prefill(request))
    lose(node, link)
    back = come_back(node, prefill(request))
    assert back.frames == []
    node.say(*tokens_of(request, 0, b"a", None))
    assert isinstance(back.frames[0], PrefillDone)


def test_a_failure_that_was_lost_with_its_link_is_told_again(node: TableNode) -> None:
    request = make_request("r", b"p")
    link = begin(node, RunJob(request))
    failed = JobFailed(request.id, 1, DeadlineExceeded("too late").record())
    node.table.failed(failed)
    assert link.frames == [failed]
    lose(node, link)
    assert come_back(node, RunJob(request)).frames == [failed]


def test_the_same_job_on_the_same_link_changes_nothing(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"abc")[:2])
    assert node.table.goes_on(RunJob(request), link)
    assert len(link.deltas()) == 2
    assert node.sent == [RunJob(request)]


def test_a_router_that_lost_nothing_gets_nothing_twice(node: TableNode) -> None:
    request = make_request("r", b"p")
    router = Reader(request)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"abc", None))
    router.read(link.deltas())
    lose(node, link)
    assert come_back(node, router.job()).frames == []


def test_the_new_link_counts_also_where_the_old_one_is_not_known_to_be_broken(
    node: TableNode,
) -> None:
    request = make_request("r", b"p", max_tokens=3)
    old = begin(node, RunJob(request))
    new = come_back(node, RunJob(request))
    node.table.orphan(old)
    node.clock.advance(2 * GRACE_S)
    node.table.tidy()
    node.say(*tokens_of(request, 0, b"abc"))
    assert (len(old.frames), len(new.deltas())) == (0, 3)


def test_what_is_no_longer_kept_is_a_retryable_failure() -> None:
    node = TableNode(Bounds(request_bytes=2000))
    request = make_request("r", b"p")
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"x" * 100, None))
    lose(node, link)
    (failed,) = come_back(node, RunJob(request)).frames
    assert isinstance(failed, JobFailed)
    assert (failed.error.code, failed.error.retryable) == ("history_lost", True)
    assert node.sent[-1] == Abort(request.id, 1)
    assert len(node.table) == 0


def test_the_newest_tokens_are_kept_where_not_all_can_be() -> None:
    node = TableNode(Bounds(request_bytes=2000))
    request = make_request("r", b"p")
    router = Reader(request)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"x" * 100, None))
    router.read(link.deltas()[:97])
    lose(node, link)
    router.read(come_back(node, router.job()).deltas())
    assert router.texts == ["x" * 100]


def test_ended_requests_are_forgotten_when_nobody_can_have_missed_them(node: TableNode) -> None:
    request = make_request("r", b"p", max_tokens=3)
    link = begin(node, RunJob(request))
    node.say(*tokens_of(request, 0, b"abc"))
    node.clock.advance(GRACE_S)
    node.table.tidy()
    lose(node, link)
    assert not node.table.goes_on(RunJob(request), Pipe())


@pytest.mark.parametrize("bounds", [Bounds(ended=3), Bounds(ended_bytes=3000)])
def test_ended_requests_are_bounded(bounds: Bounds) -> None:
    node = TableNode(bounds)
    requests = [make_request(f"r{i}", b"p", max_tokens=3) for i in range(10)]
    links = [begin(node, RunJob(request)) for request in requests]
    for request in requests:
        node.say(*tokens_of(request, 0, b"abc"))
    for link in links:
        lose(node, link)
    assert [node.table.goes_on(RunJob(request), Pipe()) for request in requests] == (
        [False] * 7 + [True] * 3
    )


# --- the first token on a link that comes back --------------------------------------------------


def test_a_job_sent_again_with_outputs_brings_the_first_token(node: TableNode) -> None:
    request = make_request("r", b"p", n=2, max_tokens=3)
    link = begin(node, RunJob(request, await_first=True))
    lose(node, link)
    had = msgspec.structs.replace(request, outputs=((97,), (120,)))
    back = come_back(node, RunJob(had, finished=(1,)))
    assert node.sent[-1] == FirstTokens(request.id, 1, ((97,), (120,)), (1,))
    node.say(*tokens_of(request, 0, b"abc")[1:])
    assert [delta.text for delta in back.deltas()] == ["b", "c"]
    assert back.deltas()[-1].finish == "length"


def test_a_job_sent_again_without_outputs_brings_the_word_that_there_are_none(
    node: TableNode,
) -> None:
    request = make_request("r", b"p")
    link = begin(node, RunJob(request, await_first=True))
    lose(node, link)
    come_back(node, RunJob(request))
    assert isinstance(node.sent[-1], NoFirstTokens)


def test_a_job_sent_again_that_still_awaits_its_first_token_goes_on_waiting(
    node: TableNode,
) -> None:
    job = RunJob(make_request("r", b"p"), await_first=True)
    lose(node, begin(node, job))
    come_back(node, job)
    assert node.sent == [job]


def test_a_first_word_that_comes_twice_is_heard_once(node: TableNode) -> None:
    request = make_request("r", b"p")
    link = begin(node, RunJob(request, await_first=True))
    first = FirstTokens(request.id, 1, ((0xC3,),))
    node.table.first(first)
    node.say(*tokens_of(request, 0, "é!".encode(), None)[1:2])
    node.table.first(first)
    node.table.no_first(NoFirstTokens(request.id, 1, "late"))
    assert len(node.sent) == 2
    node.say(*tokens_of(request, 0, "é!".encode(), None)[2:])
    assert "".join(delta.text for delta in link.deltas()) == "é!"


def test_a_first_word_of_the_wrong_width_is_no_first_word(node: TableNode) -> None:
    request = make_request("r", b"p", n=2)
    begin(node, RunJob(request, await_first=True))
    node.table.first(FirstTokens(request.id, 1, ((97,),)))
    assert isinstance(node.sent[-1], NoFirstTokens)


def test_a_first_word_that_ends_every_choice_ends_the_request(node: TableNode) -> None:
    request = make_request("r", b"p")
    begin(node, RunJob(request, await_first=True))
    node.table.first(FirstTokens(request.id, 1, ((97,),), finished=(0,)))
    assert len(node.table) == 0
