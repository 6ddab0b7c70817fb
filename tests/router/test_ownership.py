"""The request's state machine: ids once and in order, one word to the decode node, one end."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.link import (
    Abort,
    Delta,
    First,
    JobFailed,
    NoFirst,
    PrefillDone,
    PrefillJob,
    RequestStats,
    RunJob,
)
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.sampling import SamplingParams
from baton_router.ownership import Action, Emit, Ended, Failed, RequestRecord, Send

RID = RequestId("r")
DECODE, PREFILL, OTHER = NodeId("decode-0"), NodeId("prefill-0"), NodeId("decode-9")
ERROR = ErrorRecord("broken", "engine_error")


def record(n: int = 1, *, split: bool = True) -> RequestRecord:
    request = Request(
        id=RID, attempt=2, prompt_ids=(1, 2), params=SamplingParams(n=n), outputs=((),) * n
    )
    return RequestRecord(request, DECODE, PREFILL if split else None)


def delta(choice: int, offset: int, *ids: int, attempt: int = 2, **more: Any) -> Delta:
    return Delta(RID, attempt, choice, offset, ids=ids, **more)


def done(*choices: Delta, attempt: int = 2) -> PrefillDone:
    return PrefillDone(RID, attempt, choices, RequestStats(prompt_tokens=2, cached_tokens=1))


def frames(actions: list[Action], kind: type[Any]) -> list[tuple[NodeId, Any]]:
    sent = [action for action in actions if isinstance(action, Send)]
    return [(action.node, action.frame) for action in sent if isinstance(action.frame, kind)]


def emitted(actions: list[Action]) -> list[Delta]:
    return [action.delta for action in actions if isinstance(action, Emit)]


def test_a_split_request_opens_with_a_job_for_each_node() -> None:
    rec = record()
    assert rec.opening(Epoch("e")) == [
        Send(DECODE, RunJob(rec.request, await_first=True)),
        Send(PREFILL, PrefillJob(rec.request, DECODE, Epoch("e"))),
    ]


def test_a_whole_request_opens_with_one_job() -> None:
    rec = record(split=False)
    assert rec.opening(Epoch("e")) == [Send(DECODE, RunJob(rec.request, await_first=False))]


def test_first_tokens_go_to_the_client_and_to_the_decode_node() -> None:
    rec = record(2)
    firsts = (delta(0, 0, 7, text="x"), delta(1, 0, 8, text="y", finish="stop"))
    actions = rec.on_prefill_done(PREFILL, done(*firsts))
    assert emitted(actions) == list(firsts)
    assert frames(actions, First) == [(DECODE, First(RID, 2, ((7,), (8,)), (1,)))]
    assert rec.cached_tokens == 1


def test_a_request_that_ends_with_its_first_tokens_is_dropped_by_the_decode_node() -> None:
    rec = record()
    actions = rec.on_prefill_done(PREFILL, done(delta(0, 0, 7, finish="length")))
    assert actions[1:] == [Ended(), Send(DECODE, Abort(RID, 2))]


def test_a_lost_or_failed_prefill_costs_time_only() -> None:
    for event in (
        ("lost", PREFILL, None),
        ("failed", PREFILL, 2),
        ("done", PREFILL, []),
        ("done", PREFILL, [delta(0, 3, 7)]),
        ("done", PREFILL, [delta(0, 0, 7, finish="abort")]),
        ("done", PREFILL, [delta(0, 0)]),
    ):
        rec = record()
        actions = happen(rec, event)
        assert [node for node, _ in frames(actions, NoFirst)] == [DECODE]
        assert len(actions) == 1
        assert emitted(rec.on_delta(DECODE, delta(0, 0, 5))) == [delta(0, 0, 5)]


def test_after_the_first_token_the_prefill_node_may_go() -> None:
    rec = record()
    rec.on_prefill_done(PREFILL, done(delta(0, 0, 7)))
    assert rec.on_link_lost(PREFILL) == []
    assert rec.on_failed(PREFILL, JobFailed(RID, 2, ERROR)) == []
    assert rec.on_prefill_done(PREFILL, done(delta(0, 0, 9))) == []


def test_a_failed_decode_job_is_the_clients_error_and_ends_the_prefill() -> None:
    rec = record()
    actions = rec.on_failed(DECODE, JobFailed(RID, 2, ERROR))
    assert actions == [Send(PREFILL, Abort(RID, 2)), Failed(ERROR)]


def test_a_lost_decode_node_is_one_retryable_error() -> None:
    rec = record()
    actions = rec.on_link_lost(DECODE)
    assert [node for node, _ in frames(actions, Abort)] == [PREFILL, DECODE]
    failed = actions[-1]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code, failed.error.retryable) == (
        502,
        "node_lost",
        True,
    )
    assert rec.on_link_lost(DECODE) == []


def test_a_client_that_leaves_frees_both_nodes_without_an_error() -> None:
    rec = record()
    assert rec.cancel() == [Send(PREFILL, Abort(RID, 2)), Send(DECODE, Abort(RID, 2))]
    assert rec.cancel() == []


def test_an_end_by_the_router_tells_the_client() -> None:
    rec = record(split=False)
    assert rec.cancel(ERROR) == [Send(DECODE, Abort(RID, 2)), Failed(ERROR)]


def test_overlap_is_dropped_with_its_logprobs() -> None:
    rec = record(split=False)
    probs = tuple(PositionLogprobs(TokenLogprob(i, -1.0)) for i in (5, 6, 7))
    rec.on_delta(DECODE, delta(0, 0, 5, 6))
    assert rec.on_delta(DECODE, delta(0, 0, 5, 6)) == []
    more = rec.on_delta(DECODE, delta(0, 0, 5, 6, 7, logprobs=probs))
    assert emitted(more) == [delta(0, 2, 7, logprobs=probs[2:])]
    assert rec.outputs == [[5, 6, 7]]


def test_a_gap_is_a_lost_attempt() -> None:
    rec = record(split=False)
    actions = rec.on_delta(DECODE, delta(0, 1, 5))
    assert frames(actions, Abort) == [(DECODE, Abort(RID, 2))]
    assert isinstance(actions[-1], Failed)


def test_a_node_that_gives_up_is_an_error_and_no_answer() -> None:
    rec = record(split=False)
    actions = rec.on_delta(DECODE, delta(0, 0, 5, finish="abort"))
    assert isinstance(actions[-1], Failed)
    assert emitted(actions) == []


def test_the_last_choices_end_is_the_requests() -> None:
    rec = record(2, split=False)
    assert rec.on_delta(DECODE, delta(1, 0, 5, finish="stop"))[1:] == []
    stats = RequestStats(prompt_tokens=2, cached_tokens=1, fetched_tokens=1)
    actions = rec.on_delta(DECODE, delta(0, 0, 5, finish="stop", stats=stats))
    assert actions[1:] == [Ended()]
    assert rec.cached_tokens == 2


def test_strangers_and_older_attempts_are_not_heard() -> None:
    rec = record(split=False)
    assert rec.on_delta(OTHER, delta(0, 0, 5)) == []
    assert rec.on_delta(DECODE, delta(0, 0, 5, attempt=1)) == []
    assert rec.on_failed(OTHER, JobFailed(RID, 2, ERROR)) == []
    assert rec.on_failed(DECODE, JobFailed(RID, 1, ERROR)) == []
    assert rec.on_link_lost(OTHER) == []
    assert rec.on_delta(DECODE, delta(3, 0, 5)) == []


def test_a_decode_node_that_waits_for_its_word_says_nothing() -> None:
    rec = record()
    assert rec.on_delta(DECODE, delta(0, 0, 5)) == []
    assert rec.outputs == [[]]


# --- any order of events --------------------------------------------------------------------------

N = 2
nodes = st.sampled_from([DECODE, PREFILL, OTHER])
finishes = st.sampled_from([None, None, None, "stop", "length", "abort"])
deltas = st.builds(
    lambda choice, offset, count, attempt, finish: delta(
        choice, offset, *range(offset, offset + count), attempt=attempt, finish=finish
    ),
    st.integers(0, N),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from([2, 2, 2, 1]),
    finishes,
)
events = st.one_of(
    st.tuples(st.just("delta"), st.just(DECODE) | nodes, deltas),
    st.tuples(st.just("done"), nodes, st.lists(deltas, max_size=3)),
    st.tuples(st.just("firsts"), st.just(PREFILL), st.lists(finishes, min_size=N, max_size=N)),
    st.tuples(st.just("failed"), nodes, st.sampled_from([1, 2])),
    st.tuples(st.just("lost"), nodes, st.none()),
    st.tuples(st.just("cancel"), st.none(), st.sampled_from([None, ERROR])),
)


def happen(rec: RequestRecord, event: tuple[str, Any, Any]) -> list[Action]:
    kind, node, what = event
    if kind == "delta":
        return rec.on_delta(node, what)
    if kind == "done":
        return rec.on_prefill_done(node, done(*what))
    if kind == "firsts":
        firsts = [delta(c, 0, 0, finish=finish) for c, finish in enumerate(what)]
        return rec.on_prefill_done(node, done(*firsts))
    if kind == "failed":
        return rec.on_failed(node, JobFailed(RID, what, ERROR))
    if kind == "lost":
        return rec.on_link_lost(node)
    return rec.cancel(what)


@given(split=st.booleans(), history=st.lists(events, max_size=25))
def test_whatever_happens_ids_come_once_in_order_and_the_request_ends_once(
    split: bool, history: list[tuple[str, Any, Any]]
) -> None:
    rec = record(N, split=split)
    told: list[list[int]] = [[] for _ in range(N)]
    over = 0
    words = 0
    aborted: set[NodeId] = set()
    for event in history:
        was_over = rec.phase == "over"
        actions = happen(rec, event)
        assert not (was_over and actions)
        for action in actions:
            if isinstance(action, Emit):
                assert action.delta.offset == len(told[action.delta.choice])
                told[action.delta.choice] += action.delta.ids
            elif isinstance(action, Send):
                words += isinstance(action.frame, First | NoFirst)
                if isinstance(action.frame, Abort):
                    assert action.node not in aborted
                    aborted.add(action.node)
            else:
                over += 1
        if event[0] == "cancel" and event[2] is None and not was_over:
            over += 1  # the client left: nobody is told
    # Each id is its own offset, so any loss, doubling or change shows.
    assert all(ids == list(range(len(ids))) for ids in told)
    assert told == rec.outputs
    assert over == (rec.phase == "over")
    assert words <= (1 if split else 0)
    if split:
        decode_heard = words + (DECODE in aborted)
        own_end = any(e[0] == "failed" and e[1] == DECODE and e[2] == 2 for e in history)
        assert decode_heard >= (0 if rec.phase == "handoff" or own_end else 1)
