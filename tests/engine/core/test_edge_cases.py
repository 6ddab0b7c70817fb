"""EngineCore: requests that change logits, ask for prompt logprobs or are submitted complete."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Complete, Sample
from baton_engine.sampling.logits_processors import change_logits
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from tests.support.engines.engine_core import (
    EOS,
    Run,
    ScriptedRunner,
    drive,
    make_request,
    run_all,
    scripted,
    step_once,
)

PENALTY: dict[str, Any] = {"frequency_penalty": 0.5}


def samples_of(runner: ScriptedRunner) -> list[Sample]:
    return [sample for step in runner.steps for row in step for sample in row.samples]


def counts(runner: ScriptedRunner, choice: int = 0) -> list[dict[int, int]]:
    """The counts of a choice's output ids that each of its samples received."""
    seen = [each.penalty_counts for each in samples_of(runner) if each.choice == choice]
    return [dict(each.outputs) for each in seen if each is not None]


# --- lists of ids -------------------------------------------------------------------------------


class CountingTuple(tuple[Any, ...]):
    """A tuple that counts its iterations."""

    iterations = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        return super().__iter__()


def test_a_requests_lists_of_ids_are_iterated_at_submit_and_not_in_each_step() -> None:
    lists: dict[str, Any] = {
        "logit_bias": CountingTuple([(5, 1.0), (6, 2.0)]),
        "allowed_token_ids": CountingTuple([5, 6, 7, 8]),
        "bad_words": CountingTuple([(6,), (7, 8)]),
    }
    engine, runner = scripted(lambda _: 7)
    engine.submit(make_request("a", 4, max_tokens=5, **lists))
    before = {name: each.iterations for name, each in lists.items()}
    drive(engine)
    for sample in samples_of(runner):
        [row] = change_logits(torch.zeros(1, 100), [sample]).tolist()
        finite = {id: logit for id, logit in enumerate(row) if logit > -math.inf}
        assert finite == ({5: 1.0, 7: 0.0, 8: 0.0} if sample.position == 4 else {5: 1.0, 7: 0.0})
    assert len(samples_of(runner)) == 5
    assert {name: each.iterations for name, each in lists.items()} == before


# --- penalties ----------------------------------------------------------------------------------


def test_penalties_receive_the_prompts_distinct_ids_and_the_output_counts() -> None:
    engine, runner = scripted(lambda sample: [5, 6, 5, 5][sample.position - 4])
    run_all(engine, [make_request("a", [3, 1, 3, 5], **PENALTY)])
    assert counts(runner) == [{}, {5: 1}, {5: 1, 6: 1}, {5: 2, 6: 1}]
    assert {each.penalty_counts.prompt for each in samples_of(runner) if each.penalty_counts} == {
        (1, 3, 5)
    }


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1}, {"presence_penalty": -1}, {"repetition_penalty": 1.5}]
)
def test_each_penalty_receives_the_output_counts(penalty: dict[str, Any]) -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, max_tokens=2, **penalty)])
    assert counts(runner) == [{}, {4: 1}]


def test_without_a_penalty_no_counts_are_kept() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, logit_bias=((1, 2.0),))])
    assert all(each.penalty_counts is None for each in samples_of(runner))


def test_each_choice_has_its_own_output_counts() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, n=2, max_tokens=3, **PENALTY)])
    assert counts(runner, 0) == [{}, {4: 1}, {4: 1, 5: 1}]
    assert counts(runner, 1) == [{}, {14: 1}, {14: 1, 15: 1}]


def test_the_counts_include_outputs_submitted_with_the_request() -> None:
    engine, runner = scripted()
    request = make_request("a", 4, ((8, 8, 9), ()), n=2, max_tokens=5, **PENALTY)
    run_all(engine, [request])
    assert counts(runner, 0)[0] == {8: 2, 9: 1}
    assert counts(runner, 1)[:2] == [{}, {14: 1}]


def test_output_counts_survive_preemption() -> None:
    requests = [make_request(name, 8, max_tokens=9, **PENALTY) for name in "ab"]
    engine, runner = scripted(num_blocks=5)
    run_all(engine, requests)
    assert engine.load().preemptions_total > 0
    for sample in samples_of(runner):
        outputs = range(8, sample.position)
        assert sample.penalty_counts is not None
        assert dict(sample.penalty_counts.outputs) == dict.fromkeys(outputs, 1)


# --- banned ids ---------------------------------------------------------------------------------


