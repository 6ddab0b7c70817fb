"""What EngineCore keeps and asks for requests that change logits, or ask about their prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Complete, Sample
from baton_engine.sampling.logits_processors import changed_logits
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
    """What the outputs of a choice were said to be, sample by sample."""
    found = [each.seen for each in samples_of(runner) if each.choice == choice]
    return [dict(each.outputs) for each in found if each is not None]


# --- what a request lists -----------------------------------------------------------------------


class Counted(tuple[Any, ...]):
    """Counts how often it is walked."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def test_what_a_request_lists_is_walked_when_it_comes_and_not_in_each_step() -> None:
    lists: dict[str, Any] = {
        "logit_bias": Counted([(5, 1.0), (6, 2.0)]),
        "allowed_token_ids": Counted([5, 6, 7, 8]),
        "bad_words": Counted([(6,), (7, 8)]),
    }
    engine, runner = scripted(lambda _: 7)
    engine.submit(make_request("a", 4, max_tokens=5, **lists))
    before = {name: each.walks for name, each in lists.items()}
    drive(engine)
    for sample in samples_of(runner):
        [row] = changed_logits(torch.zeros(1, 100), [sample]).tolist()
        said = {id: logit for id, logit in enumerate(row) if logit > -math.inf}
        assert said == ({5: 1.0, 7: 0.0, 8: 0.0} if sample.position == 4 else {5: 1.0, 7: 0.0})
    assert len(samples_of(runner)) == 5
    assert {name: each.walks for name, each in lists.items()} == before


# --- what penalties look at ---------------------------------------------------------------------


def test_penalties_see_the_prompts_distinct_ids_and_how_often_each_was_said() -> None:
    engine, runner = scripted(lambda sample: [5, 6, 5, 5][sample.position - 4])
    run_all(engine, [make_request("a", [3, 1, 3, 5], **PENALTY)])
    assert counts(runner) == [{}, {5: 1}, {5: 1, 6: 1}, {5: 2, 6: 1}]
    assert {each.seen.prompt for each in samples_of(runner) if each.seen} == {(1, 3, 5)}


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1}, {"presence_penalty": -1}, {"repetition_penalty": 1.5}]
)
def test_each_penalty_asks_for_what_was_said(penalty: dict[str, Any]) -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, max_tokens=2, **penalty)])
    assert counts(runner) == [{}, {4: 1}]


def test_without_a_penalty_nothing_is_kept_up() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, logit_bias=((1, 2.0),))])
    assert all(each.seen is None for each in samples_of(runner))


def test_each_choice_has_its_own_outputs() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, n=2, max_tokens=3, **PENALTY)])
    assert counts(runner, 0) == [{}, {4: 1}, {4: 1, 5: 1}]
    assert counts(runner, 1) == [{}, {14: 1}, {14: 1, 15: 1}]


def test_outputs_that_a_request_brings_are_seen() -> None:
    engine, runner = scripted()
    request = make_request("a", 4, ((8, 8, 9), ()), n=2, max_tokens=5, **PENALTY)
    run_all(engine, [request])
    assert counts(runner, 0)[0] == {8: 2, 9: 1}
    assert counts(runner, 1)[:2] == [{}, {14: 1}]


def test_what_was_said_survives_preemption() -> None:
    requests = [make_request(name, 8, max_tokens=9, **PENALTY) for name in "ab"]
    engine, runner = scripted(num_blocks=5)
    run_all(engine, requests)
    assert engine.load().preemptions_total > 0
    for sample in samples_of(runner):
        said = range(8, sample.position)
        assert sample.seen is not None
        assert dict(sample.seen.outputs) == dict.fromkeys(said, 1)


# --- bans ---------------------------------------------------------------------------------------


def test_the_end_of_a_bad_word_is_banned_after_its_beginning_only() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, max_tokens=4, bad_words=((5, 90), (91,)))])
    assert [set(each.banned) for each in samples_of(runner)] == [{91}, {91}, {90, 91}, {91}]


def test_a_bad_word_begins_anew_in_each_choice() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 4, n=2, max_tokens=2, bad_words=((14, 90),))])
    last = {each.choice: each.banned for each in samples_of(runner)}
    assert last == {0: (), 1: (90,)}


@pytest.mark.parametrize("bad", [-1, 100])
@pytest.mark.parametrize(
    "field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"]
)
def test_ids_outside_the_vocabulary_are_refused_by_field_value_and_range(
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
    with pytest.raises(InvalidRequest, match=message) as raised:
        engine.submit(make_request("a", 4, **{field: values[field]}))
    assert raised.value.param == field
    assert not engine.has_work()


# --- how likely the prompt is -------------------------------------------------------------------


def told(run: Run, request: str) -> list[tuple[int, int]]:
    """(id, position) of each entry; the scripted runner gives the position as a log-probability."""
    entries = run.prompt_logprobs(request)
    return [(each.sampled.id, -int(each.sampled.logprob)) for each in entries]


def expected(request: Request) -> list[tuple[int, int]]:
    return [(id, position) for position, id in enumerate(request.prompt_ids) if position]


def asks(runner: ScriptedRunner) -> list[tuple[int, ...] | None]:
    rows = [row for step in runner.steps for row in step]
    return [row.prompt.targets if row.prompt else None for row in rows]


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_the_prompt_is_told_from_its_second_token_on_in_pieces_of_any_size(budget: int) -> None:
    engine, runner = scripted(max_batched_tokens=budget)
    request = make_request("a", 10, max_tokens=2, prompt_logprobs=3)
    run = run_all(engine, [request])
    assert told(run, "a") == expected(request)
    prompts = [row.prompt for step in runner.steps for row in step if row.prompt]
    assert {each.top for each in prompts} == {3}


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 1, prompt_logprobs=0)])
    assert told(run, "a") == []
    assert set(asks(runner)) == {None}


