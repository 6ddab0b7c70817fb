"""Overlap in a pool that is too small, and over a runner that fails."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.in_flight import InFlightSteps
from baton_engine.interface import Sample
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from tests.support.engines.engine_core import (
    Run,
    ScriptedRunner,
    drive,
    make_request,
    run_all,
    scripted,
    step_once,
)
from tests.support.engines.landing import DeviceLostError, watched_sim

A = RequestId("a")


def overlapping(**changes: Any) -> tuple[EngineCore, ScriptedRunner]:
    return scripted(overlap=True, **changes)


# --- too few blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [5, 6, 7, 9])
def test_no_sequence_is_preempted_while_a_step_in_flight_uses_its_blocks(blocks: int) -> None:
    requests = [make_request(name, 7, max_tokens=12) for name in "abcd"]
    engine, _ = watched_sim(num_blocks=blocks, overlap=True)
    run = run_all(engine, requests)
    assert engine.load().preemptions_total > 0
    assert run.all_ids() == run_all(watched_sim()[0], requests).all_ids()
    assert engine.load().free_blocks == blocks


def test_if_a_block_is_missing_the_step_in_flight_is_read_before_a_preemption() -> None:
    engine, runner = overlapping(num_blocks=4, max_model_len=16)
    run = Run()
    for name, prompt in (("a", 7), ("b", 7)):
        engine.submit(make_request(name, prompt, max_tokens=5))
    step_once(engine, run)
    step_once(engine, run)
    assert (runner.unread, engine.load().preemptions_total) == ([], 0)
    assert not engine.starved()
    step_once(engine, run)
    assert engine.load().preemptions_total == 1
    assert engine.starved()
    step_once(engine, run)
    assert not engine.starved()
    drive(engine, into=run)
    assert [len(run.ids(name)) for name in "ab"] == [5, 5]


def test_a_request_that_waits_for_the_blocks_of_a_finishing_one_is_not_starved() -> None:
    engine, _ = overlapping(num_blocks=5)
    run = Run()
    engine.submit(make_request("a", 12, max_tokens=2))
    engine.submit(make_request("b", 12, max_tokens=2))
    while engine.has_work():
        step_once(engine, run)
        assert not engine.starved()
    assert run.finished == ["a", "b"]


def test_a_step_reserves_a_token_of_its_budget_for_each_row_that_waits() -> None:
    engine, _ = overlapping(max_batched_tokens=2)
    requests = [make_request("a", 1, max_tokens=5, presence_penalty=1.0)]
    requests += [make_request(name, 1, max_tokens=9) for name in "bc"]
    run = run_all(engine, requests)
    assert [len(run.ids(name)) for name in "abc"] == [5, 9, 9]
    assert max(step.num_seqs for step in run.steps) == 2


# --- failures -----------------------------------------------------------------------------------


def failing_once(runner: ScriptedRunner, position: int) -> Any:
    """A script that raises the first time it samples this position."""

    def script(sample: Sample) -> int:
        if sample.position == position:
            runner.script = lambda sample: sample.position
            raise RuntimeError("device lost")
        return sample.position

    return script


@pytest.mark.parametrize("position", [6, 7, 9])
def test_a_failed_launch_can_be_repeated(position: int) -> None:
    engine, runner = overlapping()
    runner.script = failing_once(runner, position)
    engine.submit(make_request("a", 6, max_tokens=6))
    engine.submit(make_request("b", [1, 2, 3], max_tokens=6, presence_penalty=1.0))
    run = Run()
    with pytest.raises(RuntimeError, match="device lost"):
        drive(engine, into=run)
    engine.check_integrity()
    drive(engine, into=run)
    assert run.ids("a") == [6, 7, 8, 9, 10, 11]
    assert run.ids("b") == [3, 4, 5, 6, 7, 8]
    assert engine.load().generated_tokens_total == 12
    assert engine.load().free_blocks == 16


@pytest.mark.parametrize("number", [0, 1, 3])
def test_if_a_step_cannot_be_read_it_and_the_next_are_computed_again(number: int) -> None:
    engine, runner = overlapping(max_batched_tokens=5)
    runner.unreadable = {number}
    request = make_request("a", 21, max_tokens=5)
    reservation = engine.reserve(request)
    assert reservation is not None
    engine.submit(request, reservation=reservation, landed=[(1, 2), (3, 4)])
    engine.submit(make_request("complete", 6, ((1, 2, 3, 4),)))
    run = Run()
    with pytest.raises(RuntimeError, match="device lost"):
        drive(engine, into=run)
    assert runner.unread == []
    engine.check_integrity()
    drive(engine, into=run)
    assert run.ids("a") == [21, 22, 23, 24, 25]
    assert run.use("a") == (0, 8, 13)
    assert sorted(run.finished) == ["a", "complete"]
    keys = [rows[0].blocks_id for rows in runner.steps]
    failed = keys[: number + 2]
    assert set(failed).isdisjoint(keys[number + 2 :])


def test_blocks_of_a_step_in_flight_stay_in_use_if_the_next_launch_fails() -> None:
    engine, runner = overlapping()
    runner.script = failing_once(runner, 7)
    engine.submit(make_request("a", 6, max_tokens=6))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.abort(A)
    engine.check_integrity()
    assert (engine.load().free_blocks, runner.unread) == (14, [0])
    engine.step()
    assert engine.load().free_blocks == 16


def test_an_aborted_sequence_is_not_restarted_by_a_failure() -> None:
    engine, runner = overlapping()
    run = Run()
    for name in "ab":
        engine.submit(make_request(name, 6, max_tokens=9))
    step_once(engine, run)
    runner.unreadable = {1}
    engine.abort(A)
    with pytest.raises(RuntimeError, match="device lost"):
        step_once(engine, run)
    engine.check_integrity()
    assert engine.load().free_blocks == 14
    drive(engine, into=run)
    assert (run.ids("a"), len(run.ids("b"))) == ([6], 9)


# --- the checks detect violations ---------------------------------------------------------------


def many(**params: Any) -> list[Request]:
    return [make_request(f"r{i}", 5 + i, max_tokens=9, **params) for i in range(8)]


def test_blocks_that_are_released_too_early_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InFlightSteps, "release", lambda in_flight, sequence, blocks: False)
    engine, _ = watched_sim(overlap=True, eos_every=3, num_blocks=12, max_num_seqs=3)
    with pytest.raises(AssertionError, match="step"):
        run_all(engine, many())


def test_the_watched_runner_raises_at_the_scripted_operation() -> None:
    engine, runner = watched_sim(overlap=True)
    for request in many():
        engine.submit(request)
    for operation in ("launch", "read"):
        runner.fails = operation
        with pytest.raises(DeviceLostError, match=operation):
            drive(engine)
    drive(engine)
    assert engine.load().free_blocks == 400
