"""Sums of attention's splits, one after the other, compiled or with torch's operators.

Shapes: X matrices of Y rows, M of them used, T tokens, C splits; N query heads, K kv heads,
G = N / K, H numbers of a head of v.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import number_at, store_numbers
from baton_engine.cpu_kernels.openmp import COUNTER, NONE_TAKEN, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.softmax import SplitFactors
from baton_engine.cpu_kernels.vectors import (
    add,
    broadcast,
    load_number,
    multiply,
    rounded_to_bf16,
    take_next,
)

# The argument of the kernels that add splits: the addresses of sums [X, C, Y, H] and of output
# rows of `heads` * H numbers, the first of which is that of the first token. Row m of matrix x is
# query head (`first` + x) G + m % G of token m // G. `factors` are those of SplitFactors, or 0.
_Splits = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "splits", "height", "dim", "tokens")),
        *((name, np.int64) for name in ("group", "heads", "first", "sums", "output", "factors")),
    ]
)


def can_add_splits(out_TNH: torch.Tensor) -> bool:
    """Whether add_splits() supports these outputs."""
    numbers = out_TNH.dtype in (torch.float32, torch.bfloat16)
    whole = out_TNH.shape[-1] % LANES == 0 and out_TNH.is_contiguous()
    return out_TNH.device.type == "cpu" and numbers and whole


def add_splits(
    sums_XCYH: torch.Tensor,
    out_TNH: torch.Tensor,
    group: int,
    first: int,
    factors: SplitFactors | None = None,
) -> None:
    """Add the splits of each row in ascending order, in float32, and write the sums of the T G rows
    of matrix x to query heads (first + x) G and following of `out_TNH`."""
    matrices, splits, height, dim = sums_XCYH.shape
    task = _Splits(
        *(NONE_TAKEN, matrices, splits, height, dim, len(out_TNH), group, out_TNH.shape[1], first),
        *(sums_XCYH.data_ptr(), out_TNH.data_ptr()),
        0 if factors is None else factors.factors_XMC2.data_ptr(),
    )
    function = bf16_add_splits if out_TNH.dtype == torch.bfloat16 else fp32_add_splits
    run_kernel(function, task)


def sum_splits(sums_XMCH: torch.Tensor, factors: SplitFactors | None = None) -> torch.Tensor:
    """The sums of all splits, added in ascending order: float32 [X, M, H], a new tensor."""
    found_XMH = sums_XMCH[:, :, 0].to(torch.float32, copy=True)
    if factors is None:
        for split in range(1, sums_XMCH.shape[2]):
            found_XMH += sums_XMCH[:, :, split]
        return found_XMH
    factors_C2XM1 = factors.factors_XMC2.permute(2, 3, 0, 1)[..., None]
    found_XMH *= factors_C2XM1[0, 1]
    for split in range(1, sums_XMCH.shape[2]):
        decay_XM1, weight_XM1 = factors_C2XM1[split]
        found_XMH *= decay_XM1
        found_XMH += sums_XMCH[:, :, split].float() * weight_XM1
    return found_XMH.mul_(factors_C2XM1[-1, 0])


def fp32_add_splits(pointer: Any) -> None:
    _add_splits(pointer, False)


def bf16_add_splits(pointer: Any) -> None:
    _add_splits(pointer, True)


@inlined
def _add_splits(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    dim, group, step = task.dim, task.group, task.height * task.dim
    turn = take_next(pointer)
    while turn < task.matrices * task.tokens:
        x, token = turn // task.tokens, turn % task.tokens
        for member in range(group):
            source = x * task.splits * step + (token * group + member) * dim
            target = (token * task.heads + (task.first + x) * group + member) * dim
            row = (x * task.tokens + token) * group + member
            factors = task.factors + 8 * row * (task.splits + 1)
            for column in range(0, dim, LANES):
                total = number_at(task.sums, source + column, bf16)
                if task.factors:
                    total = multiply(total, broadcast(load_number(factors + 4)))
                for split in range(1, task.splits):
                    part = number_at(task.sums, source + split * step + column, bf16)
                    if task.factors:
                        decay = broadcast(load_number(factors + 8 * split))
                        weight = broadcast(load_number(factors + 8 * split + 4))
                        total, part = multiply(total, decay), multiply(part, weight)
                    total = add(total, part)
                if task.factors:
                    total = multiply(total, broadcast(load_number(factors + 8 * task.splits)))
                if bf16:
                    total = rounded_to_bf16(total)
                store_numbers(task.output, target + column, total, bf16)
        turn = take_next(pointer)
