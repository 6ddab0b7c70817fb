"""Weights as compressed-tensors writes them.

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.engines.quantized.layout import Layout, Quantize


def config_of(layout: str, weights: Mapping[str, Any], inputs: Any = None) -> Mapping[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*[.](gate|router|shared_expert_gate)$"],
        "quantization_status": "compressed",
    }


def integers(
    bits: int,
    group: int | None,
    *,
    packed: bool,
    shifted: bool = False,
    ordered: bool = False,
    more: Mapping[str, torch.Tensor] | None = None,
) -> Quantize:
    """Signed integers by groups of `group` inputs; with `ordered`, in an order of their own. `more`
    are further tensors of each layer."""
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def quantize(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight_OI.shape
        size = group or inputs
        order_I = torch.arange(inputs)
        if ordered:
            order_I = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        back_I = order_I.argsort()
        groups_OGS = F.pad(weight_OI[:, order_I], (0, -inputs % size)).view(outputs, -1, size)
        if shifted:
            low = groups_OGS.amin(2).clamp(max=0)
            scale_OG = (groups_OGS.amax(2).clamp(min=0) - low) / (most - least)
            zero_OG = (least - low / scale_OG).round().clamp(least, most)
        else:
            scale_OG = groups_OGS.abs().amax(2) / most
            zero_OG = torch.zeros_like(scale_OG)
        codes = (groups_OGS / scale_OG[..., None] + zero_OG[..., None]).round().clamp(least, most)
        dequantized = (codes - zero_OG[..., None]) * scale_OG[..., None]
        codes_OI = codes.view(outputs, -1)[:, :inputs][:, back_I]
        tensors = {"weight_scale": scale_OG}
        tensors |= {name: each.clone() for name, each in (more or {}).items()}
        if ordered:
            tensors["weight_g_idx"] = (back_I // size).int()
        if packed:
            tensors["weight_packed"] = pack(codes_OI - least, bits)
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
            if shifted:
                tensors["weight_zero_point"] = pack((zero_OG - least).t(), bits).t()
        else:
            tensors["weight"] = codes_OI.to(torch.int8)
            if shifted:
                tensors["weight_zero_point"] = zero_OG.to(torch.int8)
        return tensors, dequantized.view(outputs, -1)[:, :inputs][:, back_I]

    return quantize


def pack(codes_RI: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words of codes of `bits` bits, the first of a row in the lowest bits."""
    per_word = 32 // bits
    codes = F.pad(codes_RI.long(), (0, -codes_RI.shape[1] % per_word))
    codes = codes.view(len(codes_RI), -1, per_word)
    words = (codes << (torch.arange(per_word) * bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _mixed() -> Layout:
    """Two formats: k in 8 bits by its name, v plain, and the head in 8 bits, too."""
    some = config_of("mixed-precision", {"num_bits": 4, "strategy": "group", "group_size": 32})
    [group] = some["config_groups"].values()
    int8 = {
        **group,
        "targets": ["re:.*k_proj$", "lm_head"],
        "weights": {**group["weights"], "strategy": "channel", "num_bits": 8, "group_size": None},
        "format": "int-quantized",
    }
    groups = {"group_0": {**group, "format": "pack-quantized"}, "group_1": int8}
    ignored = ["re:.*[.](gate|router|shared_expert_gate)$", "re:.*v_proj"]
    quantize = integers(8, None, packed=False)
    return Layout(
        {**some, "config_groups": groups, "ignore": ignored},
        integers(4, 32, packed=True),
        others={"k_proj": quantize, "v_proj": None, "lm_head": quantize},
    )


LAYOUTS: Mapping[str, Layout] = {
    "w4a16 act-order": Layout(
        config_of(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"},
        ),
        integers(4, 32, packed=True, ordered=True),
    ),
    "w8a16 packed zeros": Layout(
        config_of("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        integers(8, None, packed=True, shifted=True),
    ),
    "w8a16 zeros": Layout(
        config_of("naive-quantized", {"num_bits": 8, "group_size": 16, "symmetric": False}),
        integers(8, 16, packed=False, shifted=True),
    ),
    "w8a8": Layout(
        config_of(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True},
        ),
        integers(8, None, packed=False),
    ),
    "w8a8 static": Layout(
        config_of(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "strategy": "tensor", "dynamic": False},
        ),
        integers(8, None, packed=False, more={"input_scale": torch.tensor([1 / 32])}),
    ),
    "compressed-tensors mixed": _mixed(),
    "w4a16 g32": Layout(
        config_of("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        integers(4, 32, packed=True),
    ),
    "w4a16 g32 zeros": Layout(
        config_of(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        integers(4, 32, packed=True, shifted=True),
    ),
    "w8a16 packed": Layout(
        config_of("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        integers(8, None, packed=True),
    ),
    "w8a16": Layout(
        config_of("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        integers(8, None, packed=False),
    ),
}
