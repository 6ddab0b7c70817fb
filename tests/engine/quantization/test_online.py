"""--quantization: what becomes of plain weights while they are loaded, and what is refused.

Shapes: O and I a linear's output and input size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import quantized_online, read_config
from baton_engine.config.quantization.online import SCHEMES
from baton_engine.errors import UnsupportedModel
from baton_engine.layers.quantization import online
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, dequantized
from baton_engine.weights.safetensors_files import SINGLE_NAME
from baton_protocol.policies import Quantization
from tests.support.engines.quantized.online import rounded
from tests.support.engines.quantized.quantized_models import make_quantized
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

CHOICES: Sequence[Quantization] = ("fp8", "int8", "int4")


def quantized(plain_OI: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    return online.quantized(plain_OI, SCHEMES[quantization])


@pytest.mark.parametrize("quantization", CHOICES)
@pytest.mark.parametrize("inputs", [1, 31, 96, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_become_the_numbers_of_the_definition(
    quantization: Quantization, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_OI = torch.randn(13, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)
    plain_OI[2], plain_OI[3], plain_OI[4, :40] = 0.0, -0.25, 1e-3
    weight = quantized(plain_OI, quantization)
    torch.testing.assert_close(dequantized(weight), rounded(plain_OI, quantization))
    assert not dequantized(weight)[2].any()
    # A few rows at a time give the same bits.
    monkeypatch.setattr(online, "AT_ONCE", 3 * inputs)
    again = quantized(plain_OI, quantization)
    assert torch.equal(again.codes_OJ.view(torch.uint8), weight.codes_OJ.view(torch.uint8))
    assert torch.equal(again.scales_OG, weight.scales_OG)


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 1 / 16), ("int8", 1 / 127)])
def test_a_symmetric_weight_is_near_its_plain_one(quantization: Quantization, most: float) -> None:
    plain_OI = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    error = (dequantized(quantized(plain_OI, quantization)) - plain_OI).abs()
    assert (error <= most * plain_OI.abs().amax(1, keepdim=True)).all()


def test_experts_in_the_two_tensors_of_transformers_are_quantized_alike(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    source = tiny_model("qwen3-moe")
    folder = tmp_path / "fused"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*", SINGLE_NAME))
    config, tensors = read_config(source), load_file(source / SINGLE_NAME)
    assert config.experts is not None
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.mlp.experts"
        gate_ups, downs = [], []
        for expert in range(config.experts.num_experts):
            gate, up, down = (
                tensors.pop(f"{name}.{expert}.{part}_proj.weight")
                for part in ("gate", "up", "down")
            )
            gate_ups.append(torch.cat([gate, up]))
            downs.append(down)
        tensors[f"{name}.gate_up_proj"] = torch.stack(gate_ups)
        tensors[f"{name}.down_proj"] = torch.stack(downs)
    save_file(tensors, folder / SINGLE_NAME)
    prompts = [prompt_of(20)]
    one, other = (
        generate_ids(small_engine(each, quantization="int8"), prompts) for each in (source, folder)
    )
    assert one == other


def test_each_quantization_has_a_fingerprint_of_its_own(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_model("qwen3-gqa2") / "config.json", folder)
    fingerprints = []
    for quantization in ("none", *CHOICES, "int4"):
        settings = TorchSettings(
            model=folder, load_format="dummy", quantization=quantization, threads=1, kv_blocks=20
        )
        engine = build_torch(settings)
        assert generate_ids(engine, [prompt_of(20)])
        fingerprints.append(engine.info.fingerprint)
    assert len(set(fingerprints)) == 4
    assert fingerprints[-1] == fingerprints[-2]


def test_a_quantized_checkpoint_is_refused() -> None:
    folder = make_quantized("llama-gqa4", "w8a16").folder
    with pytest.raises(UnsupportedModel, match="quantized already, by compressed-tensors; use"):
        small_engine(folder, quantization="int8")


def test_a_model_that_transformers_computes_is_refused(tiny_model: Callable[[str], Path]) -> None:
    config = read_config(tiny_model("llama-gqa4"), "transformers")
    with pytest.raises(UnsupportedModel, match="int4: LlamaForCausalLM is computed by transform"):
        quantized_online(config, "int4")