def test_requests_that_do_not_ask_are_not_asked_for() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10)])
    assert told(run, "a") == []
    assert set(asks(runner)) == {None}


def test_such_a_request_reads_no_cache_and_others_find_what_it_computed() -> None:
    engine, _ = scripted()
    prompt = make_request("a", 13).prompt_ids
    run_all(engine, [make_request("first", prompt)])
    asking = make_request("a", prompt, prompt_logprobs=0)
    run = run_all(engine, [asking])
    assert run.use("a") == (0, 0, 13)
    assert told(run, "a") == expected(asking)
    assert run_all(engine, [make_request("b", prompt)]).use("b") == (12, 0, 1)
    fresh, _ = scripted()
    run_all(fresh, [asking])
    assert run_all(fresh, [make_request("b", prompt)]).use("b") == (12, 0, 1)


def test_its_reservation_shares_nothing_and_what_landed_there_is_computed_again() -> None:
    engine, _ = scripted()
    request = make_request("a", 13, prompt_logprobs=0)
    run_all(engine, [make_request("first", request.prompt_ids)])
    reservation = engine.reserve(request)
    assert reservation is not None
    assert reservation.cached == 0
    engine.submit(request, reservation=reservation, landed=[(0, 3)])
    run = drive(engine)
    assert run.use("a") == (0, 0, 13)
    assert told(run, "a") == expected(request)
    assert run.ids("a") == [13, 14, 15, 16]


def test_its_choices_share_the_prompt_that_the_first_computed() -> None:
    engine, runner = scripted()
    request = make_request("a", 10, n=3, max_tokens=2, prompt_logprobs=0)
    run = run_all(engine, [request])
    assert told(run, "a") == expected(request)
    assert runner.work() == [[(0, 10)], [(10, 1), (8, 3), (8, 3)]]
    assert asks(runner)[1:] == [None] * 3


def test_a_prefill_job_tells_too() -> None:
    engine, _ = scripted()
    request = make_request("a", 10, prompt_logprobs=0)
    engine.submit(request, prefill_only=True, track=True)
    assert told(drive(engine), "a") == expected(request)


def test_a_resumed_request_tells_of_its_prompt_alone() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 10, ((10, 11, 12),), max_tokens=5, prompt_logprobs=0)
    run = run_all(engine, [request])
    assert told(run, "a") == expected(request)
    assert run.ids("a") == [13, 14]


def test_a_prompt_that_was_preempted_is_told_once_and_whole() -> None:
    engine, runner = scripted(num_blocks=8, max_batched_tokens=5, max_num_seqs=2)
    engine.submit(make_request("old", 4, max_tokens=20))
    run = Run()
    step_once(engine, run)
    request = make_request("a", 23, max_tokens=3, prompt_logprobs=0)
    engine.submit(request)
    drive(engine, into=run)
    starts = [ask.start for step in runner.steps for ask in step if ask.prompt]
    assert engine.load().preemptions_total > 0
    assert starts.count(0) > 1, "it was preempted within its prompt"
    assert told(run, "a") == expected(request)
    assert run.ids("a") == [23, 24, 25]


def test_a_leader_that_ends_within_the_prompt_leaves_it_to_the_next_to_tell() -> None:
    engine, _ = scripted(max_batched_tokens=6)
    run = Run()
    request = make_request("a", 10, n=2, max_tokens=2, prompt_logprobs=0)
    engine.submit(request)
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    drive(engine, into=run)
    assert told(run, "a") == expected(request)
    assert run.all_ids() == {("a", 1): [20, 21]}


# --- choices that came complete -----------------------------------------------------------------


def completes(engine: EngineCore, request: Request, **values: Any) -> tuple[Run, list[Complete]]:
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
def test_a_request_that_comes_complete_is_told_with_how_it_ended(
    outputs: tuple[int, ...], params: dict[str, Any], finish: Any, stop_id: int | None
) -> None:
    engine, runner = scripted()
    run, found = completes(engine, make_request("a", 4, (outputs,), **{"max_tokens": 9} | params))
    assert found == [Complete(RequestId("a"), 0, finish, stop_id)]
    assert (run.finished, run.tokens, runner.steps) == (["a"], [], [])


def test_a_choice_that_comes_complete_is_told_while_the_other_goes_on() -> None:
    engine, _ = scripted()
    request = make_request("a", 4, ((4, EOS), (14,)), n=2, max_tokens=3)
    run, found = completes(engine, request)
    assert found == [Complete(RequestId("a"), 0, "stop", EOS)]
    assert run.steps[0].complete == tuple(found)
    assert (run.all_ids(), run.finished) == ({("a", 1): [15, 16]}, ["a"])


def test_a_choice_that_is_known_to_have_ended_is_not_told() -> None:
    engine, _ = scripted()
    request = make_request("a", 4, ((4, EOS), (14,)), n=2, max_tokens=3)
    assert completes(engine, request, finished=(0,))[1] == []


def test_a_newer_attempt_takes_the_place_of_what_an_older_one_would_have_told() -> None:
    engine, _ = scripted()
    engine.submit(make_request("a", 4, ((EOS,),), max_tokens=3))
    run, found = completes(engine, make_request("a", 4, ((4,),), max_tokens=3))
    assert (found, run.finished, run.ids("a")) == ([], ["a"], [5, 6])
