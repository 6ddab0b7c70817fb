"""The request's state machine, case by case: attempts, first tokens, losses, refusals, one end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.link import (
    DRAINED,
    Abort,
    Delta,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillDone,
    PrefillJob,
    RequestStats,
    RunJob,
)
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.resume import ResumeState
from baton_protocol.sampling import SamplingParams
from baton_router.requests.state import (
    KEPT_ATTEMPTS,
    KEPT_WAITS,
    MAX_ATTEMPTS,
    Action,
    Emit,
    Ended,
    Failed,
    Measured,
    Regroup,
    Replace,
    RequestRecord,
    Send,
)
from tests.support.clock import Clock
from tests.support.pools.placements import BASIS, placement_on

RID, EPOCH = RequestId("r"), Epoch("e")
DECODE, PREFILL, OTHER = NodeId("decode-0"), NodeId("prefill-0"), NodeId("decode-9")
ERROR = ErrorRecord("broken", "engine_error")
BUSY = ErrorRecord("no room", "busy", status=503, retryable=True)
STATS = RequestStats(prompt_tokens=2, cached_tokens=1)
PROBS = tuple(PositionLogprobs(TokenLogprob(i, -1.0)) for i in (5, 6, 7))


def record(n: int = 1, *, split: bool = True, **params: Any) -> RequestRecord:
    """The record of a request in its first attempt."""
    sampling = SamplingParams(n=n, **params)
    outputs: tuple[tuple[int, ...], ...] = ((),) * n
    rec = RequestRecord(
        Request(id=RID, attempt=1, prompt_ids=(1, 2), params=sampling, outputs=outputs), Clock()
    )
    place(rec, DECODE, PREFILL if split else None)
    return rec


def place(
    rec: RequestRecord, decode: NodeId, prefill: NodeId | None = None, findable: int = 0
) -> list[Action]:
    uncached = len(rec.request.prompt_ids) - findable
    return rec.start_attempt(placement_on(decode, prefill, uncached=uncached), EPOCH, BASIS)


def delta(choice: int, offset: int, *ids: int, attempt: int = 1, **more: Any) -> Delta:
    return Delta(RID, attempt, choice, offset, ids=ids, **more)


def done(*choices: Delta, attempt: int = 1) -> PrefillDone:
    return PrefillDone(RID, attempt, choices, STATS)


def frames(actions: Sequence[Action], kind: Any) -> list[tuple[NodeId, Any]]:
    sent = [action for action in actions if isinstance(action, Send)]
    return [(action.node, action.frame) for action in sent if isinstance(action.frame, kind)]


def emitted(actions: Sequence[Action]) -> list[Delta]:
    return [action.delta for action in actions if isinstance(action, Emit)]


def error(actions: Sequence[Action]) -> ErrorRecord:
    (failed,) = [action for action in actions if isinstance(action, Failed)]
    return failed.error


# --- one attempt ----------------------------------------------------------------------------------


def test_a_split_request_sends_a_job_to_each_node() -> None:
    rec = RequestRecord(record().request, Clock())
    assert rec.phase == "waiting"
    assert place(rec, DECODE, PREFILL) == [
        Send(DECODE, RunJob(rec.request, await_first=True, uncached=0)),
        Send(PREFILL, PrefillJob(rec.request, DECODE, EPOCH, uncached=2)),
    ]


def test_a_whole_request_sends_one_job() -> None:
    rec = RequestRecord(record().request, Clock())
    job = RunJob(rec.request, await_first=False, uncached=1)
    assert place(rec, DECODE, findable=1) == [Send(DECODE, job)]


def test_first_tokens_go_to_the_client_and_to_the_decode_node() -> None:
    rec = record(2)
    firsts = (delta(0, 0, 7, text="x"), delta(1, 0, 8, text="y", finish="stop"))
    actions = rec.on_prefill_done(PREFILL, done(*firsts))
    assert emitted(actions) == list(firsts)
    assert frames(actions, FirstTokens) == [(DECODE, FirstTokens(RID, 1, ((7,), (8,)), (1,)))]
    assert rec.cached_tokens == 1


def test_a_request_that_ends_with_its_first_tokens_is_aborted_on_the_decode_node() -> None:
    rec = record()
    actions = rec.on_prefill_done(PREFILL, done(delta(0, 0, 7, finish="length")))
    assert actions[2:] == [Ended(), Send(DECODE, Abort(RID, 1))]


UNUSABLE = [[], [delta(0, 3, 7)], [delta(0, 0)]]


@pytest.mark.parametrize("choices", [*UNUSABLE, [delta(0, 0, 7), delta(1, 0, 7)]])
def test_after_an_unusable_prefill_answer_the_decode_node_computes_the_prompt(
    choices: list[Delta],
) -> None:
    rec = record()
    actions = rec.on_prefill_done(PREFILL, done(*choices))
    assert [type(action) for action in actions] == [Send]
    assert [node for node, _ in frames(actions, NoFirstTokens)] == [DECODE]
    assert emitted(rec.on_delta(DECODE, delta(0, 0, 5))) == [delta(0, 0, 5)]


@pytest.mark.parametrize("given", [ERROR, BUSY])
def test_after_a_failed_prefill_job_the_decode_node_computes_the_prompt(given: ErrorRecord) -> None:
    rec = record()
    actions = rec.on_failed(PREFILL, JobFailed(RID, 1, given))
    assert actions == [Send(DECODE, NoFirstTokens(RID, 1, given.message))]
    assert emitted(rec.on_delta(DECODE, delta(0, 0, 5))) == [delta(0, 0, 5)]


def test_after_the_first_tokens_nothing_depends_on_the_prefill_node() -> None:
    rec = record()
    rec.on_prefill_done(PREFILL, done(delta(0, 0, 7)))
    assert rec.on_lost(PREFILL, "link") == []
    assert rec.on_resumed(PREFILL) == []
    assert rec.on_failed(PREFILL, JobFailed(RID, 1, ERROR)) == []
    assert rec.on_prefill_done(PREFILL, done(delta(0, 0, 9))) == []


def test_a_final_failure_of_the_decode_job_fails_the_request_and_aborts_the_prefill() -> None:
    rec = record()
    actions = rec.on_failed(DECODE, JobFailed(RID, 1, ERROR))
    assert actions == [Send(PREFILL, Abort(RID, 1)), Failed(ERROR)]


def test_the_request_ends_when_its_last_choice_finishes() -> None:
    rec = record(2, split=False)
    assert rec.on_delta(DECODE, delta(1, 0, 5, finish="stop"))[1:] == []
    stats = RequestStats(prompt_tokens=3, cached_tokens=1, host_tokens=1, fetched_tokens=1)
    actions = rec.on_delta(DECODE, delta(0, 0, 5, finish="stop", stats=stats))
    assert actions[1:] == [Measured(stats, 1, opening=True), Ended()]
    assert rec.cached_tokens == 3


def test_frames_of_other_nodes_and_older_attempts_are_ignored() -> None:
    rec = record(split=False)
    rec.on_lost(DECODE, "link")
    place(rec, DECODE)
    assert rec.on_delta(OTHER, delta(0, 0, 5, attempt=2)) == []
    assert rec.on_delta(DECODE, delta(0, 0, 5)) == []
    assert rec.on_failed(OTHER, JobFailed(RID, 2, ERROR)) == []
    assert rec.on_failed(DECODE, JobFailed(RID, 1, ERROR)) == []
    assert rec.on_lost(OTHER, "link") == []
    assert rec.on_delta(DECODE, delta(3, 0, 5, attempt=2)) == []
    assert emitted(rec.on_delta(DECODE, delta(0, 0, 5, attempt=2)))


def test_deltas_before_first_tokens_are_ignored() -> None:
    rec = record()
    assert rec.on_delta(DECODE, delta(0, 0, 5)) == []
    assert rec.outputs == [[]]


# --- overlaps and gaps ----------------------------------------------------------------------------


def test_tokens_that_the_client_has_are_dropped_with_their_logprobs() -> None:
    rec = record(split=False)
    rec.on_delta(DECODE, delta(0, 0, 5, 6, text="ab"))
    assert rec.on_delta(DECODE, delta(0, 0, 5, 6, text="ab")) == []
    more = rec.on_delta(DECODE, delta(0, 0, 5, 6, 7, logprobs=PROBS))
    assert emitted(more) == [delta(0, 2, 7, logprobs=PROBS[2:])]
    assert rec.outputs == [[5, 6, 7]]


def test_overlapping_text_cannot_be_cut_and_ends_the_attempt() -> None:
    rec = record(split=False)
    rec.on_delta(DECODE, delta(0, 0, 5, 6, text="ab"))
    actions = rec.on_delta(DECODE, delta(0, 0, 5, 6, 7, text="abc"))
    assert actions == [Send(DECODE, Abort(RID, 1)), Replace("gap", DECODE)]
    assert rec.outputs == [[5, 6]]


def test_a_gap_ends_the_attempt_with_a_strike() -> None:
    rec = record(split=False)
    actions = rec.on_delta(DECODE, delta(0, 1, 5))
    assert actions == [Send(DECODE, Abort(RID, 1)), Replace("gap", DECODE)]
    assert (rec.phase, rec.outputs, rec.strikes) == ("waiting", [[]], 1)


# --- losses ---------------------------------------------------------------------------------------


def test_a_lost_decode_node_ends_the_attempt_on_both_nodes() -> None:
    rec = record()
    actions = rec.on_lost(DECODE, "pings")
    assert actions == [
        Send(PREFILL, Abort(RID, 1)),
        Send(DECODE, Abort(RID, 1)),
        Replace("pings", DECODE),
    ]
    assert rec.on_lost(DECODE, "pings") == []


def test_the_next_attempt_continues_the_open_choices_behind_the_client_s_tokens() -> None:
    rec = record(2, split=False, seed=3)
    rec.on_delta(DECODE, delta(0, 0, 5, 6))
    rec.on_delta(DECODE, delta(1, 0, 9, finish="stop"))
    rec.on_lost(DECODE, "link")
    (send,) = place(rec, OTHER)
    assert isinstance(send, Send)
    assert isinstance(send.frame, RunJob)
    job = send.frame
    assert (job.request.attempt, job.request.outputs) == (2, ((5, 6), (9,)))
    assert (job.await_first, job.finished) == (False, (1,))
    assert job.request.params == rec.request.params
    assert emitted(rec.on_delta(OTHER, delta(0, 2, 7, attempt=2))) == [delta(0, 2, 7, attempt=2)]


def test_after_a_lost_prefill_node_the_request_stays_parked_until_give_up_prefill() -> None:
    rec = record()
    actions = rec.on_lost(PREFILL, "link")
    assert actions == [Send(PREFILL, Abort(RID, 1)), Regroup("link", PREFILL)]
    assert rec.on_prefill_done(PREFILL, done(delta(0, 0, 7))) == []
    assert rec.on_delta(DECODE, delta(0, 0, 5)) == []
    assert rec.give_up_prefill("it is gone") == [Send(DECODE, NoFirstTokens(RID, 1, "it is gone"))]
    assert emitted(rec.on_delta(DECODE, delta(0, 0, 5))) == [delta(0, 0, 5)]


def test_placing_another_pair_aborts_the_waiting_decode_node() -> None:
    rec = record()
    rec.on_lost(PREFILL, "link")
    actions = place(rec, OTHER, PREFILL)
    assert frames(actions, Abort) == [(DECODE, Abort(RID, 1))]
    assert [frame.request.attempt for _, frame in frames(actions, RunJob | PrefillJob)] == [2, 2]


@pytest.mark.parametrize("split", [True, False])
def test_three_losses_without_a_token_end_the_request(split: bool) -> None:
    rec = record(split=split)
    for attempt in (1, 2, 3):
        assert isinstance(rec.on_lost(DECODE, "link")[-1], Replace)
        if attempt < 3:
            assert rec.check_strikes(0) == []
            place(rec, DECODE, PREFILL if split else None)
    given = error(rec.check_strikes(0))
    assert (given.code, given.status, given.retryable) == ("request_kills_nodes", 500, False)
    assert rec.phase == "over"


def test_a_lost_prefill_node_is_a_strike() -> None:
    rec = record()
    rec.on_lost(PREFILL, "link")
    rec.give_up_prefill("gone")
    rec.on_lost(DECODE, "link")
    assert (rec.strikes, rec.on_probation) == (2, True)
    place(rec, DECODE, PREFILL)
    assert isinstance(rec.on_lost(PREFILL, "link")[-1], Replace)
    assert error(rec.check_strikes(0)).code == "request_kills_nodes"


def test_losing_both_nodes_of_a_pair_is_one_strike() -> None:
    rec = record()
    assert isinstance(rec.on_lost(PREFILL, "link")[-1], Regroup)
    assert isinstance(rec.on_lost(DECODE, "link")[-1], Replace)
    assert rec.strikes == 1


def test_a_loss_that_leads_to_probation_also_aborts_the_decode_node() -> None:
    rec = record()
    rec.on_lost(DECODE, "link")
    place(rec, DECODE, PREFILL)
    actions = rec.on_lost(PREFILL, "link")
    assert frames(actions, Abort) == [(PREFILL, Abort(RID, 2)), (DECODE, Abort(RID, 2))]
    assert actions[-1] == Replace("link", PREFILL)


def test_a_new_token_clears_all_strikes() -> None:
    rec = record(split=False)
    for _ in range(2):
        rec.on_lost(DECODE, "link")
        place(rec, DECODE)
    assert rec.on_probation
    rec.on_delta(DECODE, delta(0, 0, 5, attempt=3))
    assert not rec.on_probation
    rec.on_lost(DECODE, "link")
    assert (rec.strikes, rec.check_strikes(0)) == (0, [])


def test_a_new_maximum_of_chunks_clears_strikes_and_the_same_number_does_not() -> None:
    rec = record(split=False)
    rec.check_strikes(2)
    for chunks in (2, 3, 3, 3):
        rec.on_lost(DECODE, "link")
        assert rec.check_strikes(chunks) == []
        place(rec, DECODE)
    assert rec.strikes == 2
    rec.on_lost(DECODE, "link")
    assert error(rec.check_strikes(3)).code == "request_kills_nodes"


def test_the_first_chunk_of_a_prompt_clears_strikes() -> None:
    rec = record(split=False)
    rec.on_lost(DECODE, "link")
    assert (rec.check_strikes(0), rec.strikes) == ([], 1)
    assert (rec.check_strikes(1), rec.strikes) == ([], 0)


def test_losses_of_already_silent_nodes_are_strikes_only_after_max_attempts() -> None:
    rec = record(split=False)
    for _ in range(MAX_ATTEMPTS):
        rec.on_lost(DECODE, "pings", blamed=False)
        assert (rec.strikes, rec.check_strikes(0)) == (0, [])
        place(rec, DECODE)
    for strikes in (1, 2):
        rec.on_lost(DECODE, "pings", blamed=False)
        assert (rec.strikes, rec.check_strikes(0)) == (strikes, [])
        place(rec, DECODE)
    rec.on_lost(DECODE, "pings", blamed=False)
    assert error(rec.check_strikes(0)).code == "request_kills_nodes"


# --- refusals -------------------------------------------------------------------------------------


def test_a_request_is_placed_again_after_a_retryable_failure_without_a_strike() -> None:
    rec = record()
    actions = rec.on_failed(DECODE, JobFailed(RID, 1, BUSY))
    assert actions == [Send(PREFILL, Abort(RID, 1)), Replace("refused", DECODE)]
    assert rec.strikes == 0


def test_after_max_attempts_refusals_the_request_fails_with_the_node_s_error() -> None:
    rec = record(split=False)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        rec.on_failed(DECODE, JobFailed(RID, attempt, BUSY))
        place(rec, DECODE)
    assert rec.on_failed(DECODE, JobFailed(RID, MAX_ATTEMPTS + 1, BUSY)) == [Failed(BUSY)]


def test_refusals_do_not_end_a_request_whose_client_has_tokens() -> None:
    rec = record(split=False)
    rec.on_delta(DECODE, delta(0, 0, 5))
    for attempt in range(1, 2 * MAX_ATTEMPTS):
        assert isinstance(rec.on_failed(DECODE, JobFailed(RID, attempt, BUSY))[-1], Replace)
        place(rec, DECODE)


# --- links that come back -------------------------------------------------------------------------


def test_after_a_link_comes_back_the_node_gets_its_job_again_in_the_same_attempt() -> None:
    rec = record()
    waiting = RunJob(rec.request, await_first=True, uncached=0)
    assert rec.on_resumed(DECODE) == [Send(DECODE, waiting)]
    computing = PrefillJob(rec.request, DECODE, EPOCH, uncached=2)
    assert rec.on_resumed(PREFILL) == [Send(PREFILL, computing)]
    assert rec.on_resumed(OTHER) == []


def test_a_decode_node_that_missed_first_tokens_gets_them_in_its_job() -> None:
    rec = record(2)
    rec.on_prefill_done(PREFILL, done(delta(0, 0, 7), delta(1, 0, 8, finish="stop")))
    ((_, job),) = frames(rec.on_resumed(DECODE), RunJob)
    assert (job.request.attempt, job.request.outputs) == (1, ((7,), (8,)))
    assert (job.await_first, job.finished) == (False, (1,))


def test_a_request_that_waits_or_is_over_sends_no_job_after_a_link_comes_back() -> None:
    rec = record(split=False)
    rec.on_lost(DECODE, "link")
    assert rec.on_resumed(DECODE) == []
    rec.cancel()
    assert rec.on_resumed(DECODE) == []


# --- requests that the router ends ----------------------------------------------------------------


def test_a_disconnect_aborts_both_nodes_without_an_error() -> None:
    rec = record()
    assert rec.cancel() == [Send(PREFILL, Abort(RID, 1)), Send(DECODE, Abort(RID, 1))]
    assert rec.cancel() == []


def test_cancelling_with_an_error_reports_it_to_the_client() -> None:
    rec = record(split=False)
    assert rec.cancel(ERROR) == [Send(DECODE, Abort(RID, 1)), Failed(ERROR)]


def test_a_waiting_request_can_be_cancelled() -> None:
    rec = record()
    rec.on_lost(DECODE, "link")
    assert rec.cancel(ERROR) == [Failed(ERROR)]


# --- figures --------------------------------------------------------------------------------------


def test_only_the_first_statistics_of_an_attempt_are_marked_opening() -> None:
    rec = record(split=False)
    later = RequestStats(prompt_tokens=2, cached_tokens=2)
    for offset, stats in enumerate((STATS, later, later)):
        actions = rec.on_delta(DECODE, delta(0, offset, 5, stats=stats))
        assert actions[1:] == [Measured(stats, 1, opening=offset == 0)]
    assert (rec.stats, rec.cached_tokens) == (STATS, 1)
    rec.on_lost(DECODE, "link")
    place(rec, DECODE)
    actions = rec.on_delta(DECODE, delta(0, 3, 5, attempt=2, stats=later))
    assert actions[1:] == [Measured(later, 2, opening=True)]
    assert (rec.stats, rec.cached_tokens) == (later, 1)


def test_tokens_that_earlier_attempts_computed_do_not_count_as_cached() -> None:
    rec = RequestRecord(record().request, Clock())
    place(rec, DECODE, findable=1)
    rec.on_lost(DECODE, "link")
    place(rec, OTHER, findable=2)
    stats = RequestStats(prompt_tokens=2, cached_tokens=2, computed_tokens=3)
    actions = rec.on_delta(OTHER, delta(0, 0, 5, attempt=2, finish="stop", stats=stats))
    assert Measured(stats, 2, opening=True) in actions
    assert rec.cached_tokens == 1


def test_tokens_that_a_lost_prefill_node_computed_do_not_count_as_cached() -> None:
    rec = RequestRecord(record().request, Clock())
    place(rec, DECODE, PREFILL, findable=1)
    rec.on_lost(PREFILL, "link")
    rec.give_up_prefill("gone")
    stats = RequestStats(prompt_tokens=2, fetched_tokens=2)
    rec.on_delta(DECODE, delta(0, 0, 5, finish="stop", stats=stats))
    assert rec.cached_tokens == 1


def test_cached_tokens_come_from_the_first_attempt_s_statistics() -> None:
    rec = record()
    rec.on_prefill_done(PREFILL, done(delta(0, 0, 7)))
    rec.on_lost(DECODE, "link")
    place(rec, OTHER)
    late = RequestStats(prompt_tokens=2, cached_tokens=2)
    rec.on_delta(OTHER, delta(0, 1, 5, attempt=2, finish="stop", stats=late))
    assert rec.cached_tokens == 1


def test_jobs_request_prompt_logprobs_until_the_client_has_them() -> None:
    rec = record(split=False, prompt_logprobs=1)
    rec.on_lost(DECODE, "link")
    ((_, job),) = frames(place(rec, DECODE), RunJob)
    assert job.request.params.prompt_logprobs == 1
    rec.on_delta(DECODE, delta(0, 0, 5, attempt=2, prompt_logprobs=PROBS))
    assert not rec.asks_prompt_logprobs
    again = delta(0, 1, 6, attempt=2, prompt_logprobs=PROBS)
    assert emitted(rec.on_delta(DECODE, again))[0].prompt_logprobs == ()
    rec.on_lost(DECODE, "link")
    ((_, job),) = frames(place(rec, DECODE), RunJob)
    assert job.request.params.prompt_logprobs is None


# --- the fast path --------------------------------------------------------------------------------

DELTAS = st.builds(
    Delta,
    st.just(RID),
    st.sampled_from([1, 2]),
    st.integers(0, 1),
    st.integers(0, 4),
    ids=st.sampled_from([(), (7,), (8, 9)]),
    text=st.sampled_from(["", "x"]),
    finish=st.sampled_from([None, None, None, "stop"]),
    stats=st.sampled_from([None, None, STATS]),
    prompt_logprobs=st.sampled_from([(), (), PROBS]),
)


@given(st.lists(DELTAS, max_size=30), st.sampled_from([DECODE, DECODE, OTHER]))
def test_append_tokens_takes_exactly_the_deltas_that_on_delta_only_emits(
    deltas: list[Delta], node: NodeId
) -> None:
    fast, slow = record(n=2, split=False), record(n=2, split=False)
    for next_delta in deltas:
        actions = slow.on_delta(node, next_delta)
        if fast.append_tokens(node, next_delta):
            assert actions == [Emit(next_delta)]
        else:
            assert fast.on_delta(node, next_delta) == actions
        assert (fast.outputs, fast.phase) == (slow.outputs, slow.phase)
        assert (fast.open, fast.attempt, fast.strikes) == (slow.open, slow.attempt, slow.strikes)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (delta(0, 1, 5), True),
        (delta(0, 1, 5, 6, text="ab"), True),
        (delta(1, 0, 5), True),
        (delta(0, 1), False),
        (delta(0, 2, 5), False),
        (delta(2, 0, 5), False),
        (delta(0, 1, 5, attempt=2), False),
        (delta(0, 1, 5, finish="stop"), False),
        (delta(0, 1, 5, stats=STATS), False),
        (delta(0, 1, 5, prompt_logprobs=PROBS), False),
    ],
)
def test_append_tokens_takes_only_the_next_tokens_of_an_open_choice(
    given: Delta, added: bool
) -> None:
    rec = record(2, split=False)
    assert not rec.append_tokens(DECODE, delta(0, 0, 4))  # the first delta of an attempt
    rec.on_delta(DECODE, delta(0, 0, 4))
    assert not rec.append_tokens(OTHER, given)
    assert not record(2).append_tokens(DECODE, given)  # waits for FirstTokens
    assert rec.append_tokens(DECODE, given) is added
    assert rec.tokens == 1 + len(given.ids) * added


# --- draining nodes -------------------------------------------------------------------------------


def test_requests_handed_back_by_draining_nodes_do_not_count_as_refusals() -> None:
    rec = record(split=False)
    drained = ErrorRecord("leaving", DRAINED, status=503, retryable=True)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        actions = rec.on_failed(DECODE, JobFailed(RID, attempt, drained))
        assert actions == [Replace("drained", DECODE)]
        place(rec, DECODE)
    actions = rec.on_failed(DECODE, JobFailed(RID, MAX_ATTEMPTS + 1, BUSY))
    assert actions == [Replace("refused", DECODE)]
    assert rec.strikes == 0


def test_a_rolled_out_decode_node_loses_its_request_without_a_strike() -> None:
    rec = record(split=False)
    assert rec.on_rolled_out(OTHER) == []
    assert rec.on_rolled_out(DECODE) == [Send(DECODE, Abort(RID, 1)), Replace("drained", DECODE)]
    assert (rec.phase, rec.strikes) == ("waiting", 0)
    assert rec.on_rolled_out(DECODE) == []


def test_a_leaving_prefill_node_loses_its_job_without_a_strike() -> None:
    rec = record()
    assert rec.on_leaving(DECODE) == []
    assert rec.on_leaving(PREFILL) == [Send(PREFILL, Abort(RID, 1)), Regroup("drained", PREFILL)]
    assert rec.on_leaving(PREFILL) == []
    assert rec.strikes == 0
    assert rec.on_delta(DECODE, delta(0, 0, 5)) == []


# --- what the client has --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [delta(0, 0, 5), delta(0, 0, prompt_logprobs=PROBS)])
def test_a_token_or_the_prompt_s_logprobs_mean_that_the_client_has_something(given: Delta) -> None:
    rec = record(split=False, prompt_logprobs=1)
    assert rec.client_has_nothing
    rec.on_delta(DECODE, given)
    assert not rec.client_has_nothing


def test_a_resumed_request_may_have_a_client_with_events_of_tokens_that_the_record_lacks() -> None:
    request = record().request
    for begun in (False, True):
        resumed = ResumeState([[]], begun=begun)
        assert RequestRecord(request, Clock(0.0), resumed).client_has_nothing != begun


# --- the record's history -------------------------------------------------------------------------


def test_a_wait_lasts_until_a_placement_or_a_new_reason() -> None:
    clock = Clock(0.0)
    rec = RequestRecord(record().request, clock)
    for now, why in ((1.0, "no node"), (2.0, "no node"), (3.0, "its turn")):
        clock.now = now
        rec.note_wait(why)
    assert rec.waits_for == "its turn"
    clock.now = 5.0
    place(rec, DECODE)
    assert [(w.since, w.until, w.why) for w in rec.waits] == [
        (1.0, 3.0, "no node"),
        (3.0, 5.0, "its turn"),
    ]
    assert rec.waits_for == ""


def test_a_cancelled_request_ends_its_wait() -> None:
    clock = Clock(1.0)
    rec = RequestRecord(record().request, clock)
    rec.note_wait("no node")
    clock.now = 4.0
    rec.cancel(ERROR)
    assert (rec.waits[0].until, rec.attempts, rec.end) == (4.0, [], "failed")


@pytest.mark.parametrize("end", ["done", "failed", "left"])
def test_an_attempt_ends_with_its_request(end: str) -> None:
    rec = record(split=False)
    if end == "done":
        rec.on_delta(DECODE, delta(0, 0, 5, finish="stop"))
    else:
        rec.cancel(ERROR if end == "failed" else None)
    (attempt,) = rec.attempts
    assert (rec.end, attempt.ended, attempt.blamed) == (end, end, None)


def test_an_attempt_records_why_it_was_replaced_and_which_node_caused_it() -> None:
    rec = record(split=False)
    rec.on_lost(DECODE, "pings")
    assert rec.waits_for == "the attempt on decode-0 ended (pings)"
    assert (rec.current, rec.replaced_for) == (None, None)
    place(rec, OTHER)
    place(rec, DECODE)  # moved: its node drains
    first, second, third = rec.attempts
    assert (first.ended, first.blamed) == ("pings", DECODE)
    assert (second.ended, second.blamed) == ("drained", OTHER)
    assert (third, rec.replaced_for) == (rec.current, "drained")


def test_after_no_first_the_same_attempt_continues_on_the_decode_node() -> None:
    clock = Clock(0.0)
    rec = RequestRecord(record().request, clock)
    place(rec, DECODE, PREFILL)
    clock.now = 1.0
    rec.on_lost(PREFILL, "link")
    assert (rec.attempts[0].ended, rec.prefill) == ("link", None)
    clock.now = 2.0
    rec.give_up_prefill("gone")
    clock.now = 3.0
    (emit,) = rec.on_delta(DECODE, delta(0, 0, 5))
    assert emit == Emit(delta(0, 0, 5))  # no times: the prediction was for the pair
    clock.now = 4.0
    rec.on_delta(DECODE, delta(0, 1, 5, finish="stop"))
    (attempt,) = rec.attempts
    assert (attempt.prefill_given_up_at, attempt.blamed, attempt.decoding_at) == (2.0, PREFILL, 3.0)
    assert (attempt.ended, attempt.ended_at, rec.end) == ("done", 4.0, "done")


def test_a_pause_lasts_from_the_last_token_to_the_next_attempt_s_first() -> None:
    clock = Clock(0.0)
    rec = RequestRecord(record().request, clock)
    place(rec, DECODE)
    rec.on_delta(DECODE, delta(0, 0, 5))
    clock.now = 1.0
    assert rec.append_tokens(DECODE, delta(0, 1, 5))
    rec.on_lost(DECODE, "link")
    place(rec, OTHER)
    clock.now = 3.0
    (emit,) = rec.on_delta(OTHER, delta(0, 2, 5, attempt=2))
    assert isinstance(emit, Emit)
    assert emit.times is not None
    assert emit.times.pause_s == 2.0


def test_a_hand_off_lasts_from_first_tokens_to_the_decode_node_s_first_token() -> None:
    clock = Clock(0.0)
    rec = RequestRecord(record().request, clock)
    place(rec, DECODE, PREFILL)
    clock.now = 1.0
    actions = rec.on_prefill_done(PREFILL, done(delta(0, 0, 7)))
    assert Emit(delta(0, 0, 7)) in actions
    clock.now = 1.5
    (emit,) = rec.on_delta(DECODE, delta(0, 1, 8))
    assert isinstance(emit, Emit)
    assert emit.times is not None
    assert (emit.times.pause_s, emit.times.handoff_s) == (None, 0.5)


def test_an_attempt_keeps_the_figures_of_the_prefill_and_the_decode_node() -> None:
    rec, later = record(), RequestStats(computed_tokens=1)
    rec.on_prefill_done(PREFILL, done(delta(0, 0, 7)))
    rec.on_delta(DECODE, delta(0, 1, 8, stats=later))
    assert rec.attempts[0].measured == [(PREFILL, STATS), (DECODE, later)]
    rec.on_lost(DECODE, "link")
    place(rec, OTHER)
    rec.on_delta(OTHER, delta(0, 2, 9, attempt=2, stats=later))
    assert rec.attempts[1].measured == [(OTHER, later)]


def test_a_record_keeps_the_first_and_a_bounded_number_of_last_attempts_and_waits() -> None:
    rec = RequestRecord(record().request, Clock())
    drained = ErrorRecord("leaving", DRAINED, status=503, retryable=True)
    for number in range(1, 101):
        rec.note_wait(f"wait {number}")
        place(rec, DECODE)
        rec.on_failed(DECODE, JobFailed(RID, number, drained))
    assert (len(rec.attempts), rec.left_out) == (KEPT_ATTEMPTS, 100 - KEPT_ATTEMPTS)
    assert (rec.attempts[0].number, rec.attempts[-1].number) == (1, 100)
    assert (len(rec.waits), rec.waits[0].why) == (KEPT_WAITS, "wait 1")
    assert rec.waits[-1].why == "the attempt on decode-0 ended (drained)"


@pytest.mark.parametrize(
    ("end", "after_loss"),
    [
        (lambda rec: rec.on_lost(DECODE, "link"), True),
        (lambda rec: rec.on_failed(DECODE, JobFailed(RID, 1, BUSY)), False),
        (lambda rec: [], True),  # it moves away from a node that drains
    ],
    ids=["lost", "refused", "drained"],
)
def test_the_next_job_says_whether_a_node_was_lost_before(end: Any, after_loss: bool) -> None:
    rec = record(split=False)
    end(rec)
    [(_, job)] = frames(place(rec, OTHER), RunJob)
    assert job.request.after_loss == after_loss


def test_the_job_of_a_resumed_request_says_so() -> None:
    resumed = ResumeState([[]])
    rec = RequestRecord(record().request, Clock(), resumed)
    [(_, job)] = frames(place(rec, OTHER), RunJob)
    assert job.request.after_loss
