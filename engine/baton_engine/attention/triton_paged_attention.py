"""Unified paged attention: prompts, later pieces of prompts and one-token rows in one launch.

In: rotated queries; one layer of the pool, which already has the step's own K and V; and each row's
tokens and blocks. Out: attention outputs. Torch twin: `torch_backend.TorchAttention`.

A program computes one tile of a row's queries for one kv head. The tile has all G query heads of
that kv head, so K and V are read once for all of them. If there are too few rows to fill the
device, the keys of a one-token row are divided among several programs, and a second kernel joins
their parts. The device decides how many programs a row uses, from its length. So a launch depends
only on shapes and can be recorded in a CUDA graph.

Shapes: T tokens, R rows, M blocks of the longest row, N query heads, K kv heads, G = N / K,
H head_dim, B block size, P blocks of the pool, S splits. In a program: Q queries times heads,
J keys, D head_dim as the next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# The smallest size of each dimension of a triton dot product.
LEAST_DOT = 16
# Queries times heads in a tile of a longer row.
QUERIES = 64
# Bytes of K in a tile of keys, and stages of K and V in flight: 64 KiB of shared memory.
KEY_BYTES, STAGES = 16384, 2
ONE_TOKEN_KEY_BYTES, ONE_TOKEN_STAGES = 8192, 4
MOST_KEYS = 64
# Minimum number of keys for a program of its own.
SPLIT_KEYS = 128
MAX_SPLITS = 32
# Number of programs per multiprocessor that hides the latency of their loads.
PROGRAMS_PER_PROCESSOR = 4
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step; int32, on the device.

    Row r's new tokens are tokens [starts[r], starts[r + 1]) of the step and the last of the row's
    lengths[r] tokens. With `one_token` each row has one new token: row r has token r. A row of
    length 0 is padding, and its output is not written.
    """

    starts_R1: torch.Tensor
    lengths_R: torch.Tensor
    table_RM: torch.Tensor
    one_token: bool


