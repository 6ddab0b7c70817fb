"""Loading is strict both ways, sharded or not, tied or not; files that are broken are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config.model_config import read_config
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
def changed(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Callable[[str, Change], Path]:
    """A copy of a tiny model whose tensors a function has changed."""

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


def test_stacked_projections_get_each_part_in_its_rows(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama-gqa2-tied")
    tensors, slots = load_file(folder / SINGLE_NAME), load(folder)
    assert slots.views.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(slots.views[name], tensor)
    q, k = (slots.views[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qk")
    assert k.data_ptr() == q.data_ptr() + q.numel() * q.element_size()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("llama-gqa1", "model.layers.1.mlp.up_proj.weight"),
        ("llama-gqa1", "lm_head.weight"),
        ("llama-gqa4", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3-gqa2", "model.layers.1.self_attn.k_norm.weight"),
    ],
)
def test_a_missing_tensor_is_an_error_that_names_it(
    name: str, lost: str, changed: Callable[[str, Change], Path]
) -> None:
    folder = changed(name, lambda tensors: tensors.pop(lost))
    with pytest.raises(WeightsError, match=f"lacks {lost}"):
        load(folder)


@pytest.mark.parametrize(
    "extra", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_a_left_over_tensor_is_an_error_that_names_it(
    extra: str, changed: Callable[[str, Change], Path]
) -> None:
    folder = changed("qwen3-gqa4", lambda tensors: tensors.update({extra: torch.zeros(3)}))
    with pytest.raises(WeightsError, match=f"no use for: {extra}"):
        load(folder)


def test_a_wrong_shape_is_an_error_that_names_both(
    changed: Callable[[str, Change], Path],
) -> None:
    folder = changed("llama-gqa1", lambda t: t.update({EMBED: t[EMBED][:-1].clone()}))
    with pytest.raises(WeightsError, match=r"has shape \[319, 64\].*asks for \[320, 64\]"):
        load(folder)


def test_rotary_buffers_may_be_there(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name not in load(changed("llama-gqa1", lambda t: t.update({name: torch.ones(8)}))).views


def test_a_tied_head_may_be_there_if_it_equals_the_embedding(
    changed: Callable[[str, Change], Path],
) -> None:
    folder = changed("llama-gqa2-tied", lambda t: t.update({"lm_head.weight": t[EMBED].clone()}))
    load(folder)


def test_a_tied_head_that_differs_is_an_error(changed: Callable[[str, Change], Path]) -> None:
    folder = changed("llama-gqa2-tied", lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
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


def test_a_shard_that_is_missing_or_a_tensor_in_two_shards_is_an_error(
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
def test_a_file_that_is_no_safetensors_file_is_named(
    content: bytes, message: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model("llama-gqa1"), folder)
    (folder / SINGLE_NAME).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_a_truncated_file_is_named(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_model("llama-gqa1"), folder)
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[:-10])
    with pytest.raises(WeightsError, match="is truncated"):
        load(folder)


def test_a_broken_index_and_no_weights_at_all_are_named(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    shutil.copy(tiny_model("llama-gqa1") / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="only safetensors checkpoints"):
        load(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(WeightsError, match="not a safetensors index"):
        load(tmp_path)
