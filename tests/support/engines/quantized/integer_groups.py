"""Weights as GPTQ, AWQ and auto-round write them.

Shapes: O and I a linear's output and input size, G groups of inputs of S, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tests.support.engines.quantized.compressed_tensors import pack
from tests.support.engines.quantized.layout import Layout, Quantize

# From the lowest bits on, the outputs in a word of AWQ.
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Codes of `bits` bits by groups of `size` inputs; -1 are all. With `ordered`, the inputs are
    in groups by an order of their own. Tensors are those of `kind`."""

    kind: Literal["gptq", "gptq_v2", "awq"] = "gptq"
    bits: int = 4
    size: int = 32
    symmetric: bool = True
    ordered: bool = False

    def __call__(self, weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight_OI.shape
        order_I = torch.arange(inputs)
        if self.ordered:
            order_I = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        size = inputs if self.size == -1 else self.size
        sorted_OI = weight_OI[:, order_I]
        groups_OGS = F.pad(sorted_OI, (0, -inputs % size)).view(outputs, -1, size)
        most = (1 << self.bits) - 1
        if self.symmetric:
            scale_OG = (groups_OGS.abs().amax(2) / (most // 2)).half()
            zero_OG = torch.full_like(scale_OG, (most + 1) // 2)
        else:
            low_OG = groups_OGS.amin(2).clamp(max=0)
            scale_OG = ((groups_OGS.amax(2).clamp(min=0) - low_OG) / most).half()
            # 0 is the zero point of a group without negative numbers.
            zero_OG = (-low_OG / scale_OG.float()).round().clamp(0, most)
        scale, zero = scale_OG.float()[..., None], zero_OG.float()[..., None]
        codes = (groups_OGS / scale + zero).round().clamp(0, most)
        numbers_OI = ((codes - zero) * scale).view(outputs, -1)[:, :inputs]
        back_I = order_I.argsort()
        codes_OI = codes.view(outputs, -1)[:, :inputs][:, back_I].long()
        tensors = self._tensors(codes_OI, zero_OG.long().t(), back_I // size)
        return {**tensors, "scales": scale_OG.t()}, numbers_OI[:, back_I]

    def _tensors(
        self, codes_OI: torch.Tensor, zeros_GO: torch.Tensor, groups_I: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        if self.kind == "awq":
            return {"qweight": _awq_words(codes_OI.t()), "qzeros": _awq_words(zeros_GO)}
        zeros = pack(zeros_GO, self.bits)
        if self.kind == "gptq":
            # As gptqmodel does it: one less in each code, which may borrow from the next.
            zeros = zeros - sum(1 << place for place in range(0, 32, self.bits))
        return {
            "qweight": pack(codes_OI, self.bits).t(),
            "qzeros": zeros,
            "g_idx": groups_I.int(),
        }


def _awq_words(codes_RO: torch.Tensor) -> torch.Tensor:
    codes_RO = F.pad(codes_RO, (0, -codes_RO.shape[1] % 8))
    return pack(codes_RO.view(len(codes_RO), -1, 8)[..., list(AWQ_OUTPUTS)].flatten(1), 4)


def _gptq(
    groups: Groups, others: Mapping[str, Quantize | None] | None = None, **more: Any
) -> Layout:
    config = {
        "quant_method": "gptq",
        "bits": groups.bits,
        "group_size": groups.size,
        "sym": groups.symmetric,
        "desc_act": groups.ordered,
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        **({} if groups.kind == "gptq" else {"checkpoint_format": groups.kind}),
    }
    return Layout({**config, **more}, groups, others=others or {})


def _awq(
    groups: Groups, others: Mapping[str, Quantize | None] | None = None, **more: Any
) -> Layout:
    config = {
        "quant_method": "awq",
        "bits": groups.bits,
        "group_size": groups.size,
        "version": "gemm",
        "zero_point": not groups.symmetric,
    }
    return Layout({**config, **more}, groups, others=others or {})


def _auto_round(
    groups: Groups,
    packing: str,
    others: Mapping[str, Quantize | None] | None = None,
    **more: Any,
) -> Layout:
    config = {
        "quant_method": "auto-round",
        "bits": groups.bits,
        "group_size": groups.size,
        "sym": groups.symmetric,
        "data_type": "int",
        "packing_format": packing,
        "block_name_to_quantize": "model.layers",
        "autoround_version": "0.9.2",
        "iters": 200,
    }
    return Layout({**config, **more}, groups, others=others or {})


# q and k are quantized in different ways, v is plain, and so are those of a layer.
MIXED: Mapping[str, Quantize | None] = {
    "k_proj": Groups(bits=8, size=-1),
    "v_proj": None,
    "0.mlp.up_proj": None,
    "lm_head": Groups(bits=8),
}

LAYOUTS: Mapping[str, Layout] = {
    "gptq": _gptq(Groups()),
    "gptq channel": _gptq(Groups(size=-1)),
    "gptq zeros": _gptq(Groups(symmetric=False)),
    "gptq act-order": _gptq(Groups(ordered=True)),
    "gptq v2 zeros act-order": _gptq(
        Groups(kind="gptq_v2", symmetric=False, ordered=True, size=16)
    ),
    "gptq int8": _gptq(Groups(bits=8)),
    "gptq int8 zeros": _gptq(Groups(bits=8, symmetric=False)),
    "gptq mixed": _gptq(
        Groups(),
        MIXED,
        lm_head=True,
        dynamic={
            r"-:.*[.]v_proj": {},
            r"-:model[.]layers[.]0[.]mlp[.]up_": {},
            r"+:.*[.]k_proj": {"bits": 8, "group_size": -1},
            "lm_head": {"bits": 8},
            # Only layers that no other expression matches.
            ".*": {"bits": 4},
        },
    ),
    "gptq of some modules": _gptq(
        Groups(),
        {"v_proj": None, "mlp.up_proj": None},
        modules_in_block_to_quantize=[
            ["self_attn.k_proj", "self_attn.q_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj"],
            ["mlp.down_proj"],
        ],
    ),
    "awq of some modules": _awq(
        Groups(kind="awq", symmetric=False),
        {"v_proj": None, "1.self_attn.o_proj": None},
        modules_to_not_convert=["lm_head", "v_proj", "layers.1.self_attn.o"],
    ),
    "auto-round mixed": _auto_round(
        Groups(),
        "auto_round:auto_gptq",
        MIXED,
        extra_config={
            r".*v_proj.*": {"bits": 16},
            "model.layers.0.mlp.up_proj": {"bits": 16},
            r"self_attn\.k": {"bits": 8, "group_size": -1},
            "lm_head": {"bits": 8, "group_size": 32, "sym": True, "act_bits": 16},
        },
    ),
    "awq": _awq(Groups(kind="awq", symmetric=False), modules_to_not_convert=["lm_head"]),
    "awq symmetric": _awq(Groups(kind="awq", size=-1)),
    "auto-round gptq": _auto_round(Groups(), "auto_round:auto_gptq"),
    "auto-round zeros": _auto_round(Groups(kind="gptq_v2", symmetric=False), "auto_round"),
    "auto-round awq": _auto_round(Groups(kind="awq", symmetric=False), "auto_round:auto_awq"),
}
