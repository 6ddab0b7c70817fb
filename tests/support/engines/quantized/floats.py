"""Weights of 8-bit and 4-bit floats, as several tools write them.

Shapes: E experts; O and I a linear's output and input size, G groups of inputs of S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.engines.quantized.compressed_tensors import config_of
from tests.support.engines.quantized.layout import Layout, Quantize

MOST = 448.0


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """A scale for `outputs` x `inputs` numbers, each None for all, in the tensor `scale`, which has
    no dimension if `scalar`. `more` are further tensors of each layer."""

    outputs: int | None = None
    inputs: int | None = None
    scale: str = "weight_scale"
    scalar: bool = False
    more: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        rows, columns = self.outputs or len(weight_OI), self.inputs or weight_OI.shape[1]
        blocks = [
            [block.abs().amax() / MOST for block in torch.split(part, columns, 1)]
            for part in torch.split(weight_OI, rows)
        ]
        scales = torch.tensor(blocks)
        wide_OI = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide_OI = wide_OI[: len(weight_OI), : weight_OI.shape[1]]
        codes_OI = (weight_OI / wide_OI).to(torch.float8_e4m3fn)
        if self.outputs is None:
            scales = scales.view(()) if self.scalar else scales.view(1)
        tensors = {"weight": codes_OI, self.scale: scales}
        tensors |= {name: torch.tensor(value) for name, value in self.more.items()}
        return tensors, codes_OI.float() * wide_OI


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The nearest codes, uint8."""
    return (x[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)


def mxfp4(weight_EIO: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """All experts of a layer, as gpt-oss has them: with scales that are powers of 2."""
    experts, inputs, outputs = weight_EIO.shape
    groups_EOGS = weight_EIO.transpose(1, 2).reshape(experts, outputs, inputs // 32, 32)
    exponents_EOG = (groups_EOGS.abs().amax(3) / 4).log2().floor()
    wide = torch.exp2(exponents_EOG)[..., None]
    codes_EOGS = e2m1_codes(groups_EOGS / wide)
    tensors = {
        "blocks": codes_EOGS[..., ::2] | codes_EOGS[..., 1::2] << 4,
        "scales": (exponents_EOG + 127).to(torch.uint8),
    }
    dequantized = (E2M1[codes_EOGS.long()] * wide).flatten(2)
    return tensors, dequantized.transpose(1, 2).contiguous()


MXFP4 = Layout(
    {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
    },
    mxfp4,
    modules=(),
    fused=mxfp4,
)


def _fp8(quantize: Fp8, **more: Any) -> Layout:
    return Layout({"quant_method": "fp8", "activation_scheme": "dynamic", **more}, quantize)


def _compressed(quantize: Fp8, weights: Mapping[str, Any], inputs: Any = None) -> Layout:
    floats = {"type": "float", "num_bits": 8}
    activations = None if inputs is None else {**floats, "symmetric": True, **inputs}
    return Layout(config_of("float-quantized", {**floats, **weights}, activations), quantize)


def nvfp4(codes_name: str, whole_name: str, *, divides: bool, more: str | None = None) -> Quantize:
    """Groups of 16 inputs with a scale in 8 bits, and one number for the whole weight. `more` is
    the name of a scale of inputs."""

    def quantize(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        groups_OGS = weight_OI.view(len(weight_OI), -1, 16)
        whole = weight_OI.abs().max() / (MOST * 6)
        scales_OG = (groups_OGS.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        wide = (scales_OG.float() * whole)[..., None]
        codes = e2m1_codes(groups_OGS / wide)
        tensors = {
            codes_name: (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1),
            "weight_scale": scales_OG,
            whole_name: (1 / whole).view(1) if divides else whole,
        }
        if more is not None:
            tensors[more] = torch.tensor(1 / 64)
        return tensors, (E2M1[codes.long()] * wide).flatten(1)

    return quantize


def mxfp4_packed(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    tensors, [numbers_IO] = mxfp4(weight_OI.t()[None])
    renamed = {
        "weight_packed": tensors["blocks"][0].flatten(1),
        "weight_scale": tensors["scales"][0],
    }
    return renamed, numbers_IO.t().contiguous()


def _compressed_fp4(
    kind: str, quantize: Quantize, strategy: str, group: int, inputs: bool
) -> Layout:
    numbers = {"type": "float", "num_bits": 4, "strategy": strategy, "group_size": group}
    rounded = {**numbers, "dynamic": "local", "symmetric": True} if inputs else None
    return Layout(config_of(f"{kind}-pack-quantized", numbers, rounded), quantize)


def _modelopt(algorithm: str, quantize: Quantize) -> Layout:
    return Layout(
        {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", "model.layers.0*", "*.v_proj"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
        },
        quantize,
        others={"v_proj": None, **dict.fromkeys(FIRST_LAYER)},
    )


FIRST_LAYER = [f".0.self_attn.{part}_proj" for part in "qkvo"]
FIRST_LAYER += [f".0.mlp.{part}_proj" for part in ("gate", "up", "down")]
BLOCK = Fp8(outputs=24, inputs=40, scale="weight_scale_inv")
LAYOUTS: Mapping[str, Layout] = {
    "nvfp4": _compressed_fp4(
        "nvfp4",
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        "tensor_group",
        group=16,
        inputs=False,
    ),
    "nvfp4 inputs": _compressed_fp4(
        "nvfp4",
        nvfp4("weight_packed", "weight_global_scale", divides=True, more="input_global_scale"),
        "tensor_group",
        group=16,
        inputs=True,
    ),
    "mxfp4 packed": _compressed_fp4("mxfp4", mxfp4_packed, "group", group=32, inputs=True),
    "modelopt fp8": _modelopt("FP8", Fp8(scalar=True, more={"input_scale": 1 / 64})),
    "modelopt nvfp4": _modelopt(
        "NVFP4", nvfp4("weight", "weight_scale_2", divides=False, more="input_scale")
    ),
    "fp8 block": _fp8(BLOCK, fmt="e4m3", weight_block_size=[24, 40]),
    "fp8 mixed": Layout(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [24, 40],
            "modules_to_not_convert": ["lm_head", "v_proj", "model.layers.0.mlp", r"self_attn.o"],
        },
        BLOCK,
        others={"v_proj": None, ".0.mlp.up_proj": None, ".0.mlp.gate_proj": None}
        | {".0.mlp.down_proj": None},
    ),
    "fp8 tensor": _fp8(Fp8(scalar=True)),
    "fp8 tensor static": _fp8(
        Fp8(scale="weight_scale_inv", scalar=True, more={"activation_scale": 1 / 64}),
        activation_scheme="static",
    ),
    "fp8 tensor of AutoFP8": _fp8(
        Fp8(more={"input_scale": 1 / 64}), activation_scheme="static", ignored_layers=["lm_head"]
    ),
    "w8a8 float": _compressed(
        Fp8(outputs=1), {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
    ),
    "w8a8 float static": _compressed(
        Fp8(more={"input_scale": 1 / 64}),
        {"strategy": "tensor"},
        {"strategy": "tensor", "dynamic": False},
    ),
    "w8a8 float block": _compressed(
        Fp8(outputs=24, inputs=40),
        {"strategy": "block", "block_structure": [24, 40]},
        {"strategy": "group", "group_size": 40, "dynamic": True},
    ),
    "w8a16 float group": _compressed(
        Fp8(outputs=1, inputs=32), {"strategy": "group", "group_size": 32}
    ),
}
