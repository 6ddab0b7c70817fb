"""The experts of a step with quantized weights on a CPU, by `cpu_kernels.quantized`.

Pairs of a token and one of its experts are sorted by expert, so that an expert's weights are read
once per step. Outputs of gate and up, the inner numbers and the outputs of an expert are rounded as
by separate operations, and a token's experts are added one by one in float32.

Shapes: T tokens, D hidden size, E experts, C experts of a token, F inner size of an expert,
G = 2 F, P = T C pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_engine.cpu_kernels.experts import sorted_pairs
from baton_engine.cpu_kernels.quantized import PackedWeight, Places, multiply_parts
from baton_engine.cpu_kernels.silu import silu_mul
from baton_engine.layers.quantization.cpu_products import Inputs, can_multiply, packed_weight
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedCPUExperts:
    """Packed weights. `clamp` has alpha and the limit of a clamped gate."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_inputs: Inputs
    down_inputs: Inputs
    clamp: tuple[float, float] | None


def pack_quantized_experts(
    gate_up_EGD: QuantizedWeight,
    down_EDF: QuantizedWeight,
    gate_up_bias_EG: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    clamp: tuple[float, float] | None,
) -> QuantizedCPUExperts | None:
    """None if the kernels do not compute products with these weights."""
    if not (can_multiply(gate_up_EGD) and can_multiply(down_EDF)):
        return None
    return QuantizedCPUExperts(
        gate_up=packed_weight(gate_up_EGD, gate_up_bias_EG),
        down=packed_weight(down_EDF, down_bias_ED),
        gate_up_inputs=Inputs.of(gate_up_EGD),
        down_inputs=Inputs.of(down_EDF),
        clamp=clamp,
    )


def multiply_quantized_experts(
    x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor, experts: QuantizedCPUExperts
) -> torch.Tensor:
    """The sum [T, D] of the outputs of each token's experts, times their weights."""
    if not len(x_TD):
        return torch.empty_like(x_TD)
    tokens, chosen = ids_TC.shape
    order_P, parts_U3 = sorted_pairs(ids_TC.numpy().reshape(-1))
    numbers_TD, factors_T = experts.gate_up_inputs(x_TD)
    gate_up_PG = multiply_parts(
        *(numbers_TD, experts.gate_up, x_TD.dtype, parts_U3, factors_T),
        Places(order_P // chosen, order_P),
    )
    inner_PF, factors_P = experts.down_inputs(_gated(gate_up_PG, experts.clamp))
    out_PD = multiply_parts(
        *(inner_PF, experts.down, x_TD.dtype, parts_U3, factors_P), Places(order_P, order_P)
    )
    out_TCD = out_PD.view(tokens, chosen, -1)
    sums_TD = torch.zeros(tokens, out_PD.shape[1])
    for number in range(chosen):
        sums_TD += out_TCD[:, number].float() * weights_TC[:, number, None]
    return sums_TD.to(x_TD.dtype)


def _gated(gate_up_PG: torch.Tensor, clamp: tuple[float, float] | None) -> torch.Tensor:
    """As `layers.experts.gated`, with the same bits for a number at any place. A clamped gate is
    silu(alpha * gate) times (up + 1) / alpha."""
    if clamp is None:
        return silu_mul(gate_up_PG)
    alpha, limit = clamp
    gate_PF, up_PF = gate_up_PG.float().chunk(2, dim=1)
    gate_PF = gate_PF.clamp(max=limit) * alpha
    up_PF = (up_PF.clamp(-limit, limit) + 1.0) / alpha
    return silu_mul(torch.cat([gate_PF, up_PF], 1)).to(gate_up_PG.dtype)
