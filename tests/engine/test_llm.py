"""The offline API (LLM): kinds of prompts, stop strings, choices, chats, structured output and
errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton_engine import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import ModelError, PinRefused
from baton_engine.interface import StepResult
from baton_engine.llm_engine import LLMEngine
from baton_engine.offline.parameters import wire_params
from baton_protocol.errors import InvalidRequest, NotEnoughMemory, PromptTooLong
from baton_protocol.request import Request
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.short_of_memory import ShortOfMemory, samples_of
from tests.support.engines.tiny_models import prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def make_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", threads=1, kv_blocks=200)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return make_llm(tiny_model("qwen3-gqa4"))


@pytest.fixture(autouse=True)
def _engine_is_idle_and_consistent_afterwards(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.check_integrity()
    assert not llm.engine.has_work()


def test_ids_equal_those_of_transformers(llm: LLM, tiny_model: Callable[[str], Path]) -> None:
    prompts = [prompt_of(length, seed=1) for length in (1, 16, 40, 100)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert output.prompt_token_ids == prompt
        [choice] = output.outputs
        expected = reference(tiny_model("qwen3-gqa4"), prompt, 24, choice.token_ids)
        compare(expected, choice.token_ids, Tally())
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_a_request_without_memory_for_a_step_of_its_own_raises_and_the_next_one_runs(
    tiny_model: Callable[[str], Path],
) -> None:
    llm = make_llm(tiny_model("qwen3-gqa4"))
    assert isinstance(llm.engine, EngineCore)
    runner = ShortOfMemory(llm.engine.runner, lambda number, rows: samples_of(rows) > 4)
    llm.llm_engine.engine_core = EngineCore(llm.engine.info, runner)
    huge = SamplingParams(temperature=1.0, n=6, max_tokens=3)
    with pytest.raises(NotEnoughMemory, match="1 token and 6 choices"):
        llm.generate([prompt_of(9, seed=1)], huge)
    assert not llm.engine.has_work()
    [output] = llm.generate([prompt_of(9, seed=1)], GREEDY)
    assert len(output.outputs[0].token_ids) == 24


def test_a_text_is_tokenized_and_its_output_is_text(
    llm: LLM, tiny_model: Callable[[str], Path]
) -> None:
    from tokenizers import Tokenizer

    [output] = llm.generate("the cache", GREEDY)
    [same] = llm.generate(output.prompt_token_ids, GREEDY)
    assert (output.prompt, same.prompt) == ("the cache", None)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    tokenizer = Tokenizer.from_file(str(tiny_model("qwen3-gqa4") / "tokenizer.json"))
    assert output.prompt_token_ids == tokenizer.encode("the cache").ids
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids) != ""


def test_a_stop_string_finishes_a_choice_and_is_not_in_its_text(llm: LLM) -> None:
    [whole] = llm.generate(prompt_of(20, seed=3), GREEDY)
    text = whole.outputs[0].text
    stop = next(char for char in text[4:] if char.isascii() and char not in text[:4])
    [output] = llm.generate(
        prompt_of(20, seed=3),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,)),
    )
    [choice] = output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == text[: text.index(stop)]
    assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
    assert len(choice.token_ids) < 24


def test_a_stop_id_finishes_a_choice_and_is_its_stop_reason(llm: LLM) -> None:
    [whole] = llm.generate(prompt_of(20, seed=3), GREEDY)
    ids = whole.outputs[0].token_ids
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(ids[3],))
    [choice] = llm.generate(prompt_of(20, seed=3), params)[0].outputs
    assert choice.token_ids == ids[: ids.index(ids[3]) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[3])


@pytest.mark.parametrize("included", [False, True])
def test_the_text_of_a_stop_id_is_included_only_on_request(llm: LLM, included: bool) -> None:
    prompt = prompt_of(20, seed=3)
    ids = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    end = next(at for at, id in enumerate(ids) if at > 2 and id not in ids[:at])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        ignore_eos=True,
        stop_token_ids=(ids[end],),
        include_stop_str_in_output=included,
        skip_special_tokens=False,
    )
    [choice] = llm.generate(prompt, params)[0].outputs
    assert choice.token_ids == ids[: end + 1]
    length = msgspec.structs.replace(GREEDY, max_tokens=end + included, skip_special_tokens=False)
    assert choice.text == llm.generate(prompt, length)[0].outputs[0].text


def test_logprobs_include_the_texts_of_their_tokens(
    llm: LLM, tiny_model: Callable[[str], Path]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model("qwen3-gqa4") / "tokenizer.json"))
    params = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    [output] = llm.generate(prompt_of(9, seed=6), params)
    logprobs = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    candidates = [one for each in logprobs if each for one in (each.sampled, *each.top)]
    assert len(candidates) == 8 * 2 + 3 * 4
    for one in candidates:
        assert one.text == tokenizer.decode([one.id], skip_special_tokens=False)
        assert one.raw.decode("utf-8", "replace") == one.text


def test_choices_of_a_seed_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=16, ignore_eos=True)
    first = llm.generate(prompt_of(30, seed=5), params)[0].outputs
    again = llm.generate(prompt_of(30, seed=5), params)[0].outputs
    assert [each.index for each in first] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in first}) == 3
    assert [each.token_ids for each in first] == [each.token_ids for each in again]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seeded_request_alone_is_reproducible(
    tiny_model: Callable[[str], Path], dtype: str
) -> None:
    """docs/api.md guarantees this, also in bf16. Each run has a new engine, so both start with an
    empty cache."""
    params = SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=24, ignore_eos=True)
    results = []
    for _ in range(2):
        alone = LLM(tiny_model("qwen3-gqa4"), dtype=dtype, threads=1, kv_blocks=50)
        outputs = alone.generate(prompt_of(30, seed=5), params)[0].outputs
        results.append([each.token_ids for each in outputs])
    assert results[0] == results[1]


def test_two_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=32, ignore_eos=True)
    one, two = llm.generate([prompt_of(9, seed=6)] * 2, params)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids


def test_a_choice_has_one_logprobs_record_per_token(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2, logprob_token_ids=(7, 9)
    )
    [choice] = llm.generate(prompt_of(9, seed=6), params)[0].outputs
    assert choice.logprobs is not None
    assert [each.sampled.id for each in choice.logprobs] == choice.token_ids
    assert all(len(each.top) == 2 for each in choice.logprobs)
    assert all([named.id for named in each.named] == [7, 9] for each in choice.logprobs)
    total = sum(each.sampled.logprob for each in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(total)
    assert llm.generate(prompt_of(9, seed=6), GREEDY)[0].outputs[0].cumulative_logprob is None


def test_prompt_logprobs_have_an_entry_for_each_prompt_token_but_the_first(llm: LLM) -> None:
    prompt = prompt_of(30, seed=6)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    for _ in range(2):  # the second time the prompt is cached, but is computed again
        [output] = llm.generate(prompt, params)
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        assert [each.sampled.id for each in rest if each] == prompt[1:]
        assert [len(each.top) for each in rest if each] == [2] * 29
        assert output.cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].prompt_logprobs is None


@pytest.mark.parametrize("penalty", [0.8, 1.4])
def test_a_repetition_penalty_gives_the_ids_of_transformers(
    llm: LLM, tiny_model: Callable[[str], Path], penalty: float
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(40, seed=1)
    folder = tiny_model("qwen3-gqa4")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=penalty,
    )[0, len(prompt) :].tolist()
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=penalty
    )
    [output] = llm.generate(prompt, params)
    assert output.outputs[0].token_ids == expected
    assert expected != llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def test_parameters_that_name_ids_are_applied_and_ids_out_of_range_refused(llm: LLM) -> None:
    prompt = prompt_of(20, seed=3)
    ids = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids

    def ids_with(**params: Any) -> list[int]:
        values = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **params)
        return llm.generate(prompt, values)[0].outputs[0].token_ids

    assert set(ids_with(logit_bias=((5, 100.0),))) == {5}
    assert set(ids_with(allowed_token_ids=(5, 6, 7))) <= {5, 6, 7}
    bad, word = ids[5], tuple(ids[5:7])
    assert bad not in ids_with(bad_words=((bad,),))
    assert word not in set(pairwise(ids_with(bad_words=(word,))))
    with pytest.raises(InvalidRequest, match=r"logit_bias holds token id 320, .* \(0\.\.319\)"):
        ids_with(logit_bias=((320, 1.0),))


def test_a_second_request_uses_the_cached_prefix(llm: LLM) -> None:
    prompt = prompt_of(100, seed=77)
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 96


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate([prompt_of(9, seed=1)] * 2, [GREEDY, short])
    assert [len(each.outputs[0].token_ids) for each in outputs] == [24, 3]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        llm.generate([prompt_of(9, seed=1)] * 2, [GREEDY])


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    [same] = llm.generate(rendered, GREEDY)
    assert output.prompt_token_ids == same.prompt_token_ids
    two = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]])
    assert len(two) == 2


def test_an_invalid_request_raises_and_leaves_no_request_running(llm: LLM) -> None:
    valid = prompt_of(9, seed=1)
    with pytest.raises(PromptTooLong, match="2000"):
        llm.generate([valid, prompt_of(2000, seed=1)], GREEDY)
    assert not llm.engine.has_work()
    with pytest.raises(InvalidRequest, match="top_p is 0"):
        llm.generate(valid, SamplingParams(top_p=0.0))
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[]], GREEDY)
    assert len(llm.generate(valid, GREEDY)[0].outputs[0].token_ids) == 24


ALLOWED: dict[str, Any] = {
    "allowed_token_ids": (60, 61, 62, 63),
    "max_tokens": 6,
    "temperature": 0.0,
    "seed": 1,
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bad_words": [[60, 61], [62]]}, {"bad_words": ((60, 61), (62,))}),
        ({"allowed_token_ids": [60, 61]}, {"allowed_token_ids": (60, 61)}),
        ({"logit_bias": {61: 50.0}}, {"logit_bias": ((61, 50.0),)}),
        ({"stop": "END"}, {"stop": ("END",)}),
        (dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "bad_words")), {}),
    ],
)
def test_parameters_are_accepted_in_the_forms_that_vllm_accepts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    submitted = []
    submit = llm.engine.submit

    def recording(request: Request, **more: Any) -> None:
        submitted.append(request.params)
        submit(request, **more)

    monkeypatch.setattr(llm.engine, "submit", recording)
    prompt = prompt_of(9, seed=2)
    params = [SamplingParams(**(ALLOWED | each)) for each in (given, expected)]
    loose, strict = llm.generate([prompt, prompt], params)
    assert submitted == [wire_params(params[1])] * 2
    assert loose.outputs == strict.outputs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["foo"]),
        ("stop", 3),
        ("logit_bias", {"a": 1.0}),
        ("stop_token_ids", ["x"]),
        ("max_tokens", "5"),
    ],
)
def test_the_error_for_a_value_of_a_wrong_type_names_its_field(
    llm: LLM, field: str, value: object
) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest, match=rf"\$\.{field}") as error:
        llm.generate(prompt_of(9, seed=2), SamplingParams(**wrong))
    assert error.value.param == field


def test_a_model_without_a_tokenizer_accepts_only_ids(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "bare"
    ignored = shutil.ignore_patterns(".*", "tokenizer*")
    shutil.copytree(tiny_model("qwen3-gqa4"), folder, ignore=ignored)
    ids_only = make_llm(folder)
    [output] = ids_only.generate(prompt_of(9, seed=1), GREEDY)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (24, "")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ids_only.generate("text", GREEDY)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ids_only.generate(prompt_of(9, seed=1), SamplingParams(stop=("x",)))


DATE = r"\d{4}-\d\d-\d\d"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_matches_its_constraint(llm: LLM, temperature: float) -> None:
    constraints = [
        StructuredOutputsParams(json={"enum": [["a", 1], ["b", 2]]}),
        StructuredOutputsParams(regex=DATE),
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(grammar='root ::= "x" "y"* "z"'),
        GuidedDecodingParams(regex="[ab]{4}"),
    ]
    patterns = [r'\[\s*"(a"\s*,\s*1|b"\s*,\s*2)\s*\]', DATE, "yes|no", "xy*z", "[ab]{4}"]
    params = [
        SamplingParams(temperature=temperature, seed=5, max_tokens=40, structured=each)
        for each in constraints
    ]
    for output, pattern in zip(
        llm.generate(["the"] * len(constraints), params), patterns, strict=True
    ):
        [choice] = output.outputs
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text), choice.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "0 are given"),
        ({"regex": "a", "choice": ["b"]}, "2 are given"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"regex": "("}, "unclosed group"),
        ({"choice": []}, "at least one string"),
    ],
)
def test_invalid_structured_output_parameters_are_refused(
    llm: LLM, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate("the", SamplingParams(structured=StructuredOutputsParams(**params)))


def test_prompts_with_a_lower_priority_run_first_and_ids_are_the_same(
    tiny_model: Callable[[str], Path],
) -> None:
    prompts = [prompt_of(9, seed=seed) for seed in range(3)]
    params = msgspec.structs.replace(GREEDY, max_tokens=3)
    folder = tiny_model("qwen3-gqa4")
    one = LLM(
        folder,
        dtype="float32",
        threads=1,
        kv_blocks=200,
        max_num_seqs=1,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    )
    plain = one.generate(prompts, params)
    steps: list[str] = []
    step = one.engine.step

    def watched() -> StepResult:
        result = step()
        steps.extend(result.finished)
        return result

    one.engine.step = watched  # type: ignore[method-assign]
    outputs = one.generate(prompts, params, priority=[2, -1, 0])
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in plain
    ]
    assert steps == [outputs[at].request_id for at in (1, 2, 0)]
    assert [output.cached_tokens for output in outputs] == [0, 0, 0]
    with pytest.raises(ValueError, match="3 prompts and 2 priorities"):
        one.generate(prompts, params, priority=[1, 2])


def test_a_reset_or_a_request_that_skips_it_leaves_the_prefix_cache_unused(llm: LLM) -> None:
    prompt = prompt_of(40, seed=77)
    skip = msgspec.structs.replace(GREEDY, skip_reading_prefix_cache=True)
    runs = [llm.generate(prompt, params)[0] for params in (GREEDY, GREEDY, skip)]
    assert llm.reset_prefix_cache()
    runs.append(llm.generate(prompt, GREEDY)[0])
    assert [run.cached_tokens for run in runs] == [0, 32, 0, 0]
    assert len({tuple(run.outputs[0].token_ids) for run in runs}) == 1


def test_a_pinned_prompt_stays_cached_under_a_flood_and_answers_have_equal_bits(
    tiny_model: Callable[[str], Path],
) -> None:
    llm = make_llm(tiny_model("qwen3-gqa4"))
    prefix, params = prompt_of(64, seed=78), msgspec.structs.replace(GREEDY, logprobs=3)
    tails = [prompt_of(7, seed=seed) for seed in (79, 80)]
    prompts = [[*prefix, *tail] for tail in tails]
    fresh = llm.generate(prompts, params)
    llm.reset_prefix_cache()
    name = llm.pin_prefix(prefix)
    flood = msgspec.structs.replace(GREEDY, max_tokens=2)
    llm.generate([prompt_of(300, seed=seed) for seed in range(90, 102)], flood)
    llm.engine.check_integrity()
    hits = llm.generate(prompts, params)
    assert [hit.cached_tokens for hit in hits] == [64, 64]
    for one, other in zip(fresh, hits, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert llm.unpin_prefix(name)
    assert not llm.unpin_prefix(name)
    llm.generate([prompt_of(300, seed=seed) for seed in range(110, 122)], flood)
    assert llm.generate(prompts[0], params)[0].cached_tokens == 0


def test_a_pinned_prompt_is_unpinned_when_its_time_is_over_and_one_too_large_is_refused(
    tiny_model: Callable[[str], Path],
) -> None:
    core, now = make_llm(tiny_model("qwen3-gqa4")).engine, 0.0
    llm = LLM.from_engine(LLMEngine(core, None, clock=lambda: now))
    llm.pin_prefix(prompt_of(40, seed=1), ttl_s=5.0)
    now = 4.9
    llm.generate([1, 2, 3], GREEDY)
    assert core.load().pinned_blocks == 2
    now = 5.0
    llm.generate([1, 2, 3], GREEDY)
    assert core.load().pinned_blocks == 0
    with pytest.raises(
        PinRefused, match=r"51 blocks; 50 of 200 blocks .*fraction 0\.25.*, and 0 are"
    ):
        llm.pin_prefix(prompt_of(16 * 51, seed=2))
    core.check_integrity()
