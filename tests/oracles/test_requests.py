"""States and finish reasons of requests (O-REQ): in the engine, in a node's detokenization and in
the offline API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, SamplingParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import TokenOut
from baton_node.server.detokenize import ChoiceText
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_text.artifacts import byte_artifacts
from baton_text.tokenizer import Tokenizer
from tests.oracles.engines import engine_of, step
from tests.support.engines.engine_core import EOS, Run, drive, make_request, run_all, step_once
from tests.support.engines.tiny_models import prompt_of
from tests.support.nodes import processes

BYTES = Tokenizer.from_artifacts(byte_artifacts())


def queues(engine: EngineCore) -> tuple[int, int]:
    """The numbers of waiting and running requests."""
    return engine.load().waiting, engine.load().running


def test_a_request_waits_then_runs_until_it_finishes_O_REQ_1() -> None:
    engine, _ = engine_of()
    engine.submit(make_request("a", 5, max_tokens=2))
    assert queues(engine) == (1, 0)
    step(engine)
    assert queues(engine) == (0, 1)
    step(engine)
    assert (queues(engine), engine.has_work()) == ((0, 0), False)


def test_a_request_with_a_reservation_is_parked_until_it_is_submitted_O_REQ_1() -> None:
    engine, _ = engine_of()
    request = make_request("a", 40)
    parked = engine.reserve(request)
    assert parked is not None
    assert (queues(engine), engine.has_work()) == ((0, 0), False)
    engine.submit(request, reservation=parked, landed=[(0, 2)])
    assert queues(engine) == (1, 0)
    drive(engine)


def test_a_preempted_request_waits_and_runs_again_O_REQ_1() -> None:
    engine, _ = engine_of(4, num_blocks=5)
    for name in ("old", "young"):
        engine.submit(make_request(name, 8))
    step(engine)
    assert queues(engine) == (0, 2)
    step(engine)
    assert (queues(engine), engine.load().preemptions_total) == ((1, 1), 1)
    assert sorted(drive(engine).finished) == ["old", "young"]


def test_waiting_running_and_parked_requests_can_be_aborted_O_REQ_1() -> None:
    engine, _ = engine_of(4, num_blocks=5)
    for name in ("running", "waiting"):
        engine.submit(make_request(name, 16))
    step(engine)
    assert queues(engine) == (1, 1)
    for name in ("waiting", "running"):
        engine.abort(RequestId(name))
    parked = engine.reserve(make_request("parked", 16))
    assert parked is not None
    engine.release(parked)
    assert (queues(engine), engine.load().free_blocks, engine.has_work()) == ((0, 0), 5, False)
    engine.check_integrity()


def test_invalid_state_transitions_raise_O_REQ_1() -> None:
    engine, _ = engine_of()
    request, other = make_request("a", 5), make_request("b", 5)
    parked = engine.reserve(request)
    assert parked is not None
    with pytest.raises(ValueError, match="has a reservation already"):
        engine.reserve(request)
    with pytest.raises(ValueError, match="does not own this reservation"):
        engine.submit(other, reservation=parked)
    engine.submit(request, reservation=parked)
    with pytest.raises(ValueError, match="running already"):
        engine.submit(request)
    drive(engine)
    with pytest.raises(ValueError, match="does not own this reservation"):
        engine.submit(request, reservation=parked)


@pytest.mark.parametrize("most", [1, 2, 7])
def test_a_request_generates_at_most_max_tokens_including_the_first_O_REQ_2(most: int) -> None:
    engine, _ = engine_of()
    run = run_all(engine, [make_request("a", 5, max_tokens=most)])
    assert (len(run.ids("a")), run.last("a").finish) == (most, "length")


def test_eos_as_the_last_allowed_token_finishes_by_stop_O_REQ_3() -> None:
    engine, _ = engine_of(script=lambda sample: EOS if sample.position == 7 else 1)
    run = run_all(engine, [make_request("a", 5, max_tokens=3)])
    assert (run.ids("a"), run.last("a").finish) == ([1, 1, EOS], "stop")


def test_a_stop_id_as_the_last_allowed_token_finishes_by_length_O_REQ_3b() -> None:
    engine, _ = engine_of()
    run = run_all(engine, [make_request("a", 5, max_tokens=3, stop_token_ids=(7,))])
    assert (run.ids("a")[-1], run.last("a").finish, run.last("a").stop_id) == (7, "length", None)


def last_delta(output: bytes, **params: Any) -> Delta:
    """The last delta of a choice whose tokens are the bytes of `output`. The engine finishes it by
    length."""
    text = ChoiceText(BYTES, processes.make_request("r", b"p", **params), ())
    for offset, id in enumerate(output):
        last = offset + 1 == len(output)
        token = TokenOut(RequestId("r"), 1, 0, offset, id, finish="length" if last else None)
        delta = text.push(token)
        if delta.finish is not None:
            break
    return delta


def test_a_stop_string_in_the_last_allowed_token_finishes_by_length_O_REQ_3b() -> None:
    delta = last_delta(b"one two", stop=("two",))
    assert (delta.offset, delta.finish, delta.stop) == (6, "length", None)


def test_a_request_finishes_by_length_at_max_model_len_O_REQ_3c() -> None:
    engine, _ = engine_of(max_model_len=10)
    run = run_all(engine, [make_request("a", 6, max_tokens=50)])
    assert (len(run.ids("a")), run.last("a").finish) == (4, "length")


def test_a_stop_string_finishes_by_stop_and_is_the_stop_reason_O_REQ_3d() -> None:
    delta = last_delta(b"one two three", stop=("two", "three"))
    assert (delta.offset, delta.finish, delta.stop) == (6, "stop", "two")


def test_a_stop_id_finishes_by_stop_and_is_the_stop_reason_O_REQ_3e() -> None:
    engine, _ = engine_of()
    run = run_all(engine, [make_request("a", 5, max_tokens=9, stop_token_ids=(7,))])
    last = run.last("a")
    assert (last.id, last.finish, last.stop_id) == (7, "stop", 7)
    text = ChoiceText(BYTES, processes.make_request("r", b"p", stop_token_ids=(66,)), ())
    delta = text.push(TokenOut(RequestId("r"), 1, 0, 0, 66, finish="stop", stop_id=66))
    assert (delta.finish, delta.stop) == ("stop", 66)


def test_with_ignore_eos_generation_continues_after_eos_O_REQ_3f() -> None:
    engine, _ = engine_of(script=lambda sample: EOS)
    run = run_all(engine, [make_request("a", 5, max_tokens=3, ignore_eos=True)])
    assert (run.ids("a"), run.last("a").finish) == ([EOS] * 3, "length")


def test_a_finished_request_holds_no_blocks_and_is_reported_once_O_REQ_4() -> None:
    engine, _ = engine_of(num_blocks=8)
    run = Run()
    engine.submit(make_request("short", 20, max_tokens=2))
    engine.submit(make_request("long", 20, max_tokens=9))
    step_once(engine, run)
    held = 8 - engine.load().free_blocks
    result = step_once(engine, run)
    assert result.finished == ["short"]
    assert (queues(engine), engine.load().free_blocks) == ((0, 1), 8 - held // 2)
    drive(engine, into=run)
    assert run.finished == ["short", "long"]
    assert [token.finish for token in run.tokens if token.request == "short"] == [None, "length"]


# --- the offline API ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return LLM(tiny_model("qwen3-gqa4"), dtype="float32", threads=1, kv_blocks=200)


def greedy(most: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, **params)


def test_offline_a_stop_string_at_the_last_token_finishes_by_length_O_REQ_3b_O_REQ_3d(
    llm: LLM,
) -> None:
    prompt = prompt_of(20, seed=3)
    [whole] = llm.generate(prompt, greedy(24))[0].outputs
    stop = next(char for char in whole.text[4:] if char.isascii() and char not in whole.text[:4])
    [choice] = llm.generate(prompt, greedy(24, stop=(stop,)))[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    [choice] = llm.generate(prompt, greedy(len(choice.token_ids), stop=(stop,)))[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_results_are_in_the_order_of_the_prompts_O_REQ_5(llm: LLM) -> None:
    prompts = [prompt_of(3 + index, seed=5) for index in range(11)]
    # Later prompts finish first.
    lengths = [greedy(12 - index) for index in range(11)]
    outputs = llm.generate(prompts, lengths)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(12, 1, -1))
    numbers = [int(output.request_id.rsplit("-", 1)[1]) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 11))


def test_one_set_of_parameters_applies_to_all_prompts_O_REQ_6(llm: LLM) -> None:
    outputs = llm.generate([prompt_of(3), prompt_of(9)], greedy(5))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "ids"])
def test_an_empty_prompt_is_refused_O_REQ_6(llm: LLM, prompt: str | list[int]) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.generate([prompt], greedy(5))
