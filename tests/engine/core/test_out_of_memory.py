"""The device lacks memory for some steps: requests end with the tokens they would have had."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import OutOfMemory
from baton_engine.interface import Matcher, Row
from baton_engine.scheduling.step_limits import GROW_AFTER
from baton_protocol.request import Request
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.tokenizer import Tokenizer
from tests.support.engines.engine_core import Run, drive, make_request, step_once
from tests.support.engines.short_of_memory import engine_on, samples_of, tokens_of

GRAMMARS = Grammars(Tokenizer.from_artifacts(byte_artifacts()))
GRAMMAR = grammar_of("regex", "([a-f]{3}-)+[0-9]{4}")
MAX_STEPS = 3000


def never(number: int, rows: Sequence[Row]) -> bool:
    return False


def mixed_requests() -> list[Request]:
    """A long prompt, choices that share one, penalties, a grammar, prompt logprobs."""
    plain: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 9}
    return [
        make_request("long", 70, **plain),
        make_request("choices", 13, n=3, **plain),
        make_request("penalised", 9, presence_penalty=1.5, repetition_penalty=1.3, **plain),
        make_request("grammar", 11, structured=StructuredOutput(GRAMMAR), **plain),
        make_request("scored", 30, prompt_logprobs=1, **plain),
        make_request("greedy", 5, max_tokens=15),
    ]


def submit(engine: EngineCore, request: Request) -> None:
    matcher: Matcher | None = None
    if request.params.structured is not None:
        matcher = GRAMMARS.matcher(request.params.structured.grammar)
    engine.submit(request, matcher=matcher, report_filled=True, track=True)


def run_on(engine: EngineCore, requests: Sequence[Request]) -> Run:
    for request in requests:
        submit(engine, request)
    return drive(engine, MAX_STEPS)


EXPECTED = run_on(engine_on(never)[0], mixed_requests())


def check_all_ended_as_without_failures(engine: EngineCore, run: Run) -> None:
    assert run.all_ids() == EXPECTED.all_ids()
    assert sorted(run.finished) == sorted(EXPECTED.finished)
    assert not any(step.failed for step in run.steps)
    assert run.prompt_logprobs("scored") == EXPECTED.prompt_logprobs("scored")
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
    assert load.generated_tokens_total == len(run.tokens)


@given(
    lacking=st.sets(st.integers(0, 60), max_size=40),
    overlap=st.booleans(),
    blocks=st.integers(60, 120),
)
@settings(max_examples=40)
def test_no_token_changes_whichever_launches_lack_memory(
    lacking: set[int], overlap: bool, blocks: int
) -> None:
    """At most 2 launches lack memory in a row, so that no request fails."""
    lacking = {number for number in lacking if number % 3 != 2}
    engine, runner = engine_on(
        lambda number, rows: number in lacking, overlap=overlap, num_blocks=blocks
    )
    run = run_on(engine, mixed_requests())
    assert len(runner.failed) == sum(number < runner.launches for number in lacking)
    check_all_ended_as_without_failures(engine, run)


@given(tokens=st.integers(1, 40), samples=st.integers(3, 12), overlap=st.booleans())
@settings(max_examples=40)
def test_no_token_changes_on_a_device_with_memory_for_small_steps_only(
    tokens: int, samples: int, overlap: bool
) -> None:
    engine, runner = engine_on(
        lambda number, rows: tokens_of(rows) > tokens or samples_of(rows) > samples,
        overlap=overlap,
    )
    run = run_on(engine, mixed_requests())
    check_all_ended_as_without_failures(engine, run)
    # At most 2 launches find a limit that has grown too large, one of them ahead of a read.
    assert len(runner.failed) <= 30 + len(run.steps) * 2 // GROW_AFTER


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_gets_fewer_tokens_and_no_sequence_is_preempted(overlap: bool) -> None:
    engine, runner = engine_on(lambda number, rows: tokens_of(rows) > 12, overlap=overlap)
    run = Run()
    for index in range(4):
        submit(engine, make_request(f"r{index}", 2, max_tokens=60))
    step_once(engine, run)
    submit(engine, make_request("long", 90, max_tokens=1))
    drive(engine, MAX_STEPS, into=run)
    assert engine.load().preemptions_total == 0
    assert runner.failed
    assert max(runner.fitted) <= (12, 12)


def test_the_youngest_sequence_is_preempted_and_the_oldest_are_not_delayed() -> None:
    engine, runner = engine_on(lambda number, rows: len(rows) > 3)
    names = "abcde"
    run = run_on(engine, [make_request(name, 4, max_tokens=9) for name in names])
    assert [len(run.ids(name)) for name in names] == [9] * 5
    assert run.finished[:3] == ["a", "b", "c"]
    assert len(runner.failed) == 4  # 20 tokens, 10 tokens, and 5 and 4 rows of 1 token
    assert engine.load().preemptions_total == 2


def test_the_step_in_flight_is_read_before_a_smaller_step_is_launched() -> None:
    """The launch of step 2, ahead of the read of step 1, lacks memory."""
    engine, runner = engine_on(lambda number, rows: number == 2, overlap=True)
    run = Run()
    for name in "ab":
        submit(engine, make_request(name, 4, max_tokens=9))
    step_once(engine, run)
    step_once(engine, run)
    assert (len(runner.failed), len(runner.fitted)) == (1, 2)
    assert [len(step.tokens) for step in run.steps] == [2, 2]
    assert engine.load().preemptions_total == 0
    drive(engine, MAX_STEPS, into=run)
    assert [len(run.ids(name)) for name in "ab"] == [9, 9]


def many_samples(number: int, rows: Sequence[Row]) -> bool:
    return samples_of(rows) > 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_does_not_fit_alone_fails_and_the_others_go_on(overlap: bool) -> None:
    engine, _ = engine_on(many_samples, overlap=overlap)
    requests = [make_request("a", 6, max_tokens=5), make_request("huge", 6, n=6)]
    run = run_on(engine, [*requests, make_request("b", 6, max_tokens=5)])
    [failed] = [each for step in run.steps for each in step.failed]
    assert failed.request == "huge"
    assert not failed.error.retryable
    assert "1 token and 6 choices" in failed.error.message
    assert "lower n, or the node's --gpu-memory-utilization" in failed.error.message
    assert [len(run.ids(name)) for name in "ab"] == [5, 5]
    assert sorted(run.finished) == ["a", "b", "huge"]
    assert engine.load().free_blocks == 400


def test_a_device_without_memory_for_any_step_is_an_error_and_loses_no_second_request() -> None:
    memory = [False]
    engine, _ = engine_on(lambda number, rows: not memory[0])
    run = Run()
    for name in "abc":
        submit(engine, make_request(name, 6))
    with pytest.raises(OutOfMemory, match="no request fits the device's memory; lower --gpu"):
        drive(engine, MAX_STEPS, into=run)
    engine.check_integrity()
    memory[0] = True
    drive(engine, MAX_STEPS, into=run)
    assert [failed.request for step in run.steps for failed in step.failed] == ["a"]
    assert [len(run.ids(name)) for name in "bc"] == [4, 4]


def test_the_log_says_how_large_steps_may_be_and_which_flags_to_lower(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = engine_on(lambda number, rows: number == 0)
    with caplog.at_level(logging.WARNING, "baton_engine"):
        run_on(engine, [make_request("a", 20)])
    [message] = caplog.messages
    assert "a step of 20 tokens of 1 sequences; steps now have at most 10 tokens" in message
    assert "--gpu-memory-utilization, --kv-memory or --kv-blocks" in message


def test_one_more_sequence_is_tried_when_steps_have_fitted_for_a_while() -> None:
    engine, runner = engine_on(lambda number, rows: len(rows) > 8)
    names = [f"r{index}" for index in range(24)]
    run = run_on(
        engine, [make_request(name, [index], max_tokens=50) for index, name in enumerate(names)]
    )
    assert [len(run.ids(name)) for name in names] == [50] * 24
    first = 24 - 8  # rows of 1 token, one fewer in each launch
    assert first < len(runner.failed) <= first + len(runner.fitted) // GROW_AFTER
