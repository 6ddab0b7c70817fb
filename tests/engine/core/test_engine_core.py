"""EngineCore: steps, stop conditions, prefix reuse and accounting."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
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


def test_an_engine_shows_its_runner_and_its_memory() -> None:
    engine, runner = scripted()
    assert engine.memory.layout == engine.info.layout
    assert engine.runner is runner


def test_a_request_yields_tokens_with_offsets_and_finishes_by_length() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 6, max_tokens=3)])
    assert run.ids("a") == [6, 7, 8]
    assert [token.finish for token in run.tokens] == [None, None, "length"]
    assert run.finished == ["a"]
    assert runner.work() == [[(0, 6)], [(6, 1)], [(7, 1)]]


def test_the_last_token_of_each_row_is_the_newest_known_token() -> None:
    engine, runner = scripted()
    run_all(engine, [make_request("a", [5, 6], max_tokens=3)])
    assert [list(row.tokens) for step in runner.steps for row in step] == [[5, 6], [2], [3]]


def test_only_the_piece_that_reaches_the_last_known_token_samples() -> None:
    engine, runner = scripted(max_batched_tokens=4)
    run_all(engine, [make_request("a", 10, max_tokens=1)])
    assert runner.work() == [[(0, 4)], [(4, 4)], [(8, 2)]]
    assert [len(step[0].samples) for step in runner.steps] == [0, 0, 1]
    assert runner.steps[-1][0].samples[0].position == 10


def test_eos_finishes_a_request() -> None:
    engine, _ = scripted(lambda sample: EOS if sample.position == 7 else 1)
    run = run_all(engine, [make_request("a", 6, max_tokens=9)])
    assert run.ids("a") == [1, EOS]
    assert (run.last("a").finish, run.last("a").stop_id) == ("stop", EOS)


def test_eos_does_not_finish_a_request_with_ignore_eos() -> None:
    engine, runner = scripted(lambda sample: EOS)
    run = run_all(engine, [make_request("a", 6, max_tokens=3, ignore_eos=True, min_tokens=2)])
    assert run.ids("a") == [EOS] * 3
    assert run.last("a").finish == "length"
    assert all(sample.banned == () for step in runner.steps for sample in step[0].samples)


def test_a_stop_id_finishes_a_request() -> None:
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", 6, max_tokens=9, stop_token_ids=(8,))])
    assert run.ids("a") == [6, 7, 8]
    assert (run.last("a").finish, run.last("a").stop_id) == ("stop", 8)


def test_at_max_tokens_eos_finishes_by_stop_and_a_stop_id_by_length() -> None:
    engine, _ = scripted(lambda sample: EOS if sample.position == 7 else 1)
    run = run_all(engine, [make_request("a", 6, max_tokens=2)])
    assert run.last("a").finish == "stop"
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", 6, max_tokens=2, stop_token_ids=(7,))])
    assert (run.last("a").finish, run.last("a").stop_id) == ("length", None)


def test_min_tokens_bans_eos_and_stop_ids() -> None:
    engine, runner = scripted()
    request = make_request("a", 6, max_tokens=4, min_tokens=2, stop_token_ids=(50,))
    run_all(engine, [request])
    banned = [step[0].samples[0].banned for step in runner.steps]
    assert banned == [(EOS, 50), (EOS, 50), (), ()]


def test_a_banned_eos_that_the_runner_samples_does_not_finish_the_request() -> None:
    engine, _ = scripted(lambda sample: EOS)
    run = run_all(engine, [make_request("a", 6, max_tokens=9, min_tokens=2)])
    assert run.ids("a") == [EOS] * 3


def test_a_request_finishes_at_max_model_len() -> None:
    engine, _ = scripted(max_model_len=10)
    run = run_all(engine, [make_request("a", 6, max_tokens=50)])
    assert len(run.ids("a")) == 4
    assert run.last("a").finish == "length"


def test_a_request_that_fills_the_whole_pool_finishes_by_length() -> None:
    engine, _ = scripted(num_blocks=3, max_model_len=1000)
    run = run_all(engine, [make_request("a", 6, max_tokens=500), make_request("b", 5)])
    assert len(run.ids("a")) == 13 - 6  # 12 tokens have KV, and the last needs none
    assert run.last("a").finish == "length"
    assert len(run.ids("b")) == 4


@pytest.mark.parametrize(("blocks", "length"), [(16, 20), (2, 1000)])
def test_a_prompt_that_leaves_no_room_for_an_output_token_is_refused(
    blocks: int, length: int
) -> None:
    engine, _ = scripted(num_blocks=blocks, max_model_len=length)
    limit = min(length, 4 * blocks + 1)
    with pytest.raises(PromptTooLong, match=rf"prompt has {limit} tokens; at most {limit - 1} fit"):
        engine.submit(make_request("a", limit))
    with pytest.raises(PromptTooLong):
        engine.reserve(make_request("a", limit))
    assert not engine.has_work()
    run = run_all(engine, [make_request("a", limit - 1, max_tokens=5)])
    assert len(run.ids("a")) == 1


def test_outputs_beyond_the_limit_are_refused() -> None:
    engine, _ = scripted(max_model_len=10)
    with pytest.raises(PromptTooLong, match="prompt and outputs have 11 tokens; the limit is 10"):
        engine.submit(make_request("a", 6, ((1,) * 5,), max_tokens=9))


def test_errors_for_invalid_requests_name_the_invalid_value() -> None:
    engine, _ = scripted()
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        engine.submit(make_request("a", []))
    with pytest.raises(InvalidRequest, match="prompt holds token id 100"):
        engine.submit(make_request("a", [1, 100]))
    with pytest.raises(InvalidRequest, match="prompt holds token id -1"):
        engine.submit(make_request("a", [-1, 2]))
    with pytest.raises(InvalidRequest, match="top_p"):
        engine.submit(make_request("a", 3, top_p=0.0))
    assert not engine.has_work()


def test_calls_that_violate_the_contract_raise_value_error() -> None:
    engine, _ = scripted()
    with pytest.raises(ValueError, match="2 outputs for n=1"):
        engine.submit(make_request("a", 3, ((), ())))
    engine.submit(make_request("a", 3))
    with pytest.raises(ValueError, match="running already"):
        engine.submit(make_request("a", 3))
    with pytest.raises(ValueError, match=r"blocks \[3\] are given back and were not held"):
        engine.unhold([BlockId(3)])
    other = KVLayout(1, 1, 4, 4, "float32", 2)
    with pytest.raises(ValueError, match="the runner's pool is"):
        EngineCore(replace(engine.info, layout=other), ScriptedRunner())


def test_a_second_request_computes_only_the_tokens_after_the_shared_prefix() -> None:
    engine, runner = scripted()
    prompt = list(range(20))
    first = run_all(engine, [make_request("a", [*prompt, 50], max_tokens=1)])
    second = run_all(engine, [make_request("b", [*prompt, 60, 61], max_tokens=1)])
    assert first.use("a") == (0, 0, 21)
    assert second.use("b") == (20, 0, 2)
    assert runner.work()[-1] == [(20, 2)]


@pytest.mark.parametrize(("prompt", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_fully_cached_prompt_leaves_at_least_one_token_to_compute(
    prompt: int, cached: int
) -> None:
    engine, _ = scripted()
    run_all(engine, [make_request("a", prompt)])
    run = run_all(engine, [make_request("b", make_request("a", prompt).prompt_ids)])
    assert run.use("b") == (cached, 0, prompt - cached)


def test_generated_blocks_are_reused_as_part_of_a_longer_prompt() -> None:
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", 6, max_tokens=8)])
    prompt = [*make_request("a", 6).prompt_ids, *run.ids("a"), 1]
    again = run_all(engine, [make_request("b", prompt)])
    # 13 of the 14 tokens have KV, which makes 3 full blocks.
    assert again.use("b") == (12, 0, 3)


def test_requests_with_different_salts_share_no_blocks() -> None:
    engine, _ = scripted()
    run = run_all(engine, [make_request("a", range(20))])
    run = run_all(engine, [make_request("b", range(20), salt="other")])
    assert run.use("b") == (0, 0, 20)


def test_a_preempted_request_counts_its_own_tokens_as_computed() -> None:
    engine, _ = scripted(num_blocks=6, max_batched_tokens=9)
    run = run_all(engine, [make_request("a", 11, max_tokens=8), make_request("b", 12)])
    assert engine.load().preemptions_total > 0
    assert run.use("b") == (0, 0, 12)
    assert run.ids("b") == [12, 13, 14, 15]


def test_preemption_does_not_change_ids() -> None:
    requests = [make_request(name, 7, max_tokens=12) for name in "abcd"]
    expected = run_all(scripted()[0], requests)
    engine, _ = scripted(num_blocks=6)
    actual = run_all(engine, requests)
    assert engine.load().preemptions_total > 0
    assert actual.all_ids() == expected.all_ids()


def test_a_resumed_request_starts_at_its_next_offset() -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 6, ((40, 41),), max_tokens=4)])
    assert [(token.offset, token.id) for token in run.tokens] == [(2, 8), (3, 9)]
    assert runner.steps[0][0].tokens[-2:] == [40, 41]
    assert runner.steps[0][0].samples[0].position == 8
    assert run.use("a") == (0, 0, 6)


@pytest.mark.parametrize("outputs", [(1, 2, 3, 4), (1, EOS)])
def test_a_request_submitted_with_all_its_tokens_finishes_without_a_step(
    outputs: tuple[int, ...],
) -> None:
    engine, runner = scripted()
    run = run_all(engine, [make_request("a", 6, (outputs,))])
    assert (run.finished, run.tokens, runner.steps) == (["a"], [], [])


def test_aborted_requests_release_their_blocks() -> None:
    engine, _ = scripted(max_num_seqs=1)
    for name in "ab":
        engine.submit(make_request(name, 8, max_tokens=9))
    engine.step()
    engine.abort(RequestId("a"))
    engine.abort(RequestId("b"))
    engine.abort(RequestId("unknown"))
    engine.check_integrity()
    assert not engine.has_work()
    assert engine.load().free_blocks == 16


def test_a_request_whose_choices_were_finished_early_is_reported_by_the_next_step() -> None:
    engine, _ = scripted()
    run = Run()
    engine.submit(make_request("a", 8, max_tokens=9))
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    engine.finish_choice(RequestId("a"), 0)
    engine.finish_choice(RequestId("a"), 5)
    engine.check_integrity()
    drive(engine, into=run)
    assert (run.finished, run.ids("a")) == (["a"], [8])
    assert engine.load().free_blocks == 16


def test_a_step_without_work_does_nothing() -> None:
    engine, runner = scripted()
    assert not engine.has_work()
    result = engine.step()
    assert (result.num_tokens, result.tokens, runner.steps) == (0, [], [])
    assert engine.load().engine_steps_total == 0


def test_a_step_that_fails_in_the_runner_can_be_repeated() -> None:
    def fail_once(sample: object) -> int:
        runner.script = lambda sample: sample.position
        raise RuntimeError("device lost")

    engine, runner = scripted(fail_once)
    engine.submit(make_request("a", 6, max_tokens=2))
    engine.submit(make_request("complete", 6, ((1, 2, 3, 4),)))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.check_integrity()
    run = drive(engine)
    assert run.ids("a") == [6, 7]
    assert sorted(run.finished) == ["a", "complete"]


def test_progress_of_a_tracked_prompt_lists_its_blocks_after_each_piece() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    engine.submit(make_request("a", 10, max_tokens=2), track=True)
    run = drive(engine)
    assert [each.computed for each in run.progress] == [4, 8, 10]
    assert {each.blocks for each in run.progress} == {(1, 2, 3)}
    assert [len(step.prompts) for step in run.steps][:3] == [0, 0, 1]


def test_blocks_of_a_finished_tracked_request_can_be_held_until_the_next_step() -> None:
    engine, _ = scripted(num_blocks=4)
    run = Run()
    engine.submit(make_request("a", 16, max_tokens=4), prefill_only=True, track=True)
    step_once(engine, run)
    assert run.finished == ["a"]
    assert engine.reserve(make_request("b", 4)) is None
    blocks = run.progress[0].blocks
    engine.hold(blocks[:2])
    drive(engine, into=run)
    engine.check_integrity()
    assert engine.load().free_blocks == 2
    engine.unhold(blocks[:2])
    engine.check_integrity()
    assert engine.load().free_blocks == engine.load().cached_blocks == 4


def test_a_held_free_block_is_not_reused() -> None:
    engine, _ = scripted(num_blocks=4)
    first = make_request("a", 8, max_tokens=1)
    run_all(engine, [first])
    hashes = engine.block_hashes(first)
    reservation = engine.reserve(first)
    assert reservation is not None
    engine.release(reservation)
    engine.hold(reservation.blocks)
    run_all(engine, [make_request("b", 8, max_tokens=1)])
    assert engine.cached_blocks(hashes) == 2
    engine.unhold(reservation.blocks)
    engine.check_integrity()


def test_load_reports_running_and_waiting_requests_blocks_and_totals() -> None:
    engine, _ = scripted(max_batched_tokens=8, max_num_seqs=1)
    for name in "ab":
        engine.submit(make_request(name, 10, max_tokens=2))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 2 + 10)
    assert (load.total_blocks, load.free_blocks, load.cached_blocks) == (16, 13, 0)
    run = drive(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)
    assert (load.prompt_tokens_total, load.computed_prompt_tokens_total) == (20, 20)
    assert load.generated_tokens_total == 4
    assert load.engine_steps_total == 1 + len(run.steps)
    assert load.cached_blocks == 4


def test_stored_and_evicted_chunks_are_reported_once() -> None:
    engine, _ = scripted(num_blocks=4)
    first = make_request("a", 9, max_tokens=1)
    run_all(engine, [first])
    chunk: BlockHash = engine.block_hashes(first)[1]
    changes = engine.cache_changes()
    assert (changes.stored, changes.evicted) == ((chunk,), ())
    assert engine.cached_chunks() == (chunk,)
    assert engine.cache_changes().stored == ()
    run_all(engine, [make_request("b", 13, max_tokens=1)])
    changes = engine.cache_changes()
    assert changes.evicted == (chunk,)
    assert len(changes.stored) == 1


@pytest.mark.integration
def test_importing_the_engine_does_not_import_torch() -> None:
    code = (
        "import sys, baton_engine, baton_engine.sim.build; "
        "from baton_engine import SamplingParams; "
        "assert 'LLM' in baton_engine.__all__; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_an_unknown_name_in_the_package_raises_attribute_error() -> None:
    import baton_engine

    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = baton_engine.Engine
