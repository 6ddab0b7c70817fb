"""Two steps under way: the next step is launched before the last one is read, and nothing that a
client gets, the cache holds or the books say is different for it."""

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


def ahead(script: Any = None, **changes: Any) -> tuple[EngineCore, ScriptedRunner]:
    return scripted(script, overlap=True, **changes)


def awaited(runner: ScriptedRunner) -> list[list[int | None]]:
    """Per step, the sample that each row awaits."""
    return [[row.after for row in rows] for rows in runner.steps]


def eos_at(position: int) -> Any:
    return lambda sample: EOS if sample.position == position else 1


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    engine, runner = ahead()
    assert engine.overlap
    run = run_all(engine, [make_request("a", 6, max_tokens=3)])
    events = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]
    assert runner.events == events
    assert runner.work() == [[(0, 6)], [(6, 1)], [(7, 1)]]
    assert awaited(runner) == [[None], [0], [0]]
    assert [list(rows[0].tokens) for rows in runner.steps][1:] == [[6], [7]]
    assert [[token.id for token in step.tokens] for step in run.steps] == [[6], [7], [8]]
    assert [token.finish for token in run.tokens] == [None, None, "length"]


def test_without_overlap_no_row_awaits_anything() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", 6, max_tokens=3)])
    assert not engine.overlap
    assert runner.events == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]
    assert awaited(runner) == [[None], [None], [None]]


def test_samples_are_counted_over_all_rows_of_the_step() -> None:
    engine, runner = ahead()
    engine.submit(make_request("b", 5, n=3, max_tokens=1))
    engine.submit(make_request("c", [1, 2], max_tokens=2))
    drive(engine)
    assert [len(row.samples) for row in runner.steps[0]] == [3, 1]
    assert awaited(runner)[1] == [3]
    assert list(runner.steps[1][0].tokens) == [2]


def test_rows_of_one_sequence_have_one_key_until_it_loses_its_blocks() -> None:
    engine, runner = ahead(num_blocks=6)
    run_all(engine, [make_request(name, 7, max_tokens=12) for name in "ab"])
    assert engine.load().preemptions_total > 0
    blocks_of: dict[int, list[int]] = {}
    for rows in runner.steps:
        assert len({row.key for row in rows}) == len(rows)
        for row in rows:
            had = blocks_of.setdefault(row.key, [])
            assert row.key != 0
            assert list(row.blocks[: len(had)]) == had
            blocks_of[row.key] = list(row.blocks)
    assert len(blocks_of) > 2


@pytest.mark.parametrize("ends", [7, 8, 11])
def test_a_row_behind_an_end_that_nobody_foresaw_is_surplus(ends: int) -> None:
    requests = [make_request("a", 6, max_tokens=9), make_request("b", [3, 4], max_tokens=9)]
    plain = run_all(scripted(eos_at(ends))[0], requests)
    engine, runner = ahead(eos_at(ends))
    run = run_all(engine, requests)
    assert run.all_ids() == plain.all_ids()
    assert run.last("a").stop_id == EOS
    starts = [row.start for rows in runner.steps for row in rows if row.blocks[0] == 1]
    assert starts[-1] == ends  # the EOS itself was computed, in vain
    load = engine.load()
    assert load.generated_tokens_total == len(run.tokens)
    assert load.free_blocks == 16


def test_what_a_surplus_row_computed_is_not_in_the_cache_and_not_told() -> None:
    """The surplus row fills the second chunk: 15 tokens and the EOS."""
    engine, runner = ahead(eos_at(15))
    engine.submit(make_request("a", 14, max_tokens=9), report_filled=True, track=True)
    run = drive(engine)
    assert runner.work()[-1] == [(15, 1)]
    assert [each.index for each in run.filled] == [0]
    assert [each.computed for each in run.progress] == [14]
    hashes = engine.block_hashes(make_request("x", [*make_request("a", 14).prompt_ids, 1, EOS]))
    assert engine.cached_blocks(hashes) == 3
    assert run.steps[-1].tokens == ()


def test_the_blocks_of_a_surplus_row_are_nobodys_until_it_was_read() -> None:
    engine, runner = ahead(eos_at(7), num_blocks=4)
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


def test_a_choice_that_is_finished_between_steps_says_no_more() -> None:
    engine, runner = ahead()
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


def test_blocks_that_the_step_under_way_does_not_use_are_free_at_once() -> None:
    engine, runner = ahead()
    run = Run()
    engine.submit(make_request("a", 6, max_tokens=9, presence_penalty=1.0))
    engine.submit(make_request("b", 6, max_tokens=9))
    step_once(engine, run)
    assert [row.blocks[0] for row in runner.steps[-1]] == [3]
    engine.abort(A)
    assert (engine.load().free_blocks, runner.unread) == (14, [1])
    drive(engine, into=run)


def test_an_aborted_request_leaves_its_blocks_when_its_step_was_read_and_may_come_again() -> None:
    engine, _ = ahead()
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