def test_the_last_id_of_a_bad_word_is_banned_only_after_its_other_ids() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, max_tokens=4, bad_words=((5, 90), (91,)))])
    assert [set(each.banned) for each in samples_of(runner)] == [{91}, {91}, {90, 91}, {91}]


def test_bad_words_are_matched_in_each_choice_separately() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, n=2, max_tokens=2, bad_words=((14, 90),))])
    last = {each.choice: each.banned for each in samples_of(runner)}
    assert last == {0: (), 1: (90,)}


@pytest.mark.parametrize("bad", [-1, 100])
@pytest.mark.parametrize(
    "field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"]
)
def test_the_error_for_an_id_outside_the_vocabulary_names_field_value_and_range(
    field: str, bad: int
) -> None:
    engine, _ = scripted()
    values: dict[str, Any] = {
        "stop_token_ids": (3, bad),
        "logit_bias": ((3, 1.0), (bad, 1.0)),
        "allowed_token_ids": (3, bad),
        "bad_words": ((3,), (4, bad)),
    }
    message = rf"{field} holds token id {bad}, which is not in the vocabulary \(0\.\.99\)"
    with pytest.raises(InvalidRequest, match=message) as error:
        engine.submit(make_request("a", 4, **{field: values[field]}))
    assert error.value.param == field
    assert not engine.has_work()


# --- prompt logprobs ----------------------------------------------------------------------------


def prompt_entries(run: Run, request: str) -> list[tuple[int, int]]:
    """(id, position) of each prompt logprob. A scripted logprob is minus the position."""
    entries = run.prompt_logprobs(request)
    return [(each.sampled.id, -int(each.sampled.logprob)) for each in entries]


def expected_entries(request: Request) -> list[tuple[int, int]]:
    return [(id, position) for position, id in enumerate(request.prompt_ids) if position]


def requested_targets(runner: ScriptedRunner) -> list[tuple[int, ...] | None]:
    rows = [row for step in runner.steps for row in step]
    return [row.prompt.targets if row.prompt else None for row in rows]


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_prompt_logprobs_cover_all_tokens_but_the_first_in_pieces_of_any_size(budget: int) -> None:
    engine, runner = scripted(max_batched_tokens=budget)
    request = make_request("a", 10, max_tokens=2, prompt_logprobs=3)
    run = run_all(engine, [request])
    assert prompt_entries(run, "a") == expected_entries(request)
    prompts = [row.prompt for step in runner.steps for row in step if row.prompt]
    assert {each.top for each in prompts} == {3}


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 1, prompt_logprobs=0)])
    assert prompt_entries(run, "a") == []
    assert set(requested_targets(runner)) == {None}


def test_prompt_logprobs_are_computed_only_on_request() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10)])
    assert prompt_entries(run, "a") == []
    assert set(requested_targets(runner)) == {None}


def test_prompt_logprobs_bypass_the_cache_but_their_kv_is_cached_for_others() -> None:
    engine, _ = scripted()
    prompt = make_request("a", 13).prompt_ids
    run_all(engine, [make_request("first", prompt)])
    with_logprobs = make_request("a", prompt, prompt_logprobs=0)
    run = run_all(engine, [with_logprobs])
    assert run.use("a") == (0, 0, 13)
    assert prompt_entries(run, "a") == expected_entries(with_logprobs)
    assert run_all(engine, [make_request("b", prompt)]).use("b") == (12, 0, 1)
    fresh, _ = scripted()
    run_all(fresh, [with_logprobs])
    assert run_all(fresh, [make_request("b", prompt)]).use("b") == (12, 0, 1)


def test_with_prompt_logprobs_reserved_blocks_are_new_and_landed_tokens_computed() -> None:
    engine, _ = scripted()
    request = make_request("a", 13, prompt_logprobs=0)
    run_all(engine, [make_request("first", request.prompt_ids)])
    reservation = engine.reserve(request)
    assert reservation is not None
    assert reservation.cached == 0
    engine.submit(request, reservation=reservation, landed=[(0, 3)])
    run = drive(engine)
    assert run.use("a") == (0, 0, 13)
    assert prompt_entries(run, "a") == expected_entries(request)
    assert run.ids("a") == [13, 14, 15, 16]


