"""The two products of attention, with the same bits for a row whatever is computed beside it.

In: queries, keys, values and weights as batches of matrices. Out: scores, and weighted sums of V.

A library may compute products of few rows with other instructions, in another order of additions.
In float32, MKL does so below 3 rows for heads of 64, and below 5 for heads of 128. So matrices with
fewer rows than `least_rows` get additional rows of zeros. A test on random numbers finds
`least_rows` when an engine starts.

Shapes: X matrices, M rows, S keys of a split, C splits, L = C S keys, H head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from baton_engine.attention.cpu_bf16 import wide_scores
from baton_engine.config.model_config import AttentionSpec

CANDIDATES = (1, 4, 8, 16, 32, 64)
# What the test multiplies: numbers of rows, columns of the first product, columns in each product
# of the second (a split).
TESTED_ROWS = (*range(1, 10), 12, 15, 16, 17, 24, 31, 33, 64, 95)
MOST_ROWS = 96
TESTED_KEYS = (64, 320)
MATRICES = 3


@dataclass(frozen=True, slots=True)
class BatchedProducts:
    """`exact` is False if even the largest candidate for `least_rows` changes bits."""

    least_rows: int = 1
    exact: bool = True

    @classmethod
    def for_heads(cls, dtype: torch.dtype, device: torch.device, head_dim: int) -> BatchedProducts:
        return _tested(dtype, head_dim) if device.type == "cpu" else cls()

    def scores(self, q_XMH: torch.Tensor, k_XLH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Scores of all keys, float32 [X, M, L], contiguous."""
        count = q_XMH.shape[1]
        if count < self.least_rows:
            padded_XMH = q_XMH.new_zeros(len(q_XMH), self.least_rows, q_XMH.shape[2])
            padded_XMH[:, :count] = q_XMH
            scores_XML = wide_scores(padded_XMH, k_XLH, spec.scale)[:, :count].contiguous()
        else:
            scores_XML = wide_scores(q_XMH.contiguous(), k_XLH, spec.scale)
        if spec.soft_cap is not None:
            scores_XML.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        return scores_XML

    def sums(self, weights_XCMS: torch.Tensor, v_XLH: torch.Tensor) -> torch.Tensor:
        """Sums of V times weight by split, [X, C, M, H], in the dtype of V."""
        matrices, splits, count, keys = weights_XCMS.shape
        shape = matrices, splits, max(count, self.least_rows), keys
        if count < self.least_rows:
            padded_XCMS = torch.zeros(shape, dtype=v_XLH.dtype, device=v_XLH.device)
            padded_XCMS[:, :, :count] = weights_XCMS
        else:
            padded_XCMS = torch.empty(shape, dtype=v_XLH.dtype, device=v_XLH.device)
            padded_XCMS.copy_(weights_XCMS)
        v_YSH = v_XLH.reshape(matrices * splits, keys, -1)
        sums_YMH = torch.bmm(padded_XCMS.flatten(0, 1), v_YSH)
        return sums_YMH.view(matrices, splits, *sums_YMH.shape[1:])[:, :, :count]


def added(sums_XCMH: torch.Tensor) -> torch.Tensor:
    """The sums of all splits, added in ascending order: float32 [X, M, H], a new tensor."""
    found_XMH = sums_XCMH[:, 0].to(torch.float32, copy=True)
    for split in range(1, sums_XCMH.shape[1]):
        found_XMH += sums_XCMH[:, split]
    return found_XMH


@functools.cache
def _tested(dtype: torch.dtype, head_dim: int) -> BatchedProducts:
    """Find the smallest number of rows from which on both products give a row the same bits for any
    number of rows, columns and matrices. The order of additions depends only on shapes, so random
    numbers show it. Takes tens of milliseconds; cached per process."""
    noise = torch.Generator().manual_seed(0)
    keys = max(TESTED_KEYS)
    q_XMH = torch.randn(MATRICES, MOST_ROWS, head_dim, generator=noise).to(dtype)
    k_XLH = torch.randn(MATRICES, keys, head_dim, generator=noise).to(dtype)
    weights_XML = torch.rand(MATRICES, MOST_ROWS, min(TESTED_KEYS), generator=noise).to(dtype)
    v_XSH = k_XLH[:, : min(TESTED_KEYS)].contiguous()
    scores_XML = wide_scores(q_XMH, k_XLH, 1.0)
    sums_XMH = torch.bmm(weights_XML, v_XSH)

    def same(rows: int, matrices: int) -> bool:
        some, columns = slice(matrices), TESTED_KEYS[rows % len(TESTED_KEYS)]
        scores = wide_scores(q_XMH[some, :rows].contiguous(), k_XLH[some, :columns], 1.0)
        sums = torch.bmm(weights_XML[some, :rows].contiguous(), v_XSH[some])
        return torch.equal(scores, scores_XML[some, :rows, :columns]) and torch.equal(
            sums, sums_XMH[some, :rows]
        )

    bad = [rows for rows in TESTED_ROWS if not (same(rows, 1) and same(rows, MATRICES))]
    able = [least for least in CANDIDATES if least > max(bad, default=0)]
    return BatchedProducts(able[0]) if able else BatchedProducts(CANDIDATES[-1], exact=False)
