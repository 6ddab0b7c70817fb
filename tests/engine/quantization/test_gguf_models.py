"""Models in GGUF files: their weights, greedy ids, tokenizer and digests."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGUFReader

from baton_engine.config.families import config_of, quantized_online, read_config
from baton_engine.config.quantization.gguf import SCHEMES
from baton_engine.errors import UnsupportedModel, WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import dequantized
from baton_engine.layers.quantization.weight_format import format_of
from baton_engine.weights.digest import tensor_digests
from baton_engine.weights.dummy import fill_slots
from baton_text.artifacts import read_artifacts
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.quantized.gguf_files import (
    make_gguf,
    nearest,
    numbers_of_blocks,
    random_blocks,
    write_gguf,
)
from tests.support.engines.quantized.loaded_weights import numbers_of
from tests.support.engines.tiny_models import TEXT, make_tiny_model, prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

PROMPTS = [prompt_of(length, seed=seed) for length in (1, 17, 100) for seed in (1, 2)]
# One of each architecture, and of each kind of weight in memory.
MODELS = [
    ("llama-gqa2-tied", "demo"),
    ("llama-wide", "Q4_K_M"),
    ("llama-gqa1", "Q4_0 and plain"),
    ("llama-gqa4", "F16"),
    ("llama3-rope", "Q8_0"),
    ("mixtral", "Q4_0"),
    ("qwen2", "Q5_1"),
    ("qwen2-moe", "BF16"),
    ("qwen3-gqa4", "Q5_0"),
    ("qwen3-moe", "F32"),
]
QUICK = 2


@pytest.mark.parametrize("kind", SCHEMES)
def test_blocks_have_the_numbers_that_the_tool_reads(kind: str) -> None:
    raw = random_blocks(kind, 7, 512, 0.1, seed=0)
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    finish = format_of(SCHEMES[kind]).declare(slots, "layer", 7, 512)
    slots.parameters["layer.weight"].load(torch.from_numpy(raw))
    expected = torch.from_numpy(numbers_of_blocks(kind, raw).copy())
    torch.testing.assert_close(dequantized(finish()), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "mix"),
    [
        *MODELS[:QUICK],
        *(pytest.param(*each, marks=pytest.mark.long) for each in MODELS[QUICK:]),
    ],
)
def test_ids_equal_those_of_the_dequantized_model(model: str, mix: str) -> None:
    made, tally = make_gguf(model, mix), Tally()
    engine = small_engine(made.folder)
    compare_all(made.plain, PROMPTS, generate_ids(engine, PROMPTS), tally, "batch")
    tally.check()


@pytest.mark.long
def test_a_file_that_the_tool_writes_in_parts_gives_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mix = "llama-gqa4", "F16"
    whole = small_engine(make_gguf(model, mix).folder)
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=7))
    write_gguf(make_tiny_model(model), tmp_path / "model.gguf", mix, nearest)
    first, *others = sorted(tmp_path.iterdir())
    assert first.name == f"model-00001-of-{1 + len(others):05}.gguf"
    assert len(others) > 1
    assert generate_ids(small_engine(first), PROMPTS[:2]) == generate_ids(whole, PROMPTS[:2])


@pytest.mark.parametrize(("model", "mix"), MODELS)
def test_weights_and_config_are_those_of_the_folder(model: str, mix: str) -> None:
    made = make_gguf(model, mix)
    loaded, expected = numbers_of(made.folder), numbers_of(made.plain)
    assert loaded.shape == expected.shape
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = read_config(made.folder), read_config(made.plain)
    kept = ("quantization", "dtype", "rope", "unread", "windows")
    for name in theirs.__slots__:
        if name not in kept:
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope.theta == theirs.rope.theta
    assert not any(ours.windows)


def test_the_tokenizer_and_template_equal_those_of_the_folder() -> None:
    made = make_gguf("llama-gqa2-tied", "demo")
    ours, theirs = read_artifacts(made.folder), read_artifacts(made.plain)
    tokenizer, reference = (Tokenizer.from_artifacts(files) for files in (ours, theirs))
    for text in (*TEXT, "<|im_start|>user\nx<|im_end|>", "caf\u00e9 1234"):
        assert tokenizer.encode(text) == reference.encode(text)
    assert set(tokenizer.eos_ids) == set(reference.eos_ids)
    messages = [{"role": "user", "content": "hello"}]
    assert ChatTemplate.from_artifacts(ours).render(messages) == ChatTemplate.from_artifacts(
        theirs
    ).render(messages)
    # What the router reads is a config of the same model.
    assert config_of(json.loads(ours["config.json"]), {}).vocab_size == tokenizer.vocab_size


def test_dummy_weights_have_a_usual_size() -> None:
    path = make_gguf("llama-wide", "Q4_K_M").folder
    numbers = numbers_of(path, lambda _, config, slots: fill_slots(slots))
    assert 0.001 < numbers.abs().mean() < 1


def test_digests_depend_on_content_alone_and_are_kept_beside_the_file(tmp_path: Path) -> None:
    source = make_gguf("llama-gqa2-tied", "demo").folder
    copy = tmp_path / "other.gguf"
    shutil.copy(source, copy)
    config = read_config(source)
    known = tensor_digests(copy, config, clock_ns=lambda: 1 << 62)
    assert known == tensor_digests(source, config)
    assert [path.name for path in tmp_path.glob(".*")] == [".other.gguf.baton-digests.json"]
    data = bytearray(copy.read_bytes())
    data[GGUFReader(copy).tensors[3].data_offset] ^= 1
    copy.write_bytes(data)
    assert len(set(tensor_digests(copy, config)) - set(known)) == 1


def test_errors_name_tensors_that_are_left_over_or_lost(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = make_gguf("llama-gqa2-tied", "demo").folder.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_norm", b"blk.1.xfn_norm"))
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.post_attention_layernorm"):
        numbers_of(path)


def test_a_quantized_file_is_not_quantized_again() -> None:
    config = read_config(make_gguf("llama-gqa2-tied", "demo").folder)
    with pytest.raises(UnsupportedModel, match="quantized already, by GGUF; use --quantization"):
        quantized_online(config, "int8")
