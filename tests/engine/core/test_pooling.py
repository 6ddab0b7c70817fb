"""Requests of pooling models in the engine's core: answers, limits, blocks and preemption, on the
simulated engine, whose vectors depend on all KV bytes before them."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import SettingsError
from baton_engine.sim.build import SimSettings, build_sim
from baton_engine.sim.model import VECTOR_SIZE
from baton_engine.vectors import numbers_of
from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.request import Request
from baton_protocol.sampling import StructuredOutput
from tests.support.engines.engine_core import drive, make_request, run_all
from tests.support.engines.pooling import pooling_request, vectors, vectors_alone

PROMPTS = [
    [(seed * 7 + place) % 200 for place in range(length)]
    for seed, length in enumerate((1, 3, 4, 5, 30, 31, 64, 100))
]


def sim(**settings: Any) -> EngineCore:
    return build_sim(
        SimSettings(**{"block_size": 4, "chunk_blocks": 2, "runner": "pooling", **settings})
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"max_batched_tokens": 7},
        {"max_batched_tokens": 7, "overlap": True, "num_blocks": 30},
        {"max_num_seqs": 2, "overlap": True},
    ],
)
def test_a_vector_depends_on_its_prompt_alone(settings: dict[str, Any]) -> None:
    alone = vectors_alone(sim(), PROMPTS)
    assert len(set(alone)) == len(PROMPTS)
    assert all(len(numbers_of(each)) == VECTOR_SIZE for each in alone)
    engine = sim(**settings)
    assert vectors(engine, PROMPTS) == alone
    assert vectors(engine, PROMPTS) == alone  # with cached prefixes
    load = engine.load()
    assert load.free_blocks == load.total_blocks


def test_a_classifier_has_a_probability_for_each_class() -> None:
    engine = sim(classes=3, runner="auto")
    assert (engine.info.pooling, engine.info.vector_size) == ("classify", 3)
    for vector in vectors(engine, PROMPTS):
        assert sum(numbers_of(vector)) == pytest.approx(1.0)
    for vector in vectors(engine, PROMPTS, activate=False):
        assert all(-1 <= each < 1 for each in numbers_of(vector))


def test_the_prompt_s_sources_are_reported_and_cached_blocks_count() -> None:
    engine, prompt = sim(), PROMPTS[-1]
    assert run_all(engine, [pooling_request("a", prompt)]).use("a") == (0, 0, 100)
    assert run_all(engine, [pooling_request("b", prompt)]).use("b") == (96, 0, 4)


def test_an_aborted_request_has_no_vector() -> None:
    engine = sim(overlap=True, max_batched_tokens=16)
    engine.submit(pooling_request("a", PROMPTS[-1]))
    engine.submit(pooling_request("b", PROMPTS[-2]))
    engine.step()
    engine.abort(pooling_request("a", [1]).id)
    run = drive(engine)
    assert [each.request for each in run.complete] == ["b"]
    assert engine.load().free_blocks == engine.load().total_blocks


def with_params(**params: Any) -> Request:
    from msgspec.structs import replace

    request = pooling_request("a", [1])
    return replace(request, params=replace(request.params, **params))


@pytest.mark.parametrize(
    ("settings", "request_", "message"),
    [
        ({"runner": "generate"}, pooling_request("a", [1]), "start the nodes with --runner pool"),
        ({}, make_request("a", 3), "generates no tokens; use /v1/embeddings"),
        ({"classes": 2}, make_request("a", 3), "scores of classes and generates no tokens"),
        ({}, pooling_request("a", []), "the prompt is empty"),
        ({}, pooling_request("a", [999]), "token id 999"),
        ({}, pooling_request("a", [1], dimensions=33), "dimensions is 33; .* have 32: use 1 to 32"),
        ({}, pooling_request("a", [1], dimensions=0), "dimensions is 0"),
        ({"classes": 2}, pooling_request("a", [1], dimensions=1), "cannot be cut"),
        ({}, with_params(structured=StructuredOutput("{}")), "samples no tokens"),
        ({}, with_params(prompt_logprobs=1), "samples no tokens"),
        ({}, pooling_request("a", [1] * 41), "the input has 41 tokens; at most 40 fit"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_remedy(
    settings: dict[str, Any], request_: Request, message: str
) -> None:
    engine = sim(max_model_len=40, **settings)
    with pytest.raises(InvalidRequest, match=message) as raised:
        engine.submit(request_)
    assert isinstance(raised.value, PromptTooLong) == ("fit" in message)
    assert not engine.has_work()


def test_the_longest_prompt_needs_no_room_for_a_token() -> None:
    assert len(vectors(sim(max_model_len=40), [[1] * 40])) == 1
    assert len(vectors(sim(num_blocks=5), [[1] * 20])) == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="--runner is generate"):
        sim(runner="generate", classes=2)
    with pytest.raises(SettingsError, match="drafts tokens"):
        sim(speculative_config='{"method": "ngram"}')
