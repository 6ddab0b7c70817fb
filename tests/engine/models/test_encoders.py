"""Encoders: answers equal those of transformers, each text by itself, and nothing is cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import LLM
from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineError, SettingsError, UnsupportedModel
from baton_engine.runner.encoder_runner import EncoderRunner
from baton_engine.vectors import numbers_of
from baton_protocol.errors import InvalidRequest, PromptTooLong
from tests.support.engines.encoders import ENCODERS, PAD, POSITIONS, encoder, prompt_of
from tests.support.engines.pooling import pooling_request, vectors, vectors_alone
from tests.support.engines.pooling_models import changed
from tests.support.engines.torch_engines import make_request, small_engine

PROMPTS = [prompt_of(length) for length in (2, 3, 17, 40, 120)]
# How far a number may be from transformers', relative to the largest of the answer, or to 1.
MOST = 3e-6
PAIR, SECOND = prompt_of(30), 12
MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("encoders") / "bert")


def theirs(folder: Path, prompts: Sequence[Sequence[int]], **more: Any) -> list[torch.Tensor]:
    """What transformers computes of each prompt: its hidden states, or the scores of classes."""
    import transformers

    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    auto = "AutoModel"
    if architecture.endswith("ForSequenceClassification"):
        auto = "AutoModelForSequenceClassification"
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    with torch.inference_mode():
        results = [model(torch.tensor([prompt]), **more) for prompt in prompts]
    return [result[0][0] for result in results]


def check_equal(found: Sequence[bytes], expected: Sequence[torch.Tensor]) -> None:
    for vector, wanted in zip(found, expected, strict=True):
        ours = torch.tensor(numbers_of(vector))
        largest = max(1.0, float(wanted.abs().max()))
        assert float((ours - wanted).abs().max()) <= MOST * largest


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_answers_as_transformers_does_and_with_equal_bits_in_any_batch(
    tmp_path: Path, name: str
) -> None:
    folder = encoder(tmp_path / "m", name)
    engine = small_engine(folder)
    info = engine.info
    assert (info.pooling, info.exact, info.whole_prompts) == ("embed", "bitwise", True)
    assert info.max_model_len == ENCODERS[name].positions
    alone = vectors_alone(engine, PROMPTS, normalize=False)
    check_equal(alone, [states[0] for states in theirs(folder, PROMPTS)])
    assert vectors(engine, PROMPTS, normalize=False) == alone
    assert engine.load().free_blocks == engine.load().total_blocks
    other = small_engine(folder, threads=2, max_num_seqs=2, overlap="on")
    assert other.info.fingerprint == info.fingerprint
    assert vectors(other, PROMPTS, normalize=False) == alone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spelled", [True, False])
def test_the_folder_says_which_states_are_the_vector(
    tmp_path: Path, mode: str, spelled: bool
) -> None:
    settings = {f"pooling_mode_{mode}": True} if spelled else {"pooling_mode": mode.split("_")[0]}
    folder = encoder(tmp_path / "m", pooling=settings)
    assert read_config(folder).pooled == MODES[mode]
    if not spelled:
        return
    pick: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "cls": lambda states: states[0],
        "mean": lambda states: states.mean(0),
        "last": lambda states: states[-1],
    }
    expected = [pick[MODES[mode]](states) for states in theirs(folder, PROMPTS)]
    check_equal(vectors(small_engine(folder), PROMPTS, normalize=False), expected)


@pytest.mark.parametrize(("name", "classes"), [("bert", 3), ("bert", 1), ("roberta", 1)])
def test_a_classifier_reads_both_texts_of_a_pair_with_their_token_types(
    tmp_path: Path, name: str, classes: int
) -> None:
    folder = encoder(tmp_path / "m", name, classes=classes)
    engine = small_engine(folder)
    assert (engine.info.pooling, engine.info.vector_size) == ("classify", classes)
    single = vectors(engine, PROMPTS, activate=False)
    check_equal(single, theirs(folder, PROMPTS))
    types = torch.tensor([[0] * SECOND + [1] * (len(PAIR) - SECOND)])
    typed = {"token_type_ids": types} if name == "bert" else {}  # RoBERTa has one type
    pair = vectors(engine, [PAIR], activate=False, second_text=SECOND)
    check_equal(pair, theirs(folder, [PAIR], **typed))
    assert (pair != vectors(engine, [PAIR], activate=False)) == bool(typed)
    with pytest.raises(InvalidRequest, match="second_text is 30, and the input has 30 tokens"):
        engine.submit(pooling_request("a", PAIR, second_text=len(PAIR)))


def test_python_scores_pairs_as_a_cross_encoder_of_transformers_does(tmp_path: Path) -> None:
    import transformers

    folder = encoder(tmp_path / "m", classes=1)
    llm = LLM(folder, threads=1)
    query, documents = (
        "the decode node",
        ["every chunk has a name", "Tokens known, tokens computed"],
    )
    scores = [each.outputs.score for each in llm.score(query, documents)]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    for document, score in zip(documents, scores, strict=True):
        pair = tokenizer(query, document, return_tensors="pt", return_token_type_ids=True)
        ids = pair["input_ids"][0].tolist()
        [logits] = theirs(folder, [ids], token_type_ids=pair["token_type_ids"])
        assert pair["token_type_ids"].any()
        assert score == pytest.approx(float(logits.sigmoid()), abs=1e-6)


def test_nothing_of_a_prompt_is_cached_and_no_step_is_larger_than_its_limit(bert: Path) -> None:
    steps = [prompt_of(length, seed=length) for length in (100, 90, 60, 40, 2)]
    engine = small_engine(bert, max_batched_tokens=150)
    sizes = []
    for number, prompt in enumerate([*steps, *steps]):
        engine.submit(pooling_request(str(number), prompt))
    while engine.has_work():
        result = engine.step()
        sizes.append(result.num_tokens)
        assert not any(use.cached for use in result.prompts)
    assert sum(sizes) == 2 * sum(map(len, steps))
    assert max(sizes) <= 150
    assert len(sizes) < 2 * len(steps)
    assert engine.cached_blocks(engine.block_hashes(pooling_request("a", steps[0]))) == 0


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, POSITIONS),
        ({"max_model_len": 50}, 50),
        ({"max_batched_tokens": 64}, 64),
        ({"performance_mode": "interactivity"}, POSITIONS),
    ],
)
def test_a_text_that_does_not_fit_one_step_is_refused(
    bert: Path, settings: dict[str, Any], longest: int
) -> None:
    engine = small_engine(bert, **settings)
    assert engine.info.max_model_len == longest
    with pytest.raises(PromptTooLong, match=f"has {longest + 1} tokens; at most {longest} fit"):
        engine.submit(pooling_request("a", prompt_of(longest + 1)))
    assert len(vectors(engine, [prompt_of(longest)])) == 1


def test_the_longest_text_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert read_config(folder).max_positions == 77


def test_a_checkpoint_may_have_a_head_for_another_task_and_no_other_tensors(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    folder = encoder(tmp_path / "m", auto="AutoModelForMaskedLM")
    assert read_config(folder).architecture == "BertForMaskedLM"
    check_equal(
        vectors(small_engine(folder), PROMPTS, normalize=False),
        [states[0] for states in theirs(folder, PROMPTS)],
    )
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    wrong = {**tensors, "bert.encoder.layer.2.output.dense.bias": torch.zeros(32)}
    save_file(wrong, weights, {"format": "pt"})
    with pytest.raises(EngineError, match=r"BertForMaskedLM has no use for.*layer\.2"):
        small_engine(folder)
    tensors.pop("bert.encoder.layer.1.output.dense.bias")
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks encoder\.layer\.1\.output\.dense\.bias"):
        small_engine(folder)


@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        ({}, {"runner": "generate"}, UnsupportedModel, "BertModel has no head of tokens"),
        ({"is_decoder": True}, {}, UnsupportedModel, "it is no encoder"),
        ({"architectures": ["RobertaModel"]}, {}, UnsupportedModel, "no class of this name"),
        ({}, {"model_impl": "baton"}, UnsupportedModel, "'BertModel'] is not supported"),
        ({}, {"quantization": "int8"}, UnsupportedModel, "with plain weights"),
        (
            {},
            {"max_model_len": 100, "max_batched_tokens": 64},
            SettingsError,
            "an encoder computes each prompt in one step; raise the first, or lower the second",
        ),
    ],
)
def test_what_an_encoder_cannot_do_is_refused_at_the_start(
    bert: Path,
    tmp_path: Path,
    change: dict[str, Any],
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    folder = changed(bert, tmp_path / "m", {"config.json": change})
    with pytest.raises(error, match=message):
        build_torch(TorchSettings(model=folder, dtype="float32", threads=1, **settings))


def test_a_decoder_without_a_head_is_no_encoder(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    change = {"config.json": {"architectures": ["GPT2Model"]}}
    with pytest.raises(UnsupportedModel, match=r"GPT2Model .* it is no encoder"):
        read_config(changed(tiny_model("gpt2"), tmp_path / "m", change))


def test_tokens_and_vectors_of_a_prompt_are_different_requests(bert: Path) -> None:
    with pytest.raises(InvalidRequest, match="generates no tokens"):
        small_engine(bert).submit(make_request("a", [PAD]))


def test_a_prompt_for_which_memory_is_short_fails_and_others_go_on(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(bert)
    refuse_long_prompts(engine, monkeypatch)
    prompts = [prompt_of(20), prompt_of(100), prompt_of(21)]
    for number, prompt in enumerate(prompts):
        engine.submit(pooling_request(str(number), prompt))
    answered: list[str] = []
    failed: dict[str, str] = {}
    for _ in range(100):
        if not engine.has_work():
            break
        result = engine.step()
        answered += [each.request for each in result.complete]
        failed |= {each.request: str(each.error) for each in result.failed}
    assert sorted(answered) == ["0", "2"]
    assert [*failed] == ["1"]
    assert "with 100 tokens, needs more memory" in failed["1"]
    assert "shorten the text" in failed["1"]


def refuse_long_prompts(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    assert isinstance(runner, EncoderRunner)
    answer = runner._answer

    def limited(row: Any) -> Any:
        if len(row.tokens) > 50:
            raise torch.OutOfMemoryError("no room")
        return answer(row)

    monkeypatch.setattr(runner, "_answer", limited)
