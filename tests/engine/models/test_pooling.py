"""Pooling models on torch: vectors and scores equal those of transformers, and their bits do not
depend on the batch, on the pieces of a prompt, or on the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.families import read_config
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineError, SettingsError, UnsupportedModel
from baton_engine.memory.estimate import count_weights
from baton_engine.vectors import numbers_of
from baton_protocol.errors import InvalidRequest
from tests.support.engines.pooling import pooling_request, vectors, vectors_alone
from tests.support.engines.pooling_models import changed, classifier, embedding_model
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import make_request, small_engine

SHARED = prompt_of(40, seed=9)
PROMPTS = [prompt_of(length) for length in (1, 15, 16, 17, 33, 150)]
PROMPTS += [[*SHARED, *prompt_of(7, seed=seed)] for seed in (1, 2)]
HIDDEN = 64
# Kind of model, dtype, how far a number may be from transformers'.
CELLS = [
    ("embed", "float32", 2e-6),
    ("embed", "bfloat16", 0.03),
    ("classify", "float32", 1e-5),
    ("classify", "bfloat16", 0.1),
]


@pytest.fixture(scope="module")
def folders(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """By what the model answers with; "plain" is the generating model that they are made of."""
    source, made = tiny_model("qwen3-gqa2"), tmp_path_factory.mktemp("pooling")
    return {
        "plain": source,
        "embed": embedding_model(source, made / "embed"),
        "classify": classifier(source, made / "classify", 3),
    }


def expected(folder: Path, kind: str, dtype: str) -> list[torch.Tensor]:
    import transformers

    auto: Any = transformers.AutoModel
    if kind == "classify":
        auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.config.pad_token_id = None
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            result = model(torch.tensor([prompt]))
            if kind == "classify":
                found.append(result.logits[0].float())
            else:
                last = result.last_hidden_state[0, -1].float()
                found.append(torch.nn.functional.normalize(last, dim=0))
    return found


@pytest.mark.parametrize(("kind", "dtype", "most"), CELLS)
def test_answers_equal_those_of_transformers_and_have_equal_bits_on_each_path(
    folders: dict[str, Path], kind: str, dtype: str, most: float
) -> None:
    engine = small_engine(folders[kind], dtype=dtype)
    assert (engine.info.pooling, engine.info.exact) == (kind, "bitwise")
    alone = vectors_alone(engine, PROMPTS, activate=False)
    for vector, theirs in zip(alone, expected(folders[kind], kind, dtype), strict=True):
        ours = torch.tensor(numbers_of(vector))
        assert len(ours) == engine.info.vector_size
        torch.testing.assert_close(ours, theirs, atol=most, rtol=0)
    engine.reset_prefix_cache()
    assert vectors(engine, PROMPTS, activate=False) == alone
    assert vectors(engine, PROMPTS, activate=False) == alone  # with cached prefixes
    assert engine.load().free_blocks == engine.load().total_blocks
    pieces = small_engine(
        folders[kind], dtype=dtype, max_batched_tokens=24, overlap="on", kv_blocks=12
    )
    assert vectors(pieces, PROMPTS, activate=False) == alone


def test_parameters_change_the_answer_as_they_say(folders: dict[str, Path]) -> None:
    engine, prompt = small_engine(folders["embed"]), [PROMPTS[3]]
    [whole] = map(numbers_of, vectors(engine, prompt, normalize=False))
    for params in ({}, {"dimensions": 8}, {"dimensions": 8, "normalize": False}):
        [found] = map(numbers_of, vectors(engine, prompt, **params))
        wanted = torch.tensor(whole[: params.get("dimensions")])
        if params.get("normalize", True):
            wanted = torch.nn.functional.normalize(wanted, dim=0)
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-7, rtol=1e-6)
    assert len(whole) == HIDDEN
    engine = small_engine(folders["classify"])
    [scores] = map(numbers_of, vectors(engine, prompt, activate=False))
    [shares] = map(numbers_of, vectors(engine, prompt))
    torch.testing.assert_close(torch.tensor(shares), torch.tensor(scores).softmax(0))


def test_one_class_has_a_probability_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = small_engine(classifier(folders["plain"], tmp_path / "one", 1))
    [score] = map(numbers_of, vectors(engine, [PROMPTS[0]], activate=False))
    [share] = map(numbers_of, vectors(engine, [PROMPTS[0]]))
    torch.testing.assert_close(torch.tensor(share), torch.tensor(score).sigmoid())


@pytest.mark.parametrize(
    ("change", "runner", "pooling"),
    [
        ({}, "auto", "embed"),
        ({}, "generate", ""),
        ({"modules.json": None}, "auto", ""),
        ({"modules.json": None}, "pooling", "embed"),
        ({"config.json": {"architectures": ["Qwen3Model"]}}, "auto", "embed"),
        ({"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, "auto", "embed"),
    ],
)
def test_the_folder_and_runner_say_what_a_model_answers_with(
    folders: dict[str, Path],
    tmp_path: Path,
    change: dict[str, Any],
    runner: Any,
    pooling: str,
) -> None:
    config = read_config(changed(folders["embed"], tmp_path / "m", change), runner=runner)
    assert config.pooling == pooling
    assert config.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("kind", "change", "runner", "message"),
    [
        ("classify", {}, "generate", "Qwen3ForSequenceClassification has no head of tokens; use"),
        (
            "embed",
            {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}},
            "auto",
            "pooling mean_tokens is not supported; only pooling_mode_lasttoken",
        ),
        ("embed", {"1_Pooling/config.json": {}}, "auto", "none named"),
        ("embed", {"modules.json": [{"type": "a.Dense", "path": "x"}]}, "auto", "type 'Dense' is"),
        ("embed", {"modules.json": [7]}, "auto", "no list of modules"),
        ("embed", {"modules.json": {}}, "pooling", ""),
        ("classify", {"config.json": {"num_labels": 0}}, "auto", "num_labels is 0"),
    ],
)
def test_a_pooling_model_that_is_not_supported_is_refused_in_one_line(
    folders: dict[str, Path], tmp_path: Path, kind: str, change: Any, runner: Any, message: str
) -> None:
    folder = changed(folders[kind], tmp_path / "m", change)
    if not message:
        assert read_config(folder, runner=runner).pooling == "embed"
        return
    with pytest.raises(EngineError, match=message) as raised:
        read_config(folder, runner=runner)
    assert "\n" not in str(raised.value)


def test_a_model_without_a_family_embeds_by_transformers_code(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("gpt2")
    engine = small_engine(folder, runner="pooling")
    for vector, theirs in zip(
        vectors(engine, PROMPTS), expected(folder, "embed", "float32"), strict=True
    ):
        torch.testing.assert_close(torch.tensor(numbers_of(vector)), theirs, atol=1e-5, rtol=0)


def test_drafts_and_classes_by_transformers_code_are_refused(
    folders: dict[str, Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="this is a pooling model, which generates none"):
        small_engine(folders["embed"], speculative_config='{"method": "ngram"}')
    folder = classifier(tiny_model("stablelm"), tmp_path / "m", 2)
    with pytest.raises(UnsupportedModel, match="StableLmForSequenceClassification"):
        read_config(folder)
    assert read_config(tiny_model("gpt2")).pooling == ""


def test_a_pooling_model_has_no_head_and_a_fingerprint_of_its_own(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    plain, embed = (read_config(folders[kind]) for kind in ("plain", "embed"))
    assert plain.tied
    assert count_weights(plain) == count_weights(embed)
    scores = read_config(folders["classify"])
    assert count_weights(scores) == count_weights(embed) + 3 * HIDDEN
    engines = [small_engine(folders["plain"], runner=runner) for runner in ("auto", "pooling")]
    assert len({engine.info.fingerprint for engine in engines}) == 2
    refuse(engines[0], [pooling_request("a", [1])], "--runner pooling")
    refuse(engines[1], [make_request("a", [1])], "--runner generate")


def refuse(engine: EngineCore, requests: Sequence[Any], remedy: str) -> None:
    for request in requests:
        with pytest.raises(InvalidRequest, match=remedy):
            engine.submit(request)
