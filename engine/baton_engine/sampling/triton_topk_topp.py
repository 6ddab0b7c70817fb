"""Min-p, top-k and top-p of a row of logits, without sorting it.

In: logits in float32, and the columns of `metadata.Draws`. Out, per sample, an edge and a last
token: a token stays if its logit / temperature is above the edge, or equal to the edge and its id
is not above the last token. Torch twin: `sampler.shaped_logits`.

Top-k and top-p both need the largest value v such that the values >= v have enough weight. A value
x weighs 1 for top-k and exp(x - largest) for top-p. float32 values are mapped to integers in the
same order, and v is found four bits at a time, in eight passes over the row. Weights are integers,
too (units of 2^-40), so their sum, and the result, does not depend on the order of addition.

Shapes: S samples, V vocabulary; in a program a tile of the vocabulary at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
UNIT = tl.constexpr(float(1 << 40))
ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(1 << 31)  # added to the ordered int32 keys, so that they start at 0


def shape(
    logits_SV: torch.Tensor, columns_6S: torch.Tensor, edge_S: torch.Tensor, last_S: torch.Tensor
) -> None:
    """Fill `edge_S` (float32) and `last_S` (int32). Each row of `logits_SV` must be contiguous."""
    samples, vocab = logits_SV.shape
    _shape[(samples,)](
        *(edge_S, last_S, logits_SV, columns_6S),
        *(samples, vocab, logits_SV.stride(0)),
        TILE=TILE,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["samples"])
def _shape(
    edge_ptr: tl.tensor,
    last_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    sample = tl.program_id(0)
    row_ptr = logits_ptr + sample.to(tl.int64) * stride
    temperature = tl.load(columns_ptr + sample).to(tl.float32, bitcast=True)
    log_min_p = tl.load(columns_ptr + samples + sample).to(tl.float32, bitcast=True)
    share = tl.load(columns_ptr + 2 * samples + sample).to(tl.float32, bitcast=True)
    top_k = tl.load(columns_ptr + 3 * samples + sample)
    has_top_k = (top_k > 0) & (top_k < vocab)
    edge, last = float("-inf"), vocab
    if (temperature > 0) & (has_top_k | (share < 1) | (log_min_p > float("-inf"))):
        largest = float("-inf")
        for start in range(0, vocab, TILE):
            _, x = _scaled(row_ptr, start, vocab, temperature, TILE)
            largest = tl.maximum(largest, tl.max(x, axis=0))
        edge = largest + log_min_p
        if has_top_k:
            kth = _search(row_ptr, vocab, temperature, edge, largest, top_k, False, TILE)
            edge = tl.maximum(edge, kth)
        if share < 1:
            total = _weigh(row_ptr, vocab, temperature, edge, largest, TILE)
            goal = tl.maximum(tl.ceil(total.to(tl.float64) * share.to(tl.float64)), 1.0)
            goal = goal.to(tl.int64)
            edge = _search(row_ptr, vocab, temperature, edge, largest, goal, True, TILE)
            last = _last_on_edge(row_ptr, vocab, temperature, edge, largest, goal, TILE)
    tl.store(edge_ptr + sample, edge)
    tl.store(last_ptr + sample, last)


@triton.jit
def _scaled(
    row_ptr: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A tile's tokens and their logits / temperature, rounded as torch does; -inf beyond the
    vocabulary."""
    token = start + tl.arange(0, TILE)
    x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
    return token, tl.math.div_rn(x, temperature)


@triton.jit
def _mass(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    return (tl.exp(x - largest) * UNIT).to(tl.int64)


@triton.jit
def _weigh(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    largest: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The total mass of the values that are not below the floor."""
    total = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        _, x = _scaled(row_ptr, start, vocab, temperature, TILE)
        total += tl.sum(tl.where(x >= floor, _mass(x, largest), 0), axis=0)
    return total


@triton.jit
def _search(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    largest: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The largest v such that the values >= v weigh at least `goal`, without those below the floor;
    -inf if there is none."""
    digit = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros((), tl.int64)  # the leading bits of v's key, with keys starting at 0
    for step in range(8):
        shift = 28 - 4 * step
        candidate = ((found + (digit << shift)) - LOWEST).to(tl.int32)
        weight = tl.zeros((16,), tl.int64)
        for start in range(0, vocab, TILE):
            _, x = _scaled(row_ptr, start, vocab, temperature, TILE)
            each = _mass(x, largest) if BY_MASS else (x >= floor).to(tl.int64)
            each = tl.where(x >= floor, each, 0)
            above = _key(x)[None, :] >= candidate[:, None]
            weight += tl.sum(tl.where(above, each[None, :], 0), axis=1)
        found += tl.max(tl.where(weight >= goal, digit, 0), axis=0) << shift
    key = (found - LOWEST).to(tl.int32)
    value = (key ^ ((key >> 31) & ALL_BUT_SIGN)).to(tl.float32, bitcast=True)
    return tl.where(found == 0, float("-inf"), value)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Map floats to int32 in the same order; -0.0 equals 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & ALL_BUT_SIGN)


@triton.jit
def _last_on_edge(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,
    largest: tl.tensor,
    goal: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The highest id among the tokens on the edge that are needed to reach the goal."""
    above = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        _, x = _scaled(row_ptr, start, vocab, temperature, TILE)
        above += tl.sum(tl.where(x > edge, _mass(x, largest), 0), axis=0)
    # Number of tokens on the edge that bring the mass to the goal; each weighs at least one unit.
    each = _mass(edge, largest)
    needed = (goal - above + each - 1) // each
    last = tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        token, x = _scaled(row_ptr, start, vocab, temperature, TILE)
        on_edge = (x == edge).to(tl.int64)
        order = seen + tl.cumsum(on_edge, axis=0)
        last = tl.maximum(last, tl.max(tl.where((on_edge > 0) & (order <= needed), token, 0)))
        seen += tl.sum(on_edge, axis=0)
    return last
