"""The two products of attention, with the same bits for a row whatever is computed beside it.

In: queries, keys, values and weights as batches of matrices. Out: scores, and weighted sums of V.

A library may compute products of few rows with other instructions, in another order of additions.
In float32, MKL does so below 3 rows for heads of 64, and below 5 for heads of 128. So a test with
random numbers finds permitted numbers of rows when an engine starts (see `row_rule`), and
matrices with other numbers get additional rows of zeros.

The test also finds in which order the library adds. If it is an order of the kernels
(`cpu_kernels.paged_attention`), one-token rows read K and V in place and get the bits of a prompt.

Shapes: X matrices, M rows, S keys of a split, C splits, L = C S keys, H head_dim, V numbers of a
head of v.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import multiplies_bf16, product_and_lost, wide_scores
from baton_engine.attention.exact.paged_products import (
    Arrays,
    Orders,
    PagedMatrices,
    can_compute,
)
from baton_engine.attention.exact.row_rule import ROW_COUNTS, TEST_ROWS, RowRule, find_rule
from baton_engine.attention.layer_kv import LayerKV
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.attention_task import Order, Part
from baton_engine.cpu_kernels.paged_attention import TILE, UNIT
from baton_engine.cpu_kernels.softmax import SplitFactors, prompt_weights
from baton_engine.cpu_kernels.split_sums import sum_splits

# Matrices and splits of the larger products of the test.
MATRICES = 3
SPLITS = 5
# The fewest numbers of q and k whose products a library adds before it adds them to a score. MKL
# takes 192 on a CPU of AMD.
LEAST_BLOCK = 128


@dataclass(frozen=True, slots=True)
class BatchedProducts:
    """`rule` has no number of rows if bits depend on it. `orders` are those of both products; None
    if the kernels have no such order."""

    rule: RowRule
    orders: Orders | None = None

    @classmethod
    def for_heads(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int, *, value_dim: int, keys: int
    ) -> BatchedProducts:
        """The products of heads of q and k with `head_dim` numbers, of v with `value_dim`, and
        splits of `keys` keys."""
        if device.type != "cpu":
            return cls(RowRule(()))
        return _tested(dtype, (head_dim, value_dim), keys, torch.get_num_threads())

    @property
    def exact(self) -> bool:
        return bool(self.rule.counts)

    @property
    def most_rows(self) -> int:
        """The largest number of rows of a product."""
        return self.rule.counts[-1] if self.exact else ROW_COUNTS[-1]

    def rows(self, count: int) -> int:
        """The number of rows to compute for `count` rows, at most `most_rows`."""
        return next((rows for rows in self.rule.counts if rows >= count), count)

    def scores(self, q_XMH: torch.Tensor, k_XLH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Scores of all keys, float32 [X, M, L], contiguous."""
        count = q_XMH.shape[1]
        if count > self.most_rows:
            parts = [self.scores(part, k_XLH, spec) for part in self._divided(q_XMH)]
            return torch.cat(parts, 1)
        missing = self.rows(count) - count
        if missing:
            padded_XMH = F.pad(q_XMH, (0, 0, 0, missing))
            scores_XML = wide_scores(padded_XMH, k_XLH, spec.scale)[:, :count].contiguous()
        else:
            scores_XML = wide_scores(q_XMH.contiguous(), k_XLH, spec.scale)
        if spec.soft_cap is not None:
            scores_XML.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        return scores_XML

    def sums(self, weights_XMCS: torch.Tensor, v_XLV: torch.Tensor) -> torch.Tensor:
        """Sums of V times weight by split, [X, M, C, V], in the dtype of V."""
        matrices, count, splits, keys = weights_XMCS.shape
        if count > self.most_rows:
            return torch.cat([self.sums(part, v_XLV) for part in self._divided(weights_XMCS)], 1)
        shape = matrices, splits, self.rows(count), keys
        padded_XCMS = torch.empty(shape, dtype=v_XLV.dtype, device=v_XLV.device)
        padded_XCMS[:, :, :count].copy_(weights_XMCS.transpose(1, 2))
        padded_XCMS[:, :, count:] = 0.0
        return self.multiplied(padded_XCMS, v_XLV)[:, :count]

    def multiplied(self, weights_XCMS: torch.Tensor, v_XLV: torch.Tensor) -> torch.Tensor:
        """The same, of a permitted number of rows in another order."""
        matrices, splits, _, keys = weights_XCMS.shape
        weights_YMS = weights_XCMS.flatten(0, 1)
        v_YSV = v_XLV.reshape(matrices * splits, keys, -1)
        if v_XLV.dtype == torch.bfloat16 and not multiplies_bf16():
            sums_YMV = torch.bmm(weights_YMS.float(), v_YSV.float()).bfloat16()
        else:
            sums_YMV = torch.bmm(weights_YMS, v_YSV)
        return sums_YMV.view(matrices, splits, *sums_YMV.shape[1:]).transpose(1, 2)

    def weights(
        self,
        q_XMH: torch.Tensor,
        k_XLH: torch.Tensor,
        spec: AttentionSpec,
        seen_R2: npt.NDArray[np.int32],
        split: int,
        sinks_XR: torch.Tensor | None = None,
        factors: SplitFactors | None = None,
    ) -> torch.Tensor:
        """Attention weights [X, C, M, S] in the dtype of K, for multiplied(), on a CPU. Of a
        permitted number of rows, the first R see keys [begin, end) = `seen_R2`, and have a sink if
        there are any; the weights of the others are not set. With `factors` they are weights by
        split (see cpu_kernels.softmax)."""
        scores: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        if q_XMH.dtype == torch.bfloat16 and multiplies_bf16() and spec.soft_cap is None:
            scores = product_and_lost(q_XMH, k_XLH)
        else:
            scores = self.scores(q_XMH, k_XLH, spec)
        return prompt_weights(scores, seen_R2, split, k_XLH.dtype, spec.scale, sinks_XR, factors)

    def _divided(self, tensor_XM: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(tensor_XM, self.most_rows, 1))


