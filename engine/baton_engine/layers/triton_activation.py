"""activation(gate) * up in one pass, with silu or with gelu's approximation by tanh. Torch twins:
`TorchOps.silu_mul` and `TorchOps.gelu_tanh_mul`.

In: [T, 2 F] from the fused projection, gate before up. Out: [T, F]. Arithmetic is float32. Both are
gate times a sigmoid: of the gate for silu, and for gelu of 2 u with 0.5 (1 + tanh(u)).
Shapes: T tokens, F MLP size.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

BLOCK = 1024


def activation_mul(
    gate_up_TF: torch.Tensor, activation: Literal["silu", "gelu_tanh"]
) -> torch.Tensor:
    """Returns [T, F]. The argument must be contiguous."""
    tokens, size = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = torch.empty(tokens, size, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    _activation_mul[(tokens, triton.cdiv(size, BLOCK))](
        *(out_TF, gate_up_TF, size), GELU=activation == "gelu_tanh", BLOCK=BLOCK
    )
    return out_TF


@triton.jit
def _activation_mul(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    size: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate_at = gate_up_ptr + 2 * row + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=inside, other=0.0).to(tl.float32)
    x = gate
    if GELU:
        # Beyond 20 the sigmoid is 0 or 1, and the cube could overflow.
        near = tl.minimum(tl.maximum(gate, -20.0), 20.0)
        x = 1.5957691216057308 * (near + 0.044715 * near * near * near)  # 2 sqrt(2 / pi)
    # exp of a number <= 0 cannot overflow.
    shrunk = tl.exp(-tl.abs(x))
    sigmoid = tl.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)
    out = gate * sigmoid * up
    tl.store(out_ptr + row + column, out.to(out_ptr.dtype.element_ty), mask=inside)
