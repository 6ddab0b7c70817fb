"""Errors about tensors of quantized layers name the tensor, and what was expected."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.errors import UnsupportedModel, WeightsError
from tests.support.engines.quantized.loaded_weights import numbers_of
from tests.support.engines.quantized.quantized_models import WEIGHTS, make_quantized

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor | None]
LAYER = "model.layers.1.self_attn.o_proj"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., torch.Tensor]:
    """Loads a quantized model whose tensors `change` has changed."""

    def load(
        layout: str, change: Callable[[Tensors], object], model: str = "llama-gqa1"
    ) -> torch.Tensor:
        folder = make_quantized(model, layout).folder
        copy = tmp_path / "model"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))
        tensors = load_file(copy / WEIGHTS)
        change(tensors)
        save_file(tensors, copy / WEIGHTS)
        return numbers_of(copy)

    return load


STATE = "weight.quant_state.bitsandbytes__nf4"


def text(content: str) -> torch.Tensor:
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def removed(tensor: torch.Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("layout", "name", "change", "message"),
    [
        ("gptq", "qweight", removed, "lacks {name}$"),
        ("gptq", "qweight", torch.Tensor.float, "{name} in .* has dtype F32; supported: I32"),
        ("gptq", "qweight", lambda words: words[1:], r"{name} in .* has shape \[7, 64\]; .*8, 64"),
        ("gptq", "scales", lambda scales: scales[:1], r"{name} in .* has shape \[1, 64\]"),
        ("gptq", "scales", torch.Tensor.int, "{name} in .* has dtype I32; supported: F64, F32"),
        ("gptq", "qzeros", torch.zeros_like, "{name} has other zero points .* sym true"),
        ("gptq zeros", "qzeros", removed, "lacks {name}$"),
        ("gptq act-order", "g_idx", torch.zeros_like, "{name} says .* not all groups have 32"),
        ("gptq act-order", "g_idx", lambda groups: groups - 9, "{name} says"),
        ("awq", "qweight", lambda words: words.t(), r"{name} in .* has shape \[8, 64\]"),
        ("awq", "qzeros", torch.Tensor.long, "{name} in .* has dtype I64; supported: I32"),
        ("w4a16 g32", "weight_packed", torch.Tensor.short, "{name} in .* has dtype I16"),
        ("w4a16 g32", "weight_scale", lambda scale: scale[:, :1], r"{name} in .* \[64, 1\]"),
        ("w4a16 act-order", "weight_g_idx", lambda groups: groups // 2, "{name} says"),
        ("w8a8", "weight", torch.Tensor.float, "{name} in .* has dtype F32; supported: I8"),
        ("bitsandbytes int8", "weight_format", torch.ones_like, "{name} is 1; supported: 0$"),
        ("bitsandbytes nf4", "weight", lambda each: each[1:], r"{name} in .* shape \[2047, 1\]"),
        ("bitsandbytes nf4", "weight.quant_map", torch.zeros_like, "{name} has other numbers"),
        ("bitsandbytes nf4", STATE, torch.zeros_like, "{name} is not JSON"),
        ("bitsandbytes nf4", STATE, lambda each: each.repeat(99), r"{name} in .* shape"),
        (
            "bitsandbytes nf4 double",
            STATE,
            lambda each: text("{}"),
            "{name}: nested_offset is None",
        ),
        ("bitsandbytes nf4 double", STATE, lambda each: text("7"), "{name} is 7; expected an"),
        ("nvfp4", "weight_scale", torch.Tensor.float, "{name} in .* F32; supported: F8_E4M3"),
        ("nvfp4", "weight_global_scale", removed, "lacks {name}$"),
        ("modelopt nvfp4", "weight_scale_2", removed, "lacks {name}$"),
        ("fp8 block", "weight", torch.Tensor.float, "{name} in .* F32; supported: F8_E4M3"),
        ("fp8 block", "weight_scale_inv", lambda scale: scale[1:], r"{name} in .* \[3, 2\]"),
        ("fp8 tensor", "weight_scale", lambda scale: scale.repeat(2), r"has shape \[2\]"),
        ("fp8 tensor static", "activation_scale", removed, "lacks {name}$"),
        ("w8a8 static", "input_scale", removed, "lacks {name}$"),
    ],
)
def test_a_wrong_tensor_is_named(
    load: Callable[..., torch.Tensor], layout: str, name: str, change: Change, message: str
) -> None:
    full = f"{LAYER}.{name}"

    def apply(tensors: Tensors) -> None:
        new = change(tensors.pop(full))
        if new is not None:
            tensors[full] = new.contiguous()

    with pytest.raises(WeightsError, match=message.format(name=full)):
        load(layout, apply)


def test_rows_that_are_no_whole_blocks_of_nf4_are_refused() -> None:
    folder = make_quantized("llama-gqa4", "bitsandbytes nf4").folder
    message = r"o_proj.weight: NF4 .* 96 inputs is not supported: blocks of 64 .* multiples of 64"
    with pytest.raises(UnsupportedModel, match=message):
        numbers_of(folder)


def test_plain_weights_in_place_of_quantized_ones_are_named(
    load: Callable[..., torch.Tensor],
) -> None:
    def change(tensors: Tensors) -> None:
        for part in ("qweight", "scales"):
            del tensors[f"{LAYER}.{part}"]
        tensors[f"{LAYER}.weight"] = torch.zeros(64, 64)

    with pytest.raises(WeightsError, match=rf"lacks {LAYER}.qweight, {LAYER}.scales"):
        load("gptq", change)


def test_a_bias_of_zeros_that_the_layer_does_not_have_is_left_out(
    load: Callable[..., torch.Tensor],
) -> None:
    expected = numbers_of(make_quantized("llama-gqa1", "gptq").plain)
    bias = {f"{LAYER}.bias": torch.zeros(64)}
    assert torch.allclose(load("gptq", lambda tensors: tensors.update(bias)), expected, atol=1e-6)


def test_another_bias_that_the_layer_does_not_have_is_named(
    load: Callable[..., torch.Tensor],
) -> None:
    bias = {f"{LAYER}.bias": torch.ones(64)}
    with pytest.raises(WeightsError, match=rf"no use for: {LAYER}.bias$"):
        load("gptq", lambda tensors: tensors.update(bias))


@pytest.mark.parametrize("name", ["qzeros", "g_idx"])
def test_tensors_that_say_nothing_may_be_left_out(
    load: Callable[..., torch.Tensor], name: str
) -> None:
    expected = numbers_of(make_quantized("llama-gqa1", "gptq").plain)
    loaded = load("gptq", lambda tensors: tensors.pop(f"{LAYER}.{name}"))
    assert torch.allclose(loaded, expected, atol=1e-6)


def test_experts_with_different_orders_of_inputs_are_named(
    load: Callable[..., torch.Tensor],
) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w2.g_idx"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].flip(0)

    with pytest.raises(WeightsError, match=r"moe.experts are not all .*desc_act false"):
        load("gptq act-order", change, model="mixtral")


def test_experts_of_one_order_of_inputs_are_loaded() -> None:
    folders = make_quantized("mixtral", "gptq act-order")
    assert torch.allclose(numbers_of(folders.folder), numbers_of(folders.plain), atol=1e-6)
