"""Strict loading of weights: tensors that are missing, left over, misshapen or quantized, broken
files, and an index that does not fit them are errors of one line."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config.families import read_config
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.registry import build_model
from baton_engine.weights.digest import tensor_digests
from baton_engine.weights.loader import load_weights
from baton_engine.weights.safetensors_files import INDEX_NAME, SINGLE_NAME
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import make_tiny_model, prompt_of
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


def copy_config(folder: Path) -> None:
    shutil.copy(make_tiny_model("llama-gqa1") / "config.json", folder)


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


UP, Q_BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
HEAD, K_NORM = "lm_head.weight", "model.layers.1.self_attn.k_norm.weight"
THIRD = "model.layers.2.mlp.up_proj.weight"
FLOATS = "supported: F64, F32, F16, BF16"


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def with_one(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Change:
    """Changes a tensor, or adds one of 3 zeros."""

    def act(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous() if change else torch.zeros(3)

    return act


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-gqa1", without(UP), f"lacks {UP}$"),
        ("llama-gqa1", without(HEAD), f"lacks {HEAD}$"),
        ("llama-gqa1", dict.clear, f"lacks {HEAD}, .* and 25 more$"),
        ("llama-gqa4", without(Q_BIAS), f"lacks {Q_BIAS}$"),
        ("qwen3-gqa2", without(K_NORM), f"lacks {K_NORM}$"),
        ("qwen3-gqa4", with_one(THIRD), f"Qwen3ForCausalLM has no use for: {THIRD}$"),
        ("qwen3-gqa4", with_one(Q_BIAS), f"Qwen3ForCausalLM has no use for: {Q_BIAS}$"),
        ("qwen3-gqa4", with_one(f"{UP}_scale_inv"), f"no use for: {UP}_scale_inv$"),
        ("llama-gqa1", with_one(EMBED, lambda t: t[:-1]), r"\[319, 64\].*asks for \[320, 64\]"),
        ("llama-gqa1", with_one(UP, lambda t: t.t()), rf"{UP} .*\[64, 128\].* \[128, 64\]"),
        ("llama-gqa1", with_one(UP, torch.flatten), rf"{UP} .*\[8192\].* \[128, 64\]"),
        ("llama-gqa1", with_one(UP, lambda t: t.char()), f"{UP} .* has dtype I8; {FLOATS}"),
        ("llama-gqa1", with_one(UP, lambda t: t.byte()), f"{UP} .* has dtype U8; {FLOATS}"),
        ("llama-gqa1", with_one(UP, lambda t: t.int()), f"{UP} .* has dtype I32; {FLOATS}"),
        ("llama-gqa1", with_one(UP, lambda t: t > 0), f"{UP} .* has dtype BOOL; {FLOATS}"),
        (
            "llama-gqa1",
            with_one(UP, lambda t: t.to(torch.float8_e4m3fn)),
            f"{UP} in model.safetensors has dtype F8_E4M3; {FLOATS}",
        ),
        ("llama-gqa1", with_one(UP, lambda t: t.to(torch.float8_e5m2)), "has dtype F8_E5M2"),
    ],
)
def test_the_error_names_a_tensor_that_does_not_fit_the_config(
    name: str, change: Change, message: str, change_model: Callable[[str, Change], Path]
) -> None:
    folder = change_model(name, change)
    with pytest.raises(WeightsError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_tensor_of_another_float_dtype_is_converted(
    dtype: torch.dtype, change_model: Callable[[str, Change], Path]
) -> None:
    folder = change_model("llama-gqa1", with_one(UP, lambda tensor: tensor.to(dtype)))
    expected = load_file(folder / SINGLE_NAME)[UP].float()
    assert torch.equal(load(folder).parameters[UP].place, expected)


def test_nan_is_loaded_as_it_is(change_model: Callable[[str, Change], Path]) -> None:
    folder = change_model("llama-gqa1", with_one(UP, lambda tensor: tensor * float("nan")))
    assert load(folder).parameters[UP].place.isnan().all()


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
    compare(reference(whole, prompt, 64, ids), ids, Tally())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({EMBED: "a.safetensors", "x": "b.safetensors"}, "b.safetensors does not exist"),
        ({EMBED: "a.safetensors", UP: "c.safetensors"}, "x is in a.safetensors and c.safetensors"),
        (
            {EMBED: "d.safetensors", HEAD: "d.safetensors"},
            rf"{HEAD} \(by the index .* d.safetensors\)",
        ),
        ({EMBED: "../a.safetensors"}, "'../a.safetensors'; expected the name of a file"),
        ({EMBED: "/etc/passwd"}, "'/etc/passwd'; expected the name of a file"),
        ({EMBED: "a\n"}, "expected the name of a file"),
        ({EMBED: "a" * 5000}, "does not exist"),
        ({EMBED: 7}, f"'{EMBED}' is in 7; expected the name of a file"),
        ({EMBED: ["a.safetensors"]}, "expected the name of a file"),
        ({EMBED: None}, "expected the name of a file"),
        ({}, "names no tensor"),
        ([EMBED], "not a safetensors index"),
        (None, "not a safetensors index"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_an_error(
    index: Any, message: str, tmp_path: Path
) -> None:
    """Files a and c have a tensor x, and d has the embedding."""
    one = {"x": torch.zeros(3)}
    for name, tensors in {"a": one, "c": one, "d": {EMBED: torch.zeros(320, 64)}}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    copy_config(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(WeightsError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b"\xff", b"7", b"[" * 100_000])
def test_a_file_that_is_no_index_is_an_error(content: bytes, tmp_path: Path) -> None:
    copy_config(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(content)
    with pytest.raises(WeightsError, match=rf"{INDEX_NAME} is not a safetensors index"):
        load(tmp_path)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    copy_config(tmp_path)
    with pytest.raises(WeightsError, match="only safetensors checkpoints"):
        load(tmp_path)


def of(
    dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8, **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


# What a file holds: its header, and the number of bytes after it.
@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"x": of()}, 7, "is truncated: it has .* bytes, and x ends at byte"),
        ({"x": of()}, 0, "is truncated: .* x ends at byte"),
        ({"x": of()}, 9, "bytes, and x, the last part, ends at"),
        ({}, 8, "bytes, and the header, the last part, ends at"),
        ({"x": of(end=80, shape=[20])}, 8, "is truncated: .* x ends at byte"),
        ({"x": of(begin=4, end=12)}, 12, "x begins at byte .*, and the header ends at"),
        ({"x": of(), "y": of(begin=4, end=12)}, 12, "y begins at byte .*, and x ends at"),
        ({"x": of(), "y": of(begin=16, end=24)}, 24, "y begins at byte .*, and x ends at"),
        ({"x": of(begin=-8, end=0)}, 8, "x begins at byte"),
        ({"x": of(begin=8, end=0)}, 8, r"x of F32\[2\] has -8 bytes"),
        ({"x": of(shape=[3])}, 8, r"x of F32\[3\] has 8 bytes"),
        ({"x": of(dtype="BF16")}, 8, r"x of BF16\[2\] has 8 bytes"),
        ({"x": of(shape=[2**40, 2**40])}, 8, r"x of F32\[\d+, \d+\] has 8 bytes"),
        ({"x": of(shape=[-2])}, 8, "x: Expected `int` >= 0"),
        ({"x": of(shape=[2.5])}, 8, "x: Expected `int`, got `float`"),
        ({"x": of(shape="2")}, 8, "x: Expected `array`, got `str`"),
        ({"x": of(shape=[True])}, 8, "x: Expected `int`, got `bool`"),
        ({"x": of(begin="0")}, 8, "x: Expected `int`, got `str`"),
        ({"x": of(dtype="F4")}, 8, f"x has dtype 'F4'; {FLOATS}"),
        ({"x": of(dtype=32)}, 8, "x: Expected `str`, got `int`"),
        ({"x": {"dtype": "F32"}}, 8, "x: Object missing required field `shape`"),
        ({"x": None}, 8, "x: Expected `object`, got `null`"),
        ({"x\ny": of()}, 8, r"'x\\ny' is no name of a tensor"),
        ([], 8, "unreadable header: Expected `object`, got `array`"),
        (b"{", 8, "unreadable header"),
        (b'{"x": ' + b"[" * 100_000, 8, "unreadable header"),
        (b'{"\xff": 1}', 8, "unreadable header"),
        (None, 0, "no safetensors file"),
        (None, 64, "no safetensors file"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_an_error(
    header: Any, size: int, message: str, tmp_path: Path
) -> None:
    """A header of None: only zeros."""
    copy_config(tmp_path)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = b"" if header is None else struct.pack("<Q", len(text)) + text
    (tmp_path / SINGLE_NAME).write_bytes(head + bytes(size))
    with pytest.raises(WeightsError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert SINGLE_NAME in str(error.value)
    with pytest.raises(WeightsError, match=message):
        tensor_digests(tmp_path, read_config(tmp_path))
