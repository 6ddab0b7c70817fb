"""Seeded sampling gives the same ids on any node and in any batch, and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.http import Json, all_at_once, complete, ids_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.baton_up import Pool

MODEL = "qwen3-gqa2"
PROMPTS = [prompt_of(length, seed=9) for length in (5, 32, 47, 100, 200, 333)]
FIELDS = {"max_tokens": 48, "temperature": 1.0, "seed": 1234, "ignore_eos": True}


def flags(folder: Path, prefill: int) -> list[str]:
    return [
        *("--model", str(folder), "--dtype", "float32", "--threads", "1", "--kv-blocks", "800"),
        *("--prefill", str(prefill), "--decode", "1", "--chunk-blocks", "1"),
        *("--handoff", "always" if prefill else "auto"),
    ]


@pytest.fixture(scope="module")
def aggregated(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    with Pool(flags(tiny_model(MODEL), prefill=0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def disaggregated(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    with Pool(flags(tiny_model(MODEL), prefill=1)) as pool:
        yield pool


# What followed the last token where it last occurred, which is right where a text repeats.
DRAFTS = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5}'
GREEDY = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
# How answers end or are sampled, with fields that depend on the answer without drafts.
ENDINGS: dict[str, Callable[[Json], Json]] = {
    "greedy, logprobs": lambda whole: GREEDY | {"logprobs": 3},
    "sampled, logprobs": lambda whole: FIELDS | {"logprobs": 3, "logprob_token_ids": [5, 9]},
    "three choices": lambda whole: FIELDS | {"n": 3, "logprobs": 1},
    "penalties": lambda whole: FIELDS | {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "a limit": lambda whole: GREEDY | {"max_tokens": 29},
    "a stop id": lambda whole: GREEDY | {"stop_token_ids": [whole["token_ids"][-1]]},
    "a stop id after a minimum": lambda whole: (
        GREEDY | {"stop_token_ids": [whole["token_ids"][-1]], "min_tokens": 31}
    ),
    "a stop string": lambda whole: GREEDY | {"stop": [whole["text"][-9:-4]], "min_tokens": 20},
}


@pytest.mark.long
def test_answers_with_drafts_are_those_without_however_they_end(
    aggregated: Pool, tiny_model: Callable[[str], Path]
) -> None:
    with Pool([*flags(tiny_model(MODEL), prefill=1), "--speculative-config", DRAFTS]) as drafting:
        for prompt in PROMPTS:
            [whole] = complete(aggregated.url, prompt, **GREEDY).body["choices"]
            for name, ending in ENDINGS.items():
                found, expected = (
                    complete(pool.url, prompt, **ending(whole)).body["choices"]
                    for pool in (drafting, aggregated)
                )
                assert found == expected, (name, len(prompt))
        totals = drafting.totals()
        assert totals["drafted_tokens_total"] > totals["accepted_drafts_total"] > 30
        assert totals["handoffs_total"] > 0


def test_a_seeded_request_has_the_same_ids_alone_in_a_batch_and_disaggregated(
    aggregated: Pool, disaggregated: Pool
) -> None:
    alone = [ids_of(complete(aggregated.url, prompt, **FIELDS)) for prompt in PROMPTS]
    assert len({tuple(ids) for [ids] in alone}) == len(PROMPTS)
    for pool in (aggregated, disaggregated):
        assert [ids_of(each) for each in all_at_once(pool.url, PROMPTS, **FIELDS)] == alone
    assert disaggregated.totals()["reused_chunks_total"] > 0


def test_three_choices_differ_and_equal_those_of_the_aggregated_pool(
    aggregated: Pool, disaggregated: Pool
) -> None:
    prompt = prompt_of(70, seed=11)
    actual = ids_of(complete(disaggregated.url, prompt, n=3, **FIELDS))
    expected = ids_of(complete(aggregated.url, prompt, n=3, **FIELDS))
    assert len({tuple(ids) for ids in actual}) == 3
    assert actual == expected


def test_a_beam_search_has_the_same_answers_with_a_hand_off(
    aggregated: Pool, disaggregated: Pool
) -> None:
    prompt = prompt_of(90, seed=14)
    fields = {"use_beam_search": True, "n": 4, "max_tokens": 24, "logprobs": 1}
    expected = complete(aggregated.url, prompt, **fields).body["choices"]
    before = disaggregated.totals()["handoffs_total"]
    assert complete(disaggregated.url, prompt, **fields).body["choices"] == expected
    assert disaggregated.totals()["handoffs_total"] == before + 1
    assert len({tuple(choice["token_ids"]) for choice in expected}) == 4


def test_best_of_shows_the_choices_of_the_largest_sums(aggregated: Pool) -> None:
    prompt = prompt_of(40, seed=15)
    every = complete(aggregated.url, prompt, n=4, logprobs=0, **FIELDS).body["choices"]
    best = complete(aggregated.url, prompt, n=2, best_of=4, **FIELDS)
    sums = {tuple(each["token_ids"]): sum(each["logprobs"]["token_logprobs"]) for each in every}
    expected = sorted(sums, key=lambda ids: -sums[ids])[:2]
    assert [tuple(ids) for ids in ids_of(best)] == expected
    assert [each["index"] for each in best.body["choices"]] == [0, 1]
    assert best.body["choices"][0]["logprobs"] is None
    assert best.body["usage"]["completion_tokens"] == 4 * FIELDS["max_tokens"]


def test_choice_0_does_not_depend_on_the_number_of_choices(aggregated: Pool) -> None:
    prompt = prompt_of(40, seed=12)
    three = ids_of(complete(aggregated.url, prompt, n=3, **FIELDS))
    assert ids_of(complete(aggregated.url, prompt, **FIELDS))[0] == three[0]


def test_two_requests_without_a_seed_differ_over_http(aggregated: Pool) -> None:
    fields = {key: value for key, value in FIELDS.items() if key != "seed"}
    prompt = prompt_of(40, seed=13)
    completions = [complete(aggregated.url, prompt, **fields) for _ in range(2)]
    assert ids_of(completions[0]) != ids_of(completions[1])
