"""Overlap: the engine launches the next step before it reads the last. Outputs, cached blocks and
counters are the same as without overlap."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import RequestId
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

A = RequestId("a")


def overlapping(script: Any = None, **changes: Any) -> tuple[EngineCore, ScriptedRunner]:
    return scripted(script, overlap=True, **changes)


def awaited_samples(runner: ScriptedRunner) -> list[list[int | None]]:
    """For each step, the index of the sample that each row awaits."""
    return [[row.awaited_sample for row in rows] for rows in runner.steps]


def eos_at(position: int) -> Any:
    return lambda sample: EOS if sample.position == position else 1


def test_a_step_is_launched_before_the_last_is_read() -> None:
    engine, runner = overlapping()
    assert engine.overlap
    run = run_all(engine, [make_request("a", 6, max_tokens=3)])
    events = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]
    assert runner.events == events
    assert runner.work() == [[(0, 6)], [(6, 1)], [(7, 1)]]
    assert awaited_samples(runner) == [[None], [0], [0]]
    assert [list(rows[0].tokens) for rows in runner.steps][1:] == [[6], [7]]
    assert [[token.id for token in step.tokens] for step in run.steps] == [[6], [7], [8]]
    assert [token.finish for token in run.tokens] == [None, None, "length"]


def test_without_overlap_no_row_awaits_a_sample() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 6, max_tokens=3)])
    assert not engine.overlap
    assert runner.events == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]
    assert awaited_samples(runner) == [[None], [None], [None]]


def test_awaited_samples_are_numbered_over_all_rows_of_the_step() -> None:
    engine, runner = overlapping()
    engine.submit(make_request("b", 5, n=3, max_tokens=1))
    engine.submit(make_request("c", [1, 2], max_tokens=2))
    drive(engine)
    assert [len(row.samples) for row in runner.steps[0]] == [3, 1]
    assert awaited_samples(runner)[1] == [3]
    assert list(runner.steps[1][0].tokens) == [2]


def test_a_sequence_keeps_its_key_until_it_is_preempted() -> None:
    engine, runner = overlapping(num_blocks=6)
    run_all(engine, [make_request(name, 7, max_tokens=12) for name in "ab"])
    assert engine.load().preemptions_total > 0
    blocks_of: dict[int, list[int]] = {}
    for rows in runner.steps:
        assert len({row.blocks_id for row in rows}) == len(rows)
        for row in rows:
            known = blocks_of.setdefault(row.blocks_id, [])
            assert row.blocks_id != 0
            assert list(row.blocks[: len(known)]) == known
            blocks_of[row.blocks_id] = list(row.blocks)
    assert len(blocks_of) > 2


@pytest.mark.parametrize("end", [7, 8, 11])
def test_a_row_launched_after_an_unforeseen_eos_is_dropped(end: int) -> None:
    requests = [make_request("a", 6, max_tokens=9), make_request("b", [3, 4], max_tokens=9)]
    expected = run_all(scripted(eos_at(end))[0], requests)
    engine, runner = overlapping(eos_at(end))
    run = run_all(engine, requests)
    assert run.all_ids() == expected.all_ids()
    assert run.last("a").stop_id == EOS
    starts = [row.start for rows in runner.steps for row in rows if row.blocks[0] == 1]
    assert starts[-1] == end  # a row for the EOS was launched and dropped
    load = engine.load()
    assert load.generated_tokens_total == len(run.tokens)
    assert load.free_blocks == 16


def test_a_dropped_rows_kv_is_not_cached_or_reported() -> None:
    """The dropped row fills the second chunk with 15 tokens and the EOS."""
    engine, runner = overlapping(eos_at(15))
    engine.submit(make_request("a", 14, max_tokens=9), report_filled=True, track=True)
    run = drive(engine)
    assert runner.work()[-1] == [(15, 1)]
    assert [each.index for each in run.filled] == [0]
    assert [each.computed for each in run.progress] == [14]
    hashes = engine.block_hashes(make_request("x", [*make_request("a", 14).prompt_ids, 1, EOS]))
    assert engine.cached_blocks(hashes) == 3
    assert run.steps[-1].tokens == []


def test_blocks_of_a_dropped_row_are_not_reused_until_its_step_is_read() -> None:
    engine, runner = overlapping(eos_at(7), num_blocks=4)
    run = Run()
    engine.submit(make_request("a", 6, max_tokens=9))
    step_once(engine, run)
    step_once(engine, run)
    assert (run.finished, runner.unread) == (["a"], [2])
    assert engine.has_work()
    assert engine.load().free_blocks == 2
    assert engine.reserve(make_request("b", 12)) is None
    drive(engine, into=run)
    assert run.finished == ["a"]
    assert engine.load().free_blocks == 4
    assert engine.reserve(make_request("b", 12)) is not None


def test_a_choice_finished_between_steps_yields_no_more_tokens() -> None:
    engine, runner = overlapping()
    run = Run()
    for name in "ab":
        engine.submit(make_request(name, 6, max_tokens=9))
    step_once(engine, run)
    engine.finish_choice(A, 0)
    engine.check_integrity()
    assert (engine.load().free_blocks, runner.unread) == (12, [1])
    drive(engine, into=run)
    assert (run.ids("a"), len(run.ids("b"))) == ([6], 9)
    assert sorted(run.finished) == ["a", "b"]
    assert engine.load().free_blocks == 16


def test_blocks_that_the_step_in_flight_does_not_use_are_freed_at_once() -> None:
    engine, runner = overlapping()
    run = Run()
    engine.submit(make_request("a", 6, max_tokens=9, presence_penalty=1.0))
    engine.submit(make_request("b", 6, max_tokens=9))
    step_once(engine, run)
    assert [row.blocks[0] for row in runner.steps[-1]] == [3]
    engine.abort(A)
    assert (engine.load().free_blocks, runner.unread) == (14, [1])
    drive(engine, into=run)


def test_an_aborted_request_can_be_submitted_again_before_its_step_is_read() -> None:
    engine, _ = overlapping()
    run = Run()
    engine.submit(make_request("a", 6, max_tokens=9))
    step_once(engine, run)
    engine.abort(A)
    engine.check_integrity()
    assert engine.has_work()
    assert engine.load().free_blocks == 14
    engine.submit(make_request("a", 6, ((6,),), attempt=2, max_tokens=4))
    drive(engine, into=run)
    assert run.ids("a") == [6, 7, 8, 9]
    assert run.finished == ["a"]
    assert engine.load().free_blocks == 16


def test_the_step_in_flight_is_read_after_the_last_request_is_aborted() -> None:
    engine, runner = overlapping()
    engine.submit(make_request("a", 6, max_tokens=9))
    engine.step()
    engine.abort(A)
    result = engine.step()
    assert (result.tokens, result.finished, runner.unread) == ([], [], [])
    assert not engine.has_work()


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"bad_words": ((7, 8),)},
    ],
)
def test_a_row_whose_sample_needs_the_last_token_waits_and_other_rows_do_not(
    params: dict[str, Any],
) -> None:
    engine, runner = overlapping()
    requests = [make_request("a", 6, max_tokens=4, **params), make_request("b", 5, max_tokens=6)]
    run = run_all(engine, requests)
    assert [len(run.ids(name)) for name in "ab"] == [4, 6]
    assert awaited_samples(runner) == [[None, None], [1], [None, 0], [1], [None, 0], [1], [None]]
    rows = [row for rows in runner.steps for row in rows if row.blocks[0] == 1]
    known = [*make_request("a", 6).prompt_ids, *run.ids("a")]
    for row in rows:
        (sample,) = row.samples
        outputs = known[6 : sample.position]
        assert sample.penalty_counts is None or sum(sample.penalty_counts.outputs.values()) == len(
            outputs
        )
        assert sample.banned == ((8,) if "bad_words" in params and outputs[-1:] == [7] else ())


def test_min_tokens_does_not_need_the_last_token() -> None:
    engine, runner = overlapping()
    run_all(engine, [make_request("a", 6, max_tokens=4, min_tokens=2, stop_token_ids=(50,))])
    assert awaited_samples(runner) == [[None], [0], [0], [0]]
    assert [rows[0].samples[0].banned for rows in runner.steps] == [(EOS, 50), (EOS, 50), (), ()]


@pytest.mark.parametrize(("changes", "count"), [({}, 3), ({"max_model_len": 8}, 2)])
def test_no_row_is_launched_after_the_length_limit(changes: dict[str, int], count: int) -> None:
    engine, runner = overlapping(**changes)
    run = run_all(engine, [make_request("a", 6, max_tokens=3)])
    assert len(run.ids("a")) == len(runner.steps) == count


def test_a_prefill_job_launches_no_row_after_its_first_token() -> None:
    engine, runner = overlapping(max_batched_tokens=4)
    engine.submit(make_request("a", 6, max_tokens=9), prefill_only=True)
    run = drive(engine)
    assert (run.ids("a"), run.finished) == ([6], ["a"])
    assert runner.work() == [[(0, 4)], [(4, 2)]]
    assert runner.events[:3] == ["launch 0", "launch 1", "read 0"]


def test_pieces_of_a_prompt_are_launched_without_waiting_for_each_other() -> None:
    engine, runner = overlapping(max_batched_tokens=4)
    engine.submit(make_request("a", 14, max_tokens=2), track=True)
    run = drive(engine)
    assert runner.work() == [[(0, 4)], [(4, 4)], [(8, 4)], [(12, 2)], [(14, 1)]]
    assert runner.events[:5] == ["launch 0", "launch 1", "read 0", "launch 2", "read 1"]
    assert [each.computed for each in run.progress] == [4, 8, 12, 14]
    assert run.use("a") == (0, 0, 14)
    assert [step.num_prompt_tokens for step in run.steps][:5] == [4, 4, 4, 2, 0]


def test_the_choices_of_a_request_start_when_its_prompts_last_step_is_read() -> None:
    engine, runner = overlapping()
    requests = [make_request("a", 6, n=3, max_tokens=4)]
    run = run_all(engine, requests)
    assert run.all_ids() == run_all(scripted()[0], requests).all_ids()
    assert runner.events[:2] == ["launch 0", "read 0"]
    assert awaited_samples(runner)[2] == [0, 1, 2]


def test_a_choice_finished_while_its_prompt_is_in_flight_yields_no_tokens() -> None:
    engine, _ = overlapping(max_batched_tokens=4)
    run = Run()
    engine.submit(make_request("a", 6, n=3, max_tokens=4))
    step_once(engine, run)
    engine.finish_choice(A, 1)
    drive(engine, into=run)
    assert sorted(run.all_ids()) == [("a", 0), ("a", 2)]
    assert run.finished == ["a"]


def test_the_next_leader_starts_while_the_old_leaders_step_is_in_flight() -> None:
    engine, _ = overlapping(max_batched_tokens=4)
    run = Run()
    engine.submit(make_request("a", 10, n=2, max_tokens=2))
    step_once(engine, run)
    engine.finish_choice(A, 0)
    engine.check_integrity()
    drive(engine, into=run)
    assert run.all_ids() == {("a", 1): [20, 21]}
    assert engine.load().free_blocks == 16


def test_a_launched_step_skips_landed_runs() -> None:
    engine, runner = overlapping(max_batched_tokens=5)
    request = make_request("a", 30, max_tokens=2)
    reservation = engine.reserve(request)
    assert reservation is not None
    engine.submit(request, reservation=reservation, landed=[(1, 3), (5, 6)], report_filled=True)
    run = Run()
    step_once(engine, run)
    assert engine.load().queued_tokens == 30 - 12 - 4
    drive(engine, into=run)
    assert runner.work() == [[(0, 4)], [(12, 5)], [(17, 3)], [(24, 5)], [(29, 1)], [(30, 1)]]
    assert run.use("a") == (0, 12, 18)
    assert [each.index for each in run.filled] == [0, 1, 2]
    assert run.ids("a") == [30, 31]


def test_prompt_logprobs_of_a_prompt_in_pieces_are_the_same_with_overlap() -> None:
    requests = [make_request("a", 10, max_tokens=3, prompt_logprobs=0)]
    expected = run_all(scripted(max_batched_tokens=4)[0], requests)
    run = run_all(overlapping(max_batched_tokens=4)[0], requests)
    assert run.prompt_logprobs("a") == expected.prompt_logprobs("a")
    assert run.ids("a") == expected.ids("a")


def test_a_block_is_cached_when_the_step_that_fills_it_is_read() -> None:
    engine, runner = overlapping()
    request = make_request("a", 7, max_tokens=9)
    engine.submit(request)
    engine.step()
    assert (runner.work()[-1], runner.unread) == ([(7, 1)], [1])
    hashes = engine.block_hashes(make_request("x", [*request.prompt_ids, 7]))
    assert engine.cached_blocks(hashes) == 1
    engine.step()
    assert engine.cached_blocks(hashes) == 2