def splits_for(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Maximum number of programs that share the keys of a one-token row; a power of two.
    `longest` is the maximum number of tokens of a row, `processors` the number of
    multiprocessors."""
    room = PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads)
    most = min(room, -(-longest // SPLIT_KEYS), MAX_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


def paged_attention(
    q_TNH: torch.Tensor,
    layer_P2KBH: torch.Tensor,
    rows: PagedRows,
    out_TNH: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int = 1,
) -> None:
    """Compute attention into `out_TNH`, which must be contiguous.

    The last dimension of q, and the last two (B, H) of the pool, must be contiguous; other strides
    are free. `splits` is a power of two. `scale`, `window` and `soft_cap` are those of
    AttentionSpec; the default scale is 1 / sqrt(H).
    """
    tokens, heads, dim = q_TNH.shape
    scale = dim**-0.5 if scale is None else scale
    # The kernel computes weights as powers of 2.
    factors = (scale * LOG2_E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)
    _, _, kv_heads, block_size, _ = layer_P2KBH.shape
    num_rows, group = rows.lengths_R.shape[0], heads // kv_heads
    queries, keys, stages = tile_shape(rows.one_token, group, dim, q_TNH.element_size())
    tiles = num_rows if rows.one_token else tokens // (queries // group) + num_rows
    # Partial results of the splits of a one-token row: weighted sums of V, and the maximum and the
    # sum of the weights.
    size = (num_rows, heads, splits) if splits > 1 else (0, 0, 0)
    parts_RNSH = torch.empty(*size, dim, dtype=torch.float32, device=q_TNH.device)
    stats_RNS2 = torch.empty(*size, 2, dtype=torch.float32, device=q_TNH.device)
    results = out_TNH, parts_RNSH, stats_RNS2
    where = rows.starts_R1, rows.lengths_R, num_rows
    fixed = {
        "DIM": dim,
        "DIM_P": max(triton.next_power_of_2(dim), LEAST_DOT),
        "WINDOW": window or 0,
        "SPLITS": splits,
        "KEYS": keys,
        "LEAST": max(SPLIT_KEYS // keys, 1),
    }
    _attend[(tiles, kv_heads, splits)](
        *results,
        *where,
        *(rows.table_RM, rows.table_RM.stride(0)),
        *(q_TNH, q_TNH.stride(0), q_TNH.stride(1), *factors),
        *(layer_P2KBH, *layer_P2KBH.stride()[:3]),
        GROUP=group,
        BLOCK=block_size,
        CAPPED=soft_cap is not None,
        ONE_TOKEN=rows.one_token,
        QUERIES=queries,
        num_stages=stages,
        **fixed,
    )
    if splits > 1:
        _join[(num_rows, heads)](*results, *where, **fixed)


def tile_shape(one_token: bool, group: int, dim: int, item_bytes: int) -> tuple[int, int, int]:
    """Size of a tile: queries times heads, keys, and pipeline stages."""
    least, key_bytes, stages = QUERIES, KEY_BYTES, STAGES
    if one_token:
        least, key_bytes, stages = LEAST_DOT, ONE_TOKEN_KEY_BYTES, ONE_TOKEN_STAGES
    if item_bytes == 4:  # no tensor cores: larger tiles overflow into memory
        least, key_bytes = LEAST_DOT, ONE_TOKEN_KEY_BYTES
    keys = key_bytes // (triton.next_power_of_2(dim) * item_bytes)
    queries = max(triton.next_power_of_2(group), least)
    return queries, min(max(keys, LEAST_DOT), MOST_KEYS), stages


@triton.jit
def _row_of(
    starts: tl.tensor, num_rows: tl.tensor, index: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The row of tile `index` of the queries. The tiles of row r begin at starts[r] // TOKENS + r,
    which leaves room for all of them before the tiles of row r + 1."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _key_tiles(
    first: tl.tensor,
    end: tl.tensor,
    splits: tl.tensor,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
) -> tl.tensor:
    """The key tiles [begin, stop) that queries at positions [first, end) see, and the number of
    tiles per split."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS
    stop = tl.cdiv(end, KEYS)
    share = tl.maximum(tl.cdiv(stop - begin, splits), LEAST)
    return begin, stop, share


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _attend(
    out_TNH: tl.tensor,
    parts_RNSH: tl.tensor,
    stats_RNS2: tl.tensor,
    starts_R1: tl.tensor,
    lengths_R: tl.tensor,
    num_rows: tl.tensor,
    table_RM: tl.tensor,
    table_stride: tl.tensor,
    q_TNH: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    pool_P2KBH: tl.tensor,
    pool_block: tl.tensor,
    pool_kv: tl.tensor,
    pool_head: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = QUERIES // GROUP
    row = index if ONE_TOKEN else _row_of(starts_R1, num_rows, index, TOKENS)
    begin = index if ONE_TOKEN else tl.load(starts_R1 + row)
    count = 1 if ONE_TOKEN else tl.load(starts_R1 + row + 1) - begin
    length = tl.load(lengths_R + row)
    first = 0 if ONE_TOKEN else (index - begin // TOKENS - row) * TOKENS
    if first >= count:
        return

    past = length - count
    end = tl.minimum(past + first + TOKENS, length)
    splits = tl.where(count == 1, SPLITS, 1)
    tile, stop, share = _key_tiles(past + first, end, splits, WINDOW, KEYS, LEAST)
    divided = stop - tile > share if SPLITS > 1 else False
    tile += split * share
    stop = tl.minimum(stop, tile + share)
    if tile >= stop:
        return

    lane_Q = tl.arange(0, QUERIES)
    token_Q = first + lane_Q // GROUP
    head_Q = kv_head * GROUP + lane_Q % GROUP
    dim_D = tl.arange(0, DIM_P)
    live_QD = ((token_Q < count) & (lane_Q < TOKENS * GROUP))[:, None] & (dim_D < DIM)[None, :]
    q_ptrs = q_TNH + (begin + token_Q) * q_token + head_Q * q_head
    q_QD = tl.load(q_ptrs[:, None] + dim_D[None, :], mask=live_QD, other=0.0)

    top_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_Q = tl.zeros([QUERIES], tl.float32)
    acc_QD = tl.zeros([QUERIES, DIM_P], tl.float32)
    pool_P2KBH += kv_head * pool_head
    for each in range(tile, stop):
        key_J = each * KEYS + tl.arange(0, KEYS)
        # Memory beyond the row's end may have any value, NaN too, so it is never read.
        known_J = key_J < end
        block_J = tl.load(table_RM + row * table_stride + key_J // BLOCK, mask=known_J, other=0)
        # The pool has too many elements for 32-bit offsets.
        place_J = block_J.to(tl.int64) * pool_block + key_J % BLOCK * DIM
        k_DJ = tl.load(
            pool_P2KBH + place_J[None, :] + dim_D[:, None],
            mask=known_J[None, :] & (dim_D < DIM)[:, None],
            other=0.0,
        )
        v_JD = tl.load(
            pool_P2KBH + pool_kv + place_J[:, None] + dim_D[None, :],
            mask=known_J[:, None] & (dim_D < DIM)[None, :],
            other=0.0,
        )
        score_QJ = tl.dot(q_QD, k_DJ, input_precision="ieee") * scale
        if CAPPED:
            # tanh; exp of a number <= 0 cannot overflow.
            shrunk_QJ = tl.exp(-2.0 * tl.abs(score_QJ))
            tanh_QJ = (1.0 - shrunk_QJ) / (1.0 + shrunk_QJ)
            score_QJ = tl.where(score_QJ < 0, -tanh_QJ, tanh_QJ) * cap
        seen_QJ = (key_J[None, :] <= past + token_Q[:, None]) & known_J[None, :]
        if WINDOW > 0:
            seen_QJ &= key_J[None, :] > past + token_Q[:, None] - WINDOW
        score_QJ = tl.where(seen_QJ, score_QJ, float("-inf"))
        new_top_Q = tl.maximum(top_Q, tl.max(score_QJ, 1))
        # A query whose window begins in a later tile has seen no key yet: avoid -inf - -inf = NaN.
        base_Q = tl.where(new_top_Q == float("-inf"), 0.0, new_top_Q)
        weight_QJ = tl.exp2(score_QJ - base_Q[:, None])
        decay_Q = tl.exp2(top_Q - base_Q)
        sum_Q = sum_Q * decay_Q + tl.sum(weight_QJ, 1)
        acc_QD = acc_QD * decay_Q[:, None]
        acc_QD = tl.dot(weight_QJ.to(v_JD.dtype), v_JD, acc_QD, input_precision="ieee")
        top_Q = new_top_Q

    heads = tl.num_programs(1) * GROUP
    if divided:
        part_Q = (row * heads + head_Q) * SPLITS + split
        tl.store(parts_RNSH + part_Q[:, None] * DIM + dim_D[None, :], acc_QD, mask=live_QD)
        tl.store(stats_RNS2 + part_Q * 2, top_Q, mask=lane_Q < GROUP)
        tl.store(stats_RNS2 + part_Q * 2 + 1, sum_Q, mask=lane_Q < GROUP)
        return
    # Lanes without a query may have a sum of 0.
    result_QD = acc_QD / tl.where(sum_Q == 0.0, 1.0, sum_Q)[:, None]
    out_Q = ((begin + token_Q) * heads + head_Q) * DIM
    value_QD = result_QD.to(out_TNH.dtype.element_ty)
    tl.store(out_TNH + out_Q[:, None] + dim_D[None, :], value_QD, mask=live_QD)


@triton.jit(do_not_specialize=["num_rows"])
def _join(
    out_TNH: tl.tensor,
    parts_RNSH: tl.tensor,
    stats_RNS2: tl.tensor,
    starts_R1: tl.tensor,
    lengths_R: tl.tensor,
    num_rows: tl.tensor,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Join the parts of a one-token row whose keys were divided. _attend wrote the outputs of all
    other rows."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts_R1 + row)
    length = tl.load(lengths_R + row)
    tile, stop, share = _key_tiles(length - 1, length, SPLITS, WINDOW, KEYS, LEAST)
    if (tl.load(starts_R1 + row + 1) - begin != 1) | (stop - tile <= share):
        return

    split_S = tl.arange(0, SPLITS)
    dim_D = tl.arange(0, DIM_P)
    # Splits without keys have written nothing.
    used_S = split_S < tl.cdiv(stop - tile, share)
    part_S = (row * tl.num_programs(1) + head) * SPLITS + split_S
    top_S = tl.load(stats_RNS2 + part_S * 2, mask=used_S, other=float("-inf"))
    sum_S = tl.load(stats_RNS2 + part_S * 2 + 1, mask=used_S, other=0.0)
    weight_S = tl.exp2(top_S - tl.max(top_S, 0))
    parts_SD = tl.load(
        parts_RNSH + part_S[:, None] * DIM + dim_D[None, :],
        mask=used_S[:, None] & (dim_D < DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight_S * sum_S, 0)
    result_D = tl.sum(parts_SD * weight_S[:, None], 0) / total
    out_D = (begin * tl.num_programs(1) + head) * DIM + dim_D
    tl.store(out_TNH + out_D, result_D.to(out_TNH.dtype.element_ty), mask=dim_D < DIM)