@functools.cache
def _tested(dtype: torch.dtype, dims: tuple[int, int], keys: int, threads: int) -> BatchedProducts:
    """Find the numbers of rows with which both products give a row the same bits, for any number of
    columns and matrices. Takes a tenth of a second; cached per process, for each number of
    `threads`."""
    noise = torch.Generator().manual_seed(0)
    head_dim, value_dim = dims
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=head_dim, scale=1.0)
    untested = BatchedProducts(RowRule(ROW_COUNTS))
    k_XCSH = torch.randn(MATRICES, SPLITS, keys, head_dim, generator=noise).to(dtype)
    v_XCSV = torch.randn(MATRICES, SPLITS, keys, value_dim, generator=noise).to(dtype)
    w_RS = torch.rand(TEST_ROWS, keys, generator=noise)
    # The second half of a sum cancels the first. What rounding leaves shows the order of additions,
    # even in bfloat16.
    half = keys // 2
    w_RS[:, half : 2 * half] = w_RS[:, :half]
    v_XCSV[:, :, half : 2 * half] = -v_XCSV[:, :, :half]
    v_XCSV[:, :, 2 * half :] = 0.0

    def product(x_MI: torch.Tensor) -> torch.Tensor:
        """Scores and sums of rows of (query, weights). NaN if the bits depend on the number of
        matrices or splits."""
        q_MH, w_MS = x_MI[:, :head_dim].to(dtype), x_MI[:, head_dim:]
        parts = []
        for matrices, splits in ((MATRICES, SPLITS), (MATRICES, 1), (1, 1)):
            some = slice(matrices), slice(splits)
            q_XMH = q_MH.expand(matrices, -1, -1)
            w_XMCS = w_MS[None, :, None].expand(matrices, -1, splits, -1)
            scores_XML = untested.scores(q_XMH, k_XCSH[some].flatten(1, 2), spec)
            sums_XMCV = untested.sums(w_XMCS, v_XCSV[some].flatten(1, 2))
            parts.append((scores_XML, sums_XMCV))
        scores_XML, sums_XMCV = parts[0]
        for scores, sums in parts[1:]:
            matrices, _, splits, _ = sums.shape
            same = torch.equal(scores, scores_XML[:matrices, :, : splits * keys])
            if not same or not torch.equal(sums, sums_XMCV[:matrices, :, :splits]):
                scores_XML.fill_(torch.nan)
        each = (scores_XML.transpose(0, 1), sums_XMCV.float().transpose(0, 1))
        return torch.cat([part.flatten(1) for part in each], 1)

    q_RH = torch.randn(TEST_ROWS, head_dim, generator=noise).to(dtype).float()
    rule = find_rule(product, torch.cat((q_RH, w_RS), 1), ROW_COUNTS)
    if not rule.counts:
        return BatchedProducts(rule)
    w_XMCS = w_RS[None, :, None].expand(MATRICES, -1, SPLITS, -1)
    return BatchedProducts(rule, _orders(BatchedProducts(rule), q_RH, w_XMCS, k_XCSH, v_XCSV))


