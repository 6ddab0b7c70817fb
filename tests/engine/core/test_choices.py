"""Requests with several choices: they share the prompt's computation, its sampled row and its full
blocks, and copy its last block."""

from __future__ import annotations

from unittest.mock import patch

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


def test_choices_share_full_blocks_and_copy_the_last_one() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, n=3, max_tokens=2)])
    assert runner.work()[1] == [(10, 1), (10, 1), (10, 1)]
    leader, one, two = (row.blocks for row in runner.steps[1])
    assert leader[:2] == one[:2] == two[:2]
    assert len({leader[2], one[2], two[2]}) == 3
    assert runner.memory.copies == [(leader[2], one[2]), (leader[2], two[2])]
    assert run.use("a") == (0, 0, 10)
    assert run.steps[0].num_prompt_tokens == 10
    assert run.steps[1].num_prompt_tokens == 0


def test_without_a_partly_filled_block_nothing_is_copied() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 8, n=3, max_tokens=2)])
    assert runner.work()[1] == [(8, 1), (8, 1), (8, 1)]
    assert runner.memory.copies == []


def test_if_the_leader_has_ended_the_others_compute_the_tail() -> None:
    engine, runner = scripted(lambda sample: EOS if sample.choice == 0 else sample.position)
    run_all(engine, [make_request("a", 10, n=2, max_tokens=2)])
    assert runner.work()[1] == [(8, 3)]
    assert runner.memory.copies == []


def test_if_a_copy_fails_the_choices_compute_the_tail() -> None:
    request = make_request("a", 10, n=3, max_tokens=3)
    expected = run_all(scripted()[0], [request]).all_ids()
    engine, runner = scripted()
    run = Run()
    engine.submit(request)
    step_once(engine, run)
    with (
        patch.object(runner.memory, "copy", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        engine.step()
    drive(engine, into=run)
    assert run.all_ids() == expected
    assert runner.work()[1] == [(10, 1), (8, 3), (8, 3)]
    engine.check_integrity()


def test_the_prompt_is_counted_once_for_all_choices() -> None:
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", 10, n=3)])
    assert len(run.prompts) == 1
    assert engine.load().prompt_tokens_total == 10


def test_a_choice_that_finishes_with_its_first_token_leaves_the_others_running() -> None:
    def script(sample: Sample) -> int:
        return EOS if sample.choice == 0 else sample.position

    engine, _ = scripted(script)
    run = run_all(engine, [make_request("a", 9, n=2, max_tokens=3)])
    assert run.all_ids() == {("a", 0): [EOS], ("a", 1): [9, 10, 11]}
    assert run.finished == ["a"]
    assert run.finished not in [list(step.finished) for step in run.steps[:-1]]


def test_choices_run_one_after_another_if_max_num_seqs_is_1() -> None:
    expected = run_all(scripted()[0], [make_request("a", 9, n=3)])
    engine, _ = scripted(max_num_seqs=1, num_blocks=4)
    actual = run_all(engine, [make_request("a", 9, n=3)])
    assert actual.all_ids() == expected.all_ids()


def test_a_prefill_job_yields_one_token_per_choice_and_finishes() -> None:
    engine, runner = scripted()
    engine.submit(make_request("a", 9, n=2, max_tokens=5), prefill_only=True)
    run = drive(engine)
    assert run.all_ids() == {("a", 0): [9], ("a", 1): [19]}
    assert {token.finish for token in run.tokens} == {None}
    assert (run.finished, len(runner.steps)) == (["a"], 1)


def test_a_prefill_job_reports_a_finish_reason_if_its_first_token_is_the_last() -> None:
    engine, _ = scripted()
    engine.submit(make_request("a", 9, max_tokens=1), prefill_only=True)
    assert drive(engine).last("a").finish == "length"


def test_choices_with_a_first_token_continue_from_it() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, ((40,), (41,)), n=2, max_tokens=3)])
    assert [(token.choice, token.offset, token.id) for token in run.tokens] == [
        (0, 1, 11),
        (0, 2, 12),
        (1, 1, 21),
        (1, 2, 22),
    ]
    assert [len(row.samples) for step in runner.steps for row in step] == [1, 1, 1, 1]


def test_choices_submitted_as_finished_do_not_run() -> None:
    engine, _ = scripted()
    request = make_request("a", 10, ((40,), (41,), (42,)), n=3, max_tokens=2)
    engine.submit(request, finished=(0, 2))
    run = drive(engine)
    assert run.finished == ["a"]
    assert [(token.choice, token.offset, token.id) for token in run.tokens] == [(1, 1, 21)]


def test_choices_with_and_without_tokens_run_together() -> None:
    whole = run_all(scripted()[0], [make_request("a", 10, n=4, max_tokens=4)]).all_ids()
    outputs = ((10, 11), (), (30,), ())
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 10, outputs, n=4, max_tokens=4)])
    assert [sample.choice for sample in runner.steps[0][0].samples] == [1, 3]
    for choice, known in enumerate(outputs):
        assert [*known, *run.ids("a", choice)] == whole["a", choice]


def test_if_the_leader_is_finished_early_the_next_choice_computes_the_prompt() -> None:
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
    assert runner.work()[1] == [(4, 6)]  # the first block is in the cache
    assert run.use("a") == (0, 0, 10) or run.use("a") == (4, 0, 6)


def test_finishing_every_choice_before_it_runs_finishes_the_request() -> None:
    engine, runner = scripted()
    engine.submit(make_request("a", 10, n=2))
    for choice in range(2):
        engine.finish_choice(RequestId("a"), choice)
    run = drive(engine)
    assert (run.finished, runner.steps) == (["a"], [])


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_choices_have_the_same_ids_in_a_small_and_in_a_large_pool(blocks: int) -> None:
    requests = [make_request(name, 9, n=3, max_tokens=5) for name in "ab"]
    expected = run_all(scripted()[0], requests).all_ids()
    engine, _ = scripted(num_blocks=blocks)
    assert run_all(engine, requests).all_ids() == expected
    assert engine.load().free_blocks == blocks


def test_finishing_a_choice_does_not_affect_the_next_attempt() -> None:
    engine, _ = scripted()
    run = Run()
    engine.submit(make_request("a", 8, max_tokens=9))
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    engine.submit(make_request("a", 8, max_tokens=3))
    new_attempt = Run()
    assert "a" not in step_once(engine, new_attempt).finished
    drive(engine, into=new_attempt)
    assert (new_attempt.finished, new_attempt.ids("a")) == (["a"], [8, 9, 10])
