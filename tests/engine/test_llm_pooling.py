"""The offline API of pooling models: embed, encode, classify and score, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton_engine import LLM, PoolingParams, SamplingParams
from baton_engine.errors import SettingsError
from baton_engine.llm_engine import LLMEngine
from baton_engine.offline.arguments import EngineArgs
from baton_engine.offline.model_text import ModelText
from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_text.artifacts import CHAT_TEMPLATE
from baton_text.chat import ChatTemplate
from tests.support.engines.pooling_models import EOS, classifier, embedding_model
from tests.support.engines.tiny_models import with_other_weights

PAIRS = (
    "{% for m in messages %}{% if m.role == 'query' %}Is this an answer to {{ m.content }}?"
    "{% elif m.role == 'document' %} {{ m.content }}!{% endif %}{% endfor %}"
)
TEXTS = ["the prefill node", "every chunk of the cache has a name", "always"]


@pytest.fixture(scope="module")
def llms(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, LLM]:
    source, made = tiny_model("qwen3-gqa2"), tmp_path_factory.mktemp("pooling")
    folders = {
        "generate": source,
        "embed": embedding_model(source, made / "embed"),
        "classify": classifier(source, made / "classify", 3),
        "score": classifier(source, made / "score", 1),
    }
    return {kind: make_llm(folder) for kind, folder in folders.items()}


def make_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", threads=1, kv_blocks=200, max_num_seqs=4)


def test_a_text_is_embedded_with_the_tokens_that_its_tokenizer_adds(llms: dict[str, LLM]) -> None:
    llm = llms["embed"]
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt_token_ids[-1] == EOS
        assert output.finished
        assert output.outputs.hidden_size == len(output.outputs.embedding) == 64
        assert torch.tensor(output.outputs.embedding).norm().item() == pytest.approx(1.0)
        [alone] = llm.embed(text)
        [ids] = llm.embed(output.prompt_token_ids)
        assert alone.outputs == ids.outputs == output.outputs
    [short] = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=4, normalize=False))
    [whole] = llm.encode(TEXTS[0], PoolingParams(normalize=False), pooling_task="embed")
    assert short.outputs.embedding == whole.outputs.data[:4].tolist()


def test_cached_tokens_are_counted(llms: dict[str, LLM]) -> None:
    llm, prompt = llms["embed"], [*range(50)]
    llm.reset_prefix_cache()
    assert [each.num_cached_tokens for each in (*llm.embed(prompt), *llm.embed(prompt))] == [0, 48]


def test_classes_have_probabilities_or_scores(llms: dict[str, LLM]) -> None:
    llm = llms["classify"]
    outputs = llm.classify(TEXTS)
    assert [output.outputs.num_classes for output in outputs] == [3] * 3
    plain = llm.encode(TEXTS, [PoolingParams(activate=False)] * 3)
    for output, scores in zip(outputs, plain, strict=True):
        wanted = scores.outputs.data.softmax(0)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted)


def test_two_texts_have_the_cosine_of_their_vectors_as_score(llms: dict[str, LLM]) -> None:
    llm = llms["embed"]
    vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed(TEXTS)]
    for first in (TEXTS[0], [TEXTS[0]], [TEXTS[0]] * 3):
        scores = [each.outputs.score for each in llm.score(first, TEXTS)]
        assert scores == pytest.approx([float(vectors[0] @ each) for each in vectors], abs=1e-6)
    assert scores[0] == pytest.approx(1.0)


def test_a_classifier_of_one_class_reads_both_texts_as_one_prompt(llms: dict[str, LLM]) -> None:
    llm = llms["score"]
    outputs = llm.score(TEXTS[0], TEXTS[1:])
    tokenizer = Tokenizer.from_str(llm.get_tokenizer().to_json())
    for other, output in zip(TEXTS[1:], outputs, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(TEXTS[0], other).ids
        assert output.outputs.score == llm.classify(output.prompt_token_ids)[0].outputs.probs[0]


def test_a_template_made_for_pairs_renders_the_prompt_of_a_score(llms: dict[str, LLM]) -> None:
    llm = LLM.from_engine(LLMEngine(llms["score"].engine, with_template(llms["score"], PAIRS)))
    [output] = llm.score(TEXTS[0], TEXTS[1])
    rendered = f"Is this an answer to {TEXTS[0]}? {TEXTS[1]}!"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(rendered)
    assert output.outputs.score == llm.classify(rendered)[0].outputs.probs[0]


def with_template(llm: LLM, template: str) -> ModelText:
    text = llm.llm_engine.text
    assert text is not None
    return replace(text, template=ChatTemplate.from_artifacts({CHAT_TEMPLATE: template.encode()}))


@pytest.mark.parametrize(
    ("kind", "act", "message"),
    [
        ("generate", lambda llm: llm.embed("a"), r"embed\(\) needs a pooling model"),
        ("generate", lambda llm: llm.score("a", "b"), r'runner="pooling"'),
        ("generate", lambda llm: llm.encode("a"), "this one generates tokens"),
        ("embed", lambda llm: llm.generate("a", SamplingParams()), "--runner generate"),
        ("embed", lambda llm: llm.classify("a"), r"use embed\(\) and score\(\)"),
        ("embed", lambda llm: llm.encode("a", pooling_task="classify"), "is not for this model"),
        ("embed", lambda llm: llm.score(["a", "b"], ["c"] * 3), "2 first and 3 second texts"),
        (
            "embed",
            lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=65)),
            "dimensions is 65",
        ),
        (
            "embed",
            lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions="9")),  # type: ignore[arg-type]
            "pooling parameters",
        ),
        ("classify", lambda llm: llm.embed("a"), r"use classify\(\) and score\(\)"),
        ("classify", lambda llm: llm.score("a", "b"), "needs a model with one class; this one"),
        ("score", lambda llm: llm.score([[1, 2], [3]], "b"), "2 first and 1 second"),
        ("score", lambda llm: llm.score([[1, 2]], "b"), "takes texts"),
    ],
)
def test_a_call_that_the_model_cannot_answer_is_an_error_with_the_remedy(
    llms: dict[str, LLM], kind: str, act: Callable[[LLM], Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        act(llms[kind])
    assert not llms[kind].llm_engine.has_unfinished_requests()


def test_one_prompt_that_is_too_long_leaves_no_other_in_the_engine(llms: dict[str, LLM]) -> None:
    llm = llms["embed"]
    with pytest.raises(PromptTooLong, match="at most 1024 fit"):
        llm.embed([[1], [1] * 1025])
    assert not llm.llm_engine.has_unfinished_requests()
    llm.engine.check_integrity()


def test_other_weights_are_of_a_model_with_the_same_answers(
    llms: dict[str, LLM], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    llm, source = llms["embed"], tiny_model("qwen3-gqa2")
    before = llm.embed([1, 2])[0].outputs
    with pytest.raises(SettingsError, match="no version of the model"):
        llm.update_weights(classifier(source, tmp_path / "classes", 3))
    llm.update_weights(embedding_model(with_other_weights(source), tmp_path / "other"))
    assert llm.embed([1, 2])[0].outputs != before


def test_runner_is_an_option_and_vllm_s_other_names_say_so() -> None:
    assert EngineArgs("m", runner="pooling").options == {"runner": "pooling"}
    others: list[dict[str, Any]] = [{"task": "embed"}, {"convert": "embed"}]
    for other in others:
        with pytest.raises(SettingsError, match="runner says what an engine gives"):
            EngineArgs("m", **other)
