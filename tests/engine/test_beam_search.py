"""Beam search gives the answers of transformers, and leaves nothing in the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, BeamSearchParams
from baton_protocol.errors import InvalidRequest
from tests.support.engines.beam_reference import (
    MODELS,
    RULES,
    STOPS,
    WIDTHS,
    beam_answers,
    beam_params,
    check_answers,
)
from tests.support.engines.tiny_models import prompt_of

Folders = Callable[[str], Path]


def make_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", threads=1, kv_blocks=200)


@pytest.fixture(scope="module")
def llm(tiny_model: Folders) -> LLM:
    return make_llm(tiny_model(MODELS[0]))


def check_search(llm: LLM, folder: Path, width: int, rule: int, prompt: list[int]) -> None:
    params = beam_params(width, rule, logprobs=0)
    [output] = llm.generate(prompt, params)
    expected = beam_answers(folder, prompt, params)
    label = f"{folder.name}, {width} beams, {RULES[rule]}, prompt of {len(prompt)}"
    check_answers(expected, [choice.token_ids for choice in output.outputs], label)
    for choice in output.outputs:
        ends = choice.token_ids[-1] in STOPS and len(choice.token_ids) < 18
        assert choice.finish_reason == ("stop" if ends else "length")
        assert choice.logprobs is not None
        assert [each.sampled.id for each in choice.logprobs] == choice.token_ids
    llm.engine.check_integrity()
    assert not llm.engine.has_work()
    load = llm.engine.load()
    assert load.free_blocks == load.total_blocks


@pytest.mark.parametrize("width", WIDTHS)
def test_answers_are_those_of_transformers(llm: LLM, tiny_model: Folders, width: int) -> None:
    check_search(llm, tiny_model(MODELS[0]), width, 0, prompt_of(16, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers_by_each_rule(name: str, tiny_model: Folders) -> None:
    folder = tiny_model(name)
    llm = make_llm(folder)
    for width in WIDTHS:
        for rule in range(len(RULES)):
            for length in (1, 16, 33, 70):
                check_search(llm, folder, width, rule, prompt_of(length, seed=length))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-gqa4", "mistral-window"])
def test_bits_do_not_depend_on_the_batch_or_the_size_of_the_cache(
    name: str, tiny_model: Folders
) -> None:
    """Also where so few blocks or sequences are left that beams are preempted and fork late."""
    folder = tiny_model(name)
    prompts = [prompt_of(length, seed=length) for length in (30, 61, 90)]
    params = [beam_params(width, logprobs=2) for width in (4, 2, 3)]
    alone = make_llm(folder)
    expected = [
        alone.generate(prompt, each)[0].outputs
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for more in ({"kv_blocks": 8}, {"max_num_seqs": 2}, {"max_batched_tokens": 16}):
        options: dict[str, Any] = {"kv_blocks": 60} | more
        llm = LLM(folder, dtype="float32", threads=1, **options)
        found = [output.outputs for output in llm.generate(prompts, params)]
        assert found == expected, more
        assert llm.engine.load().preemptions_total > 0 or "max_batched_tokens" in more
        llm.engine.check_integrity()


def test_beam_search_has_vllms_form(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, temperature=0.7)
    [first, second] = llm.beam_search(["the cache", "a node"], params)
    assert len(first.sequences) == len(second.sequences) == 3
    scores = [answer.score for answer in first.sequences]
    assert scores == sorted(scores, reverse=True)
    best = first.sequences[0]
    assert best.text is not None
    assert best.text.startswith("the cache")
    assert best.score == pytest.approx(best.cum_logprob / len(best.logprobs))
    prompt = len(best.tokens) - len(best.logprobs)
    [by_ids] = llm.beam_search([best.tokens[:prompt]], params)
    assert [answer.tokens for answer in by_ids.sequences] == [
        answer.tokens for answer in first.sequences
    ]


def test_what_a_search_does_not_follow_is_refused(llm: LLM) -> None:
    for more in ({"min_tokens": 2}, {"stop": ("x",)}, {"repetition_penalty": 1.1}):
        [name] = more
        with pytest.raises(InvalidRequest, match=f"use_beam_search does not go with {name}"):
            llm.generate(prompt_of(4), beam_params(2, **more))
