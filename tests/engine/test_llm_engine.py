"""LLMEngine over the simulated engine: which outputs a request has, and what they say."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine import LLM, LLMEngine, RequestOutputKind, SamplingParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineAsleep
from baton_engine.interface import PauseMode
from baton_engine.offline.outputs import RequestOutput
from baton_engine.offline.prompts import Prompt
from baton_protocol.errors import InvalidRequest, NotEnoughMemory, PromptTooLong
from tests.support.engines.offline import answers, run_to_end, sim_llm_engine
from tests.support.engines.short_of_memory import ShortOfMemory, samples_of

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA
FINAL = RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return sim_llm_engine()


def outputs_of(
    engine: LLMEngine, kind: RequestOutputKind, interval: int | None = None, **more: Any
) -> list[RequestOutput]:
    params = SamplingParams(
        **({"max_tokens": 7, "seed": 5, "logprobs": 1} | more),
        output_kind=kind,
        stream_interval=interval,
    )
    engine.add_request("a", "hello", params)
    return run_to_end(engine)["a"]


@pytest.mark.parametrize(
    ("kind", "interval", "lengths"),
    [
        (CUMULATIVE, None, [1, 2, 3, 4, 5, 6, 7]),
        (CUMULATIVE, 3, [1, 4, 7]),
        (CUMULATIVE, 4, [1, 5, 7]),
        (DELTA, None, [1] * 7),
        (DELTA, 3, [1, 3, 3]),
        (DELTA, 100, [1, 6]),
        (FINAL, 3, [7]),
    ],
)
def test_outputs_are_as_the_kind_and_the_interval_say(
    engine: LLMEngine, kind: RequestOutputKind, interval: int | None, lengths: list[int]
) -> None:
    [whole] = [output.outputs[0] for output in outputs_of(engine, FINAL)]
    outputs = outputs_of(engine, kind, interval)
    choices = [output.outputs[0] for output in outputs]
    assert [len(choice.token_ids) for choice in choices] == lengths
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [choice.finish_reason for choice in choices][:-1] == [None] * (len(outputs) - 1)
    assert choices[-1].finish_reason == "length"
    assert choices[-1].finished()
    if kind is DELTA:
        assert "".join(choice.text for choice in choices) == whole.text
        assert [id for choice in choices for id in choice.token_ids] == whole.token_ids
        assert [each for choice in choices for each in choice.logprobs or ()] == whole.logprobs
    else:
        for choice in choices:
            assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            assert whole.text.startswith(choice.text)
            assert len(choice.logprobs or ()) == len(choice.token_ids)
    assert choices[-1].cumulative_logprob == whole.cumulative_logprob is not None


def test_the_engine_s_interval_applies_where_a_request_s_is_smaller() -> None:
    engine = sim_llm_engine(stream_interval=5)
    assert [len(each.outputs[0].token_ids) for each in outputs_of(engine, CUMULATIVE, 2)] == [
        1,
        6,
        7,
    ]


def test_choices_end_one_by_one_and_deltas_hold_only_those_with_news(engine: LLMEngine) -> None:
    whole = outputs_of(engine, FINAL, n=3, max_tokens=30)[0].outputs
    stop = next(c for c in whole[0].text[8:] if c not in whole[0].text[:8])
    deltas = outputs_of(engine, DELTA, n=3, max_tokens=30, stop=(stop,))
    last = outputs_of(engine, FINAL, n=3, max_tokens=30, stop=(stop,))[0].outputs
    texts, ends = ["", "", ""], [0, 0, 0]
    for output in deltas:
        for choice in output.outputs:
            assert not ends[choice.index], "no output after a choice's end"
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finished()
    assert ends == [1, 1, 1]
    assert texts == [choice.text for choice in last]
    assert last[0].stop_reason == stop
    assert last[0].text == whole[0].text[: whole[0].text.index(stop)]
    every = outputs_of(engine, CUMULATIVE, n=3, max_tokens=30, stop=(stop,))
    assert all(len(output.outputs) == 3 for output in every)
    assert [choice.text for choice in every[-1].outputs] == texts


def test_metrics_tell_when_a_request_came_began_and_ended() -> None:
    now = iter(range(1000))
    engine = sim_llm_engine(max_num_seqs=1)
    engine._clock = lambda: float(next(now))
    for id in ("first", "second"):
        engine.add_request(id, "hello", SamplingParams(max_tokens=4, seed=1, output_kind=FINAL))
    outputs = run_to_end(engine)
    [first], [second] = outputs["first"], outputs["second"]
    assert first.metrics is not None
    assert second.metrics is not None
    for stats in (first.metrics, second.metrics):
        assert stats.queued_ts < stats.scheduled_ts < stats.first_token_ts < stats.last_token_ts
        assert stats.num_generation_tokens == 4
        assert stats.first_token_latency == stats.first_token_ts - stats.queued_ts
        assert stats.arrival_time > 1e9, "Unix time"
    assert second.metrics.scheduled_ts > first.metrics.last_token_ts, "it waited for its turn"


def test_an_aborted_request_has_no_more_outputs_and_its_blocks_are_free(engine: LLMEngine) -> None:
    for id in ("a", "b", "c"):
        engine.add_request(id, f"hello {id}", SamplingParams(max_tokens=20, seed=1))
    assert engine.get_num_unfinished_requests() == 3
    while not engine.step():
        pass
    engine.abort_request("a")
    engine.abort_request(["b", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    assert set(run_to_end(engine)) == {"c"}
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_sleep_forgets_the_requests_or_keeps_the_outputs_of_their_ends(
    engine: LLMEngine, mode: PauseMode
) -> None:
    params = SamplingParams(max_tokens=20, seed=1)
    undisturbed = answers(engine, ["a"], [params])
    engine.add_request("a", "a", params)
    engine.step()
    engine.sleep(2, mode)
    assert engine.is_sleeping()
    assert engine.has_unfinished_requests() == (mode == "wait")
    outputs = run_to_end(engine)
    assert list(outputs) == (["a"] if mode == "wait" else [])
    if mode == "wait":
        assert outputs["a"][-1].outputs[0].text == undisturbed[0].outputs[0].text
    with pytest.raises(EngineAsleep):
        engine.add_request("b", "a", params)
    engine.wake_up()
    again = answers(engine, ["a"], [params])
    assert again[0].outputs[0].text == undisturbed[0].outputs[0].text


def test_a_request_that_cannot_run_is_refused_and_leaves_nothing(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=4)
    engine.add_request("a", "hello", params)
    refused: list[tuple[type[Exception], str, Prompt, SamplingParams]] = [
        (ValueError, "running already", "hello", params),
        (PromptTooLong, "8193 tokens", [65] * 8193, params),
        (InvalidRequest, "token id 259", [259], params),
        (InvalidRequest, "stream_interval is 0", "x", SamplingParams(stream_interval=0)),
        (InvalidRequest, "output_kind is 2", "x", SamplingParams(output_kind=2)),  # type: ignore[arg-type]
        (InvalidRequest, "'multi_modal_data'", {"prompt": "x", "multi_modal_data": 1}, params),
        (InvalidRequest, "neither 'prompt' nor", {"cache_salt": "x"}, params),
    ]
    for kind, message, prompt, each in refused:
        with pytest.raises(kind, match=message):
            engine.add_request("a" if kind is ValueError else "b", prompt, each)
    assert set(run_to_end(engine)) == {"a"}


def test_a_request_that_fails_ends_with_its_error_and_the_others_go_on() -> None:
    engine = sim_llm_engine()
    core = engine.engine_core
    runner = ShortOfMemory(core.runner, lambda number, rows: samples_of(rows) > 4)
    engine.engine_core = EngineCore(core.info, runner)
    engine.add_request("huge", "hello", SamplingParams(max_tokens=3, seed=1, n=6))
    engine.add_request("small", "hello", SamplingParams(max_tokens=3, seed=1))
    outputs = run_to_end(engine)
    [huge] = outputs["huge"]
    assert isinstance(huge.error, NotEnoughMemory)
    assert huge.finished
    assert outputs["small"][-1].outputs[0].finish_reason == "length"
    assert outputs["small"][-1].error is None


def test_prompts_in_all_forms_are_the_same_prompt(engine: LLMEngine) -> None:
    ids = list(b"hello")
    forms: list[Prompt] = ["hello", ids, tuple(ids), {"prompt": "hello"}]
    forms += [{"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "shown"}]
    forms += [{"prompt": "hello", "cache_salt": "mine"}]
    params = [SamplingParams(max_tokens=5, seed=3)] * len(forms)
    outputs = answers(engine, forms, params)
    assert [output.prompt_token_ids for output in outputs] == [ids] * len(forms)
    assert [output.prompt for output in outputs] == [
        *("hello", None, None, "hello"),
        *(None, "shown", "hello"),
    ]
    assert len({output.outputs[0].text for output in outputs}) == 1


def test_a_salt_keeps_a_prompt_s_kv_to_itself(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=2, seed=3)
    ids = list(range(32, 96))
    found = []
    for salt in ("", "one", "one", "two", ""):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        found.append(answers(engine, [prompt], [params])[0].num_cached_tokens)
    assert found == [0, 0, 48, 0, 48]


@pytest.mark.parametrize(("seed", "equal"), [(7, True), (None, False)])
def test_a_seed_of_the_engine_makes_requests_without_one_reproducible(
    seed: int | None, equal: bool
) -> None:
    params = [SamplingParams(max_tokens=8)] * 2
    runs = [
        [
            output.outputs[0].text
            for output in answers(sim_llm_engine(seed=seed), ["a", "a"], params)
        ]
        for _ in range(2)
    ]
    assert (runs[0] == runs[1]) is equal
    assert runs[0][0] != runs[0][1]


class Bar:
    """Stands in for tqdm, and records what it would show."""

    def __init__(self, **given: Any) -> None:
        self.given, self.shown, self.count, self.closed = given, list[str](), 0, False

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.shown.append(text)

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def test_the_bar_counts_prompts_and_shows_both_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM.from_engine(sim_llm_engine())
    bars: list[Bar] = []

    def make(**given: Any) -> Bar:
        bars.append(Bar(**given))
        return bars[-1]

    params = SamplingParams(max_tokens=4, seed=1, output_kind=DELTA)
    outputs = llm.generate(["a", "bb", "ccc"], params, use_tqdm=make)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4, 4], "whole answers"
    [bar] = bars
    assert (bar.given["total"], bar.count, bar.closed) == (3, 3, True)
    speeds = [float(part.split()[1]) for part in bar.shown[-1].split(", ")]
    assert speeds[1] / speeds[0] == pytest.approx(12 / 6, rel=0.01)
    with pytest.raises(PromptTooLong):
        llm.generate([[65] * 9000], params, use_tqdm=make)
    assert not capsys.readouterr().err
    llm.generate("a", params, use_tqdm=False)
    assert not capsys.readouterr().err
    llm.generate("a", params)
    assert "Processed prompts" in capsys.readouterr().err
