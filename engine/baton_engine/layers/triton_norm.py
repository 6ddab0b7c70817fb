"""Residual add and RMSNorm in one pass. Torch twin: `TorchOps.add_norm`.

In: the residual stream x, the delta to add to it, and the norm's weight. Out: x changed in place,
and its norm. The sum is rounded to x's dtype before it is normalised, as if it were stored and read
again; all other arithmetic is float32. Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add delta to x in place and return RMSNorm(x) [T, D]. x and delta must be contiguous."""
    tokens, size = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(size)
    _add_norm[(tokens,)](
        *(out_TD, x_TD, x_TD if delta_TD is None else delta_TD, weight_D),
        *(size, eps),
        HAS_DELTA=delta_TD is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out_TD


@triton.jit
def _add_norm(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