def _orders(
    products: BatchedProducts,
    q_MH: torch.Tensor,
    w_XMCS: torch.Tensor,
    k_XCSH: torch.Tensor,
    v_XCSV: torch.Tensor,
) -> Orders | None:
    """The orders in which the library adds, found with some queries and weights."""
    (matrices, splits, keys, dim), rows = k_XCSH.shape, len(q_MH)
    dtype, value_dim, block = k_XCSH.dtype, v_XCSV.shape[3], UNIT
    if not can_compute(dtype, dim, value_dim, block) or keys % TILE:
        return None
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=dim, scale=dim**-0.5)
    q_XMH = q_MH.to(dtype).expand(matrices, -1, -1)
    scores_XML = products.scores(q_XMH, k_XCSH.flatten(1, 2), spec)
    sums_XMV = sum_splits(products.sums(w_XMCS, v_XCSV.flatten(1, 2)))
    blocks_XP = np.arange(matrices * splits * keys // block).reshape(matrices, -1)
    heads_X = np.zeros(matrices, np.int64)
    rows_XM = np.arange(matrices * rows).reshape(matrices, rows)
    seen_X2 = np.tile((0, splits * keys), (matrices, 1))
    scores_QL, sums_QV = (
        torch.empty(matrices * rows, splits * keys),
        torch.empty(matrices * rows, value_dim),
    )
    pages = [each.view(-1, 1, block, each.shape[3]) for each in (k_XCSH, v_XCSV)]
    arrays = Arrays(
        kv=LayerKV(*pages),
        queries_QH=q_XMH.reshape(-1, dim),
        scores_QL=scores_QL,
        sums_QV=sums_QV,
        output_QV=sums_QV,  # not written
    )

    def compute(parts: Part, orders: Orders) -> None:
        matrices = blocks_XP, heads_X, rows_XM, seen_X2
        PagedMatrices(*matrices, split=keys, orders=orders).compute(parts, arrays, spec.scale)

    def adds_scores(orders: Orders) -> bool:
        compute(Part.SCORES, orders)
        return torch.equal(scores_QL.view(scores_XML.shape), scores_XML)

    def adds_sums(order: Order) -> bool:
        scores_QL.copy_(w_XMCS.reshape(scores_QL.shape))
        compute(Part.NO_SUMS | Part.SUMS, Orders(order, order))
        return torch.equal(sums_QV.view(sums_XMV.shape), sums_XMV)

    blocks = 0, *range(LEAST_BLOCK, dim, TILE)
    possible = (Orders(order, order, block) for block in blocks for order in Order)
    scores = next(filter(adds_scores, possible), None)
    sums = next(filter(adds_sums, Order), None)
    return None if scores is None or sums is None else replace(scores, sums=sums)
