"""Requests of several choices: one prompt computed, one row sampled for all, blocks shared."""

from __future__ import annotations

import pytest

from baton_engine.interface import Sample
from baton_protocol.ids import RequestId
from tests.support.engines.engine_core import (
    EOS,
    Run,
    drive,
    make_request,
    run_all,
    scripted,
    step_once,
)


def test_the_first_tokens_of_all_choices_come_from_one_row() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, n=3, max_tokens=3)])
    first = runner.steps[0]
    assert len(first) == 1
    assert [(sample.choice, sample.position) for sample in first[0].samples] == [
        (0, 10),
        (1, 10),
        (2, 10),
    ]
    assert run.all_ids() == {
        ("a", 0): [10, 11, 12],
        ("a", 1): [20, 21, 22],
        ("a", 2): [30, 31, 32],
    }
    assert run.finished == ["a"]


def test_other_choices_share_full_blocks_and_compute_the_tail_again() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, n=3, max_tokens=2)])
    assert runner.work()[1] == [(10, 1), (8, 3), (8, 3)]
    leader, one, two = (row.blocks for row in runner.steps[1])
    assert leader[:2] == one[:2] == two[:2]
    assert len({leader[2], one[2], two[2]}) == 3
    assert run.use("a") == (0, 0, 10)
    assert run.steps[0].num_prompt_tokens == 10
    assert run.steps[1].num_prompt_tokens == 4


def test_the_prompt_is_accounted_once_for_all_choices() -> None:
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", 10, n=3)])
    assert len(run.prompts) == 1
    assert engine.load().prompt_tokens_total == 10


def test_a_choice_that_ends_with_its_first_token_leaves_the_others_running() -> None:
    def script(sample: Sample) -> int:
        return EOS if sample.choice == 0 else sample.position

    engine, _ = scripted(script)
    run = run_all(engine, [make_request("a", 9, n=2, max_tokens=3)])
    assert run.all_ids() == {("a", 0): [EOS], ("a", 1): [9, 10, 11]}
    assert run.finished == ["a"]
    assert run.finished not in [list(step.finished) for step in run.steps[:-1]]


def test_choices_run_one_after_another_where_only_one_may_run() -> None:
    wide = run_all(scripted()[0], [make_request("a", 9, n=3)])
    engine, _ = scripted(max_num_seqs=1, num_blocks=4)
    narrow = run_all(engine, [make_request("a", 9, n=3)])
    assert narrow.all_ids() == wide.all_ids()


def test_a_prefill_job_yields_one_token_per_choice_and_ends() -> None:
    engine, runner = scripted()
    engine.submit(make_request("a", 9, n=2, max_tokens=5), prefill_only=True)
    run = drive(engine)
    assert run.all_ids() == {("a", 0): [9], ("a", 1): [19]}
    assert {token.finish for token in run.tokens} == {None}
    assert (run.finished, len(runner.steps)) == (["a"], 1)


def test_a_prefill_job_says_when_the_first_token_really_is_the_last() -> None:
    engine, _ = scripted()
    engine.submit(make_request("a", 9, max_tokens=1), prefill_only=True)
    assert drive(engine).last("a").finish == "length"


def test_choices_that_have_their_first_token_go_on_from_there() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, ((40,), (41,)), n=2, max_tokens=3)])
    assert [(token.choice, token.offset, token.id) for token in run.tokens] == [
        (0, 1, 11),
        (0, 2, 12),
        (1, 1, 21),
        (1, 2, 22),
    ]
    assert [len(row.samples) for step in runner.steps for row in step] == [1, 1, 1, 1]


def test_choices_that_ended_elsewhere_are_not_run() -> None:
    engine, _ = scripted()
    request = make_request("a", 10, ((40,), (41,), (42,)), n=3, max_tokens=2)
    engine.submit(request, finished=(0, 2))
    run = drive(engine)
    assert run.finished == ["a"]
    assert [(token.choice, token.offset, token.id) for token in run.tokens] == [(1, 1, 21)]


def test_choices_with_and_without_tokens_mix() -> None:
    whole = run_all(scripted()[0], [make_request("a", 10, n=4, max_tokens=4)]).all_ids()
    outputs = ((10, 11), (), (30,), ())
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, outputs, n=4, max_tokens=4)])
    assert [sample.choice for sample in runner.steps[0][0].samples] == [1, 3]
    for choice, known in enumerate(outputs):
        assert [*known, *run.ids("a", choice)] == whole["a", choice]


def test_a_leader_that_is_finished_early_hands_the_prompt_to_the_next_choice() -> None:
    engine, runner = scripted(max_batched_tokens=6)
    run = Run()
    engine.submit(make_request("a", 10, n=3, max_tokens=2))
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    engine.finish_choice(RequestId("a"), 2)
    engine.check_integrity()
    drive(engine, into=run)
    assert run.all_ids() == {("a", 1): [20, 21]}
    assert run.finished == ["a"]
    assert runner.work()[1] == [(4, 6)]  # the first block was computed and is found
    assert run.use("a") == (0, 0, 10) or run.use("a") == (4, 0, 6)


def test_finishing_every_choice_before_it_runs_ends_the_request() -> None:
    engine, runner = scripted()
    engine.submit(make_request("a", 10, n=2))
    for choice in range(2):
        engine.finish_choice(RequestId("a"), choice)
    run = drive(engine)
    assert (run.finished, runner.steps) == (["a"], [])


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_choices_in_a_tiny_pool_have_the_ids_of_a_large_one(blocks: int) -> None:
    requests = [make_request(name, 9, n=3, max_tokens=5) for name in "ab"]
    wide = run_all(scripted()[0], requests).all_ids()
    engine, _ = scripted(num_blocks=blocks)
    assert run_all(engine, requests).all_ids() == wide
    assert engine.load().free_blocks == blocks


def test_a_new_attempt_is_not_ended_by_the_early_end_of_the_one_before() -> None:
    engine, _ = scripted()
    run = Run()
    engine.submit(make_request("a", 8, max_tokens=9))
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    engine.submit(make_request("a", 8, max_tokens=3))
    again = Run()
    assert "a" not in step_once(engine, again).finished
    drive(engine, into=again)
    assert (again.finished, again.ids("a")) == (["a"], [8, 9, 10])