def test_with_prompt_logprobs_choices_share_the_leaders_blocks() -> None:
    engine, runner = scripted()
    request = make_request("a", 10, n=3, max_tokens=2, prompt_logprobs=0)
    run = run_all(engine, [request])
    assert prompt_entries(run, "a") == expected_entries(request)
    assert runner.work() == [[(0, 10)], [(10, 1), (10, 1), (10, 1)]]
    assert requested_targets(runner)[1:] == [None] * 3


def test_a_prefill_job_returns_prompt_logprobs() -> None:
    engine, _ = scripted()
    request = make_request("a", 10, prompt_logprobs=0)
    engine.submit(request, prefill_only=True, track=True)
    assert prompt_entries(drive(engine), "a") == expected_entries(request)


def test_a_resumed_request_returns_logprobs_of_its_prompt_only() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 10, ((10, 11, 12),), max_tokens=5, prompt_logprobs=0)
    run = run_all(engine, [request])
    assert prompt_entries(run, "a") == expected_entries(request)
    assert run.ids("a") == [13, 14]


def test_a_preempted_prompt_returns_complete_prompt_logprobs_once() -> None:
    engine, runner = scripted(num_blocks=8, max_batched_tokens=5, max_num_seqs=2)
    engine.submit(make_request("old", 4, max_tokens=20))
    run = Run()
    step_once(engine, run)
    request = make_request("a", 23, max_tokens=3, prompt_logprobs=0)
    engine.submit(request)
    drive(engine, into=run)
    starts = [row.start for step in runner.steps for row in step if row.prompt]
    assert engine.load().preemptions_total > 0
    assert starts.count(0) > 1, "it was preempted within its prompt"
    assert prompt_entries(run, "a") == expected_entries(request)
    assert run.ids("a") == [23, 24, 25]


def test_if_the_leader_is_finished_early_the_next_returns_the_prompt_logprobs() -> None:
    engine, _ = scripted(max_batched_tokens=6)
    run = Run()
    request = make_request("a", 10, n=2, max_tokens=2, prompt_logprobs=0)
    engine.submit(request)
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    drive(engine, into=run)
    assert prompt_entries(run, "a") == expected_entries(request)
    assert run.all_ids() == {("a", 1): [20, 21]}


# --- choices submitted complete -----------------------------------------------------------------


def run_request(engine: EngineCore, request: Request, **values: Any) -> tuple[Run, list[Complete]]:
    engine.submit(request, **values)
    run = drive(engine)
    return run, list(run.complete)


@pytest.mark.parametrize(
    ("outputs", "params", "finish", "stop_id"),
    [
        ((4, EOS), {}, "stop", EOS),
        ((4, 7), {"stop_token_ids": (7,)}, "stop", 7),
        ((4, 5), {"max_tokens": 2}, "length", None),
        ((4, 7), {"max_tokens": 2, "stop_token_ids": (7,)}, "length", None),
    ],
)
def test_a_request_submitted_complete_is_reported_with_its_finish_reason(
    outputs: tuple[int, ...], params: dict[str, Any], finish: Any, stop_id: int | None
) -> None:
    engine, runner = scripted()
    run, complete = run_request(
        engine, make_request("a", 4, (outputs,), **{"max_tokens": 9} | params)
    )
    assert complete == [Complete(RequestId("a"), 1, 0, len(outputs), finish, stop_id)]
    assert (run.finished, run.tokens, runner.steps) == (["a"], [], [])


def test_a_choice_submitted_complete_is_reported_while_the_other_runs() -> None:
    engine, _ = scripted()
    request = make_request("a", 4, ((4, EOS), (14,)), n=2, max_tokens=3)
    run, complete = run_request(engine, request)
    assert complete == [Complete(RequestId("a"), 1, 0, 2, "stop", EOS)]
    assert run.steps[0].complete == complete
    assert (run.all_ids(), run.finished) == ({("a", 1): [15, 16]}, ["a"])


def test_a_complete_choice_submitted_as_finished_is_not_reported() -> None:
    engine, _ = scripted()
    request = make_request("a", 4, ((4, EOS), (14,)), n=2, max_tokens=3)
    assert run_request(engine, request, finished=(0,))[1] == []


def test_a_new_attempt_replaces_the_report_of_the_older_attempt() -> None:
    engine, _ = scripted()
    engine.submit(make_request("a", 4, ((EOS,),), max_tokens=3))
    run, complete = run_request(engine, make_request("a", 4, ((4,),), max_tokens=3))
    assert (complete, run.finished, run.ids("a")) == ([], ["a"], [5, 6])