def test_with_nobody_left_the_rest_is_read() -> None:
    engine, runner = ahead()
    engine.submit(make_request("a", 6, max_tokens=9))
    engine.step()
    engine.abort(A)
    result = engine.step()
    assert (result.tokens, result.finished, runner.unread) == ((), (), [])
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
def test_a_sample_that_depends_on_the_token_waits_for_it_and_others_do_not(
    params: dict[str, Any],
) -> None:
    engine, runner = ahead()
    requests = [make_request("a", 6, max_tokens=4, **params), make_request("b", 5, max_tokens=6)]
    run = run_all(engine, requests)
    assert [len(run.ids(name)) for name in "ab"] == [4, 6]
    assert awaited(runner) == [[None, None], [1], [None, 0], [1], [None, 0], [1], [None]]
    rows = [row for rows in runner.steps for row in rows if row.blocks[0] == 1]
    known = [*make_request("a", 6).prompt_ids, *run.ids("a")]
    for row in rows:
        (sample,) = row.samples
        said = known[6 : sample.position]
        assert sample.seen is None or sum(sample.seen.outputs.values()) == len(said)
        assert sample.banned == ((8,) if "bad_words" in params and said[-1:] == [7] else ())


def test_what_min_tokens_bans_is_known_without_the_token() -> None:
    engine, runner = ahead()
    run_all(engine, [make_request("a", 6, max_tokens=4, min_tokens=2, stop_token_ids=(50,))])
    assert awaited(runner) == [[None], [0], [0], [0]]
    assert [rows[0].samples[0].banned for rows in runner.steps] == [(EOS, 50), (EOS, 50), (), ()]


@pytest.mark.parametrize(("changes", "count"), [({}, 3), ({"max_model_len": 8}, 2)])
def test_an_end_by_length_is_foreseen(changes: dict[str, int], count: int) -> None:
    engine, runner = ahead(**changes)
    run = run_all(engine, [make_request("a", 6, max_tokens=3)])
    assert len(run.ids("a")) == len(runner.steps) == count


def test_an_end_after_the_first_new_token_is_foreseen() -> None:
    engine, runner = ahead(max_batched_tokens=4)
    engine.submit(make_request("a", 6, max_tokens=9), prefill_only=True)
    run = drive(engine)
    assert (run.ids("a"), run.finished) == ([6], ["a"])
    assert runner.work() == [[(0, 4)], [(4, 2)]]
    assert runner.events[:3] == ["launch 0", "launch 1", "read 0"]


def test_pieces_of_a_prompt_follow_each_other_without_waiting() -> None:
    engine, runner = ahead(max_batched_tokens=4)
    engine.submit(make_request("a", 14, max_tokens=2), track=True)
    run = drive(engine)
    assert runner.work() == [[(0, 4)], [(4, 4)], [(8, 4)], [(12, 2)], [(14, 1)]]
    assert runner.events[:5] == ["launch 0", "launch 1", "read 0", "launch 2", "read 1"]
    assert [each.computed for each in run.progress] == [4, 8, 12, 14]
    assert run.use("a") == (0, 0, 14)
    assert [step.num_prompt_tokens for step in run.steps][:5] == [4, 4, 4, 2, 0]


def test_the_choices_of_a_prompt_start_when_its_end_was_read() -> None:
    engine, runner = ahead()
    requests = [make_request("a", 6, n=3, max_tokens=4)]
    run = run_all(engine, requests)
    assert run.all_ids() == run_all(scripted()[0], requests).all_ids()
    assert runner.events[:2] == ["launch 0", "read 0"]
    assert awaited(runner)[2] == [0, 1, 2]


def test_a_choice_that_ends_while_the_prompts_end_is_under_way_says_nothing() -> None:
    engine, _ = ahead(max_batched_tokens=4)
    run = Run()
    engine.submit(make_request("a", 6, n=3, max_tokens=4))
    step_once(engine, run)
    engine.finish_choice(A, 1)
    drive(engine, into=run)
    assert sorted(run.all_ids()) == [("a", 0), ("a", 2)]
    assert run.finished == ["a"]


def test_a_next_leader_starts_while_the_step_of_the_one_before_is_under_way() -> None:
    engine, _ = ahead(max_batched_tokens=4)
    run = Run()
    engine.submit(make_request("a", 10, n=2, max_tokens=2))
    step_once(engine, run)
    engine.finish_choice(A, 0)
    engine.check_integrity()
    drive(engine, into=run)
    assert run.all_ids() == {("a", 1): [20, 21]}
    assert engine.load().free_blocks == 16


def test_runs_that_landed_are_gone_over_by_the_step_that_is_launched() -> None:
    engine, runner = ahead(max_batched_tokens=5)
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


def test_how_likely_a_prompt_is_comes_piece_by_piece() -> None:
    requests = [make_request("a", 10, max_tokens=3, prompt_logprobs=0)]
    plain = run_all(scripted(max_batched_tokens=4)[0], requests)
    run = run_all(ahead(max_batched_tokens=4)[0], requests)
    assert run.prompt_logprobs("a") == plain.prompt_logprobs("a")
    assert run.ids("a") == plain.ids("a")


def test_a_block_is_cached_when_the_step_that_fills_it_was_read() -> None:
    engine, runner = ahead()
    request = make_request("a", 7, max_tokens=9)
    engine.submit(request)
    engine.step()
    assert (runner.work()[-1], runner.unread) == ([(7, 1)], [1])
    hashes = engine.block_hashes(make_request("x", [*request.prompt_ids, 7]))
    assert engine.cached_blocks(hashes) == 1
    engine.step()
    assert engine.cached_blocks(hashes) == 2
