"""Strict loading of weights: missing, extra and misshapen tensors and broken files are errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config.families import read_config
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.registry import build_model
from baton_engine.weights.loader import load_weights
from baton_engine.weights.safetensors_files import INDEX_NAME, SINGLE_NAME
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]

EMBED = "model.embed_tokens.weight"


@pytest.fixture
def change_model(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> Callable[[str, Change], Path]:
    """Copies a tiny model and changes the tensors of the copy with a function."""

    def make(name: str, change: Change) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model(name), folder, ignore=shutil.ignore_patterns(".*"))
        tensors = load_file(folder / SINGLE_NAME)
        change(tensors)
        save_file(tensors, folder / SINGLE_NAME)
        return folder

    return make


def load(folder: Path) -> WeightSlots:
    config = read_config(folder)
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    build_model(config, slots)
    load_weights(folder, config, slots)
    return slots


def test_each_part_of_a_stacked_projection_is_loaded_into_its_rows(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("llama-gqa2-tied")
    tensors, slots = load_file(folder / SINGLE_NAME), load(folder)
    assert slots.parameters.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(slots.parameters[name].place, tensor)
    name = "model.layers.0.self_attn.{}_proj.weight"
    q, k = (slots.parameters[name.format(part)].place for part in "qk")
    assert k.data_ptr() == q.data_ptr() + q.numel() * q.element_size()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("llama-gqa1", "model.layers.1.mlp.up_proj.weight"),
        ("llama-gqa1", "lm_head.weight"),
        ("llama-gqa4", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3-gqa2", "model.layers.1.self_attn.k_norm.weight"),
    ],
)
def test_the_error_for_a_missing_tensor_names_it(
    name: str, missing: str, change_model: Callable[[str, Change], Path]
) -> None:
    folder = change_model(name, lambda tensors: tensors.pop(missing))
    with pytest.raises(WeightsError, match=f"lacks {missing}"):
        load(folder)


@pytest.mark.parametrize(
    "extra", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_the_error_for_an_extra_tensor_names_it(
    extra: str, change_model: Callable[[str, Change], Path]
) -> None:
    folder = change_model("qwen3-gqa4", lambda tensors: tensors.update({extra: torch.zeros(3)}))
    with pytest.raises(WeightsError, match=f"no use for: {extra}"):
        load(folder)


def test_the_error_for_a_wrong_shape_names_both_shapes(
    change_model: Callable[[str, Change], Path],
) -> None:
    folder = change_model("llama-gqa1", lambda t: t.update({EMBED: t[EMBED][:-1].clone()}))
    with pytest.raises(WeightsError, match=r"has shape \[319, 64\].*asks for \[320, 64\]"):
        load(folder)


def test_rotary_buffers_in_the_file_are_ignored(
    change_model: Callable[[str, Change], Path],
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    slots = load(change_model("llama-gqa1", lambda t: t.update({name: torch.ones(8)})))
    assert name not in slots.parameters


def test_a_tied_head_in_the_file_is_accepted_if_it_equals_the_embedding(
    change_model: Callable[[str, Change], Path],
) -> None:
    folder = change_model(
        "llama-gqa2-tied", lambda t: t.update({"lm_head.weight": t[EMBED].clone()})
    )
    load(folder)


def test_a_tied_head_that_differs_from_the_embedding_is_an_error(
    change_model: Callable[[str, Change], Path],
) -> None:
    folder = change_model("llama-gqa2-tied", lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
    with pytest.raises(WeightsError, match="differs from model"):
        load(folder)


def test_a_sharded_checkpoint_gives_the_ids_of_transformers(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    whole, folder = tiny_model("qwen3-gqa4"), tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX_NAME).is_file()
    prompt = prompt_of(40, seed=8)
    [ids] = generate_ids(small_engine(folder), [prompt])
    compare(reference(whole, prompt, 64), ids, Tally())


def test_a_missing_shard_and_a_tensor_in_two_shards_are_errors(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(tiny_model("llama-gqa1"), folder)
    (folder / SINGLE_NAME).rename(folder / "a.safetensors")
    index = {"weight_map": {EMBED: "a.safetensors", "x": "b.safetensors"}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"b\.safetensors does not exist"):
        load(folder)
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(WeightsError, match=r"is in a\.safetensors and b\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "unreadable header"),
    ],
)
def test_a_file_that_is_not_a_safetensors_file_is_an_error(
    content: bytes, message: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model("llama-gqa1"), folder)
    (folder / SINGLE_NAME).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_a_truncated_file_is_an_error(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_model("llama-gqa1"), folder)
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[:-10])
    with pytest.raises(WeightsError, match="is truncated"):
        load(folder)


def test_a_broken_index_and_missing_weights_are_errors(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    shutil.copy(tiny_model("llama-gqa1") / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="only safetensors checkpoints"):
        load(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(WeightsError, match="not a safetensors index"):
        load(tmp_path)
