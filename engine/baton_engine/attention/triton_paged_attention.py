"""Unified paged attention: prompts, later pieces of prompts and one-token rows in one launch.

In: rotated queries; one layer of the pool, which already has the step's own K and V; and each row's
tokens and blocks. Out: attention outputs. Torch twin: `exact.backend.TorchAttention`.

A program computes one tile of a row's queries for one kv head. The tile has all G query heads of
that kv head, so K and V are read once for all of them. If there are too few rows to fill the
device, the keys of a one-token row are divided among several programs, and a second kernel joins
their parts. The device decides how many programs a row uses, from its length. So a launch depends
only on shapes and can be recorded in a CUDA graph.

With `exact`, the bits of a query's output depend only on the query and the keys that it sees:

- Keys are in splits of FIXED_SPLIT_KEYS, counted from position 0. Each split is reduced from
  scratch, and the splits are added in ascending order. It does not matter whether one program
  computes them all, or several store them for the second kernel.
- Tiles have the same shape for all rows, because the shape decides in which order the compiler adds
  the elements of a tile.
- Keys that a query does not see change nothing: their weight is exactly 0.
- A sink is added last, by the formula that adds a split.
- Kernels are compiled without fused multiply-add, so that the same formula gives the same bits in
  all their variants and in both kernels.

Shapes: T tokens, R rows, M blocks of the longest row, N query heads, K kv heads, G = N / K,
H head_dim, V numbers of a head of v, B block size, P blocks of the pool, S stored parts of a row.
In a program: Q queries times heads, J keys, D head_dim and E numbers of a head of v, each as the
next power of two. For latent rows, D are the numbers that k and v share, which are read once, and F
those that only k has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.attention.layer_kv import LayerKV
from baton_engine.attention.triton_codes import as_bytes, factors_of, is_fp8, numbers_of
from baton_engine.config.step_sizes import STORED_SPLIT_BYTES

# The smallest size of each dimension of a triton dot product.
LEAST_DOT = 16
# Queries times heads in a tile of a longer row, and in any tile with `exact`.
QUERIES = 64
EXACT_QUERIES = 32
# Bytes of K in a tile of keys; its V takes as many.
KEY_BYTES, ONE_TOKEN_KEY_BYTES = 16384, 8192
MOST_KEYS = 64
# Stages of the loop over keys. Triton divides them among the loads of the block table and those of
# K and V, which need the table's: 5 stages are two tiles of K and V in shared memory, where 4 are
# one. With two, the next tile is loaded while one is computed: 32 KiB at head_dim 128, and 64 KiB
# with `exact`. On sm_90 the products of longer rows run asynchronously, and 2 stages are two tiles
# there, in 64 KiB.
STAGES, ONE_TOKEN_STAGES = 2, 5
# Minimum number of keys for a program of its own.
SPLIT_KEYS = 128
MAX_PROGRAMS = 32
# Keys of a split with `exact`. The stored part of 4 heads of 128 has 1.6 % of the bytes of its keys
# and values in bfloat16.
FIXED_SPLIT_KEYS = 256
# Number of programs per multiprocessor that hides the latency of their loads.
PROGRAMS_PER_PROCESSOR = 4
# Stored parts of a row that are loaded at a time.
JOIN_STAGES = tl.constexpr(4)
# The most query heads that one program computes with latent rows. A multiprocessor has 64 Ki
# registers: the sums of 512 numbers of 64 heads take half of them, and those of 128 heads would
# take all, with none left for products. Compiled for an H100, these spill 3,700 bytes per thread
# and take 256 KiB of shared memory, of which it has 227. With `exact` there are two of each sum,
# and 32 heads spill 180 bytes. With more heads, several programs read the same rows. They are
# neighbours in the grid, so they run at the same time, and the cache has the rows for all but the
# first.
MOST_LATENT, EXACT_MOST_LATENT = 64, 16
FLOAT32_BYTES = 4
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, of which kernels read K and V in the pool; int32, on the device.

    Row r's new tokens are tokens [starts[r], starts[r + 1]) of the step and the last of the row's
    lengths[r] tokens. With `one_token` each row has one new token: row r has token r. A row of
    length 0 is padding, and its output is not written.
    """

    starts_R1: torch.Tensor
    lengths_R: torch.Tensor
    table_RM: torch.Tensor
    one_token: bool


@dataclass(frozen=True, slots=True)
class OneTokenTile:
    """The tile of steps of one-token rows without `exact`. It changes the speed, and how results
    are rounded. `keys` is a power of two; None is ONE_TOKEN_KEY_BYTES of K, at most MOST_KEYS."""

    keys: int | None = None
    stages: int = ONE_TOKEN_STAGES
    warps: int = 4


ONE_TOKEN_TILE = OneTokenTile()


def programs_for(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Maximum number of programs that share the keys of a one-token row; a power of two.
    `longest` is the maximum number of tokens of a row, `processors` the number of
    multiprocessors."""
    room = PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads)
    most = min(room, -(-longest // SPLIT_KEYS), MAX_PROGRAMS)
    return 1 << (max(most, 1).bit_length() - 1)


def paged_attention(
    q_TNH: torch.Tensor,
    kv: LayerKV,
    rows: StepRows,
    out_TNV: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: torch.Tensor | None = None,
    programs: int = 1,
    exact: bool = False,
    tile: OneTokenTile = ONE_TOKEN_TILE,
) -> None:
    """Compute attention into `out_TNV`, which must be contiguous.

    The last dimension of q, k and v must be contiguous; other strides are free. K and V are views
    of one pool. `programs` is a power of two, and changes no bit of an `exact` output. `scale`,
    `window` and `soft_cap` are those of AttentionSpec; the default scale is 1 / sqrt(H). `sinks_N`
    are float32.
    """
    tokens, heads, dim = q_TNH.shape
    scale = dim**-0.5 if scale is None else scale
    # The kernel computes weights as powers of 2.
    factors = (scale * LOG2_E.value, 0.0)
    if soft_cap is not None:
        factors = (scale / soft_cap, soft_cap * LOG2_E.value)
    k_PKBH, v_PKBV = kv.k_PKBH, kv.v_PKBV
    assert k_PKBH.stride(0) == v_PKBV.stride(0), "K and V are not views of one pool"
    (_, kv_heads, block_size, _), value_dim = k_PKBH.shape, v_PKBV.shape[3]
    latent = k_PKBH.data_ptr() == v_PKBV.data_ptr()
    rest, head_parts = dim - value_dim, 1
    if latent:
        assert kv_heads == 1, "latent rows of several kv heads"
        head_parts = latent_parts(heads, exact=exact)
    kept = kv.exponents
    exponents = (k_PKBH, v_PKBV, 0)  # not read
    if kept is not None:
        exponents = kept.k_PKB1, kept.v_PKB1, kept.k_PKB1.stride(1)
    first = value_dim if latent else dim
    num_rows, group = rows.lengths_R.shape[0], heads // (kv_heads * head_parts)
    dims = max(first, value_dim)
    shape = tile_shape(rows.one_token, group, dims, q_TNH.element_size(), exact=exact, tile=tile)
    tiles = num_rows if rows.one_token else tokens // (shape.queries // group) + num_rows
    parts = programs
    if exact:
        parts = -(-rows.table_RM.shape[1] * block_size // FIXED_SPLIT_KEYS)
        if num_rows * heads * parts * value_dim * FLOAT32_BYTES > STORED_SPLIT_BYTES:
            programs = 1
    # Partial results of one-token rows: weighted sums of V, and the maximum and the sum of the
    # weights.
    size = (num_rows, heads, parts) if programs > 1 else (0, 0, 0)
    parts_RNSV = torch.empty(*size, value_dim, dtype=torch.float32, device=q_TNH.device)
    stats_RNS2 = torch.empty(*size, 2, dtype=torch.float32, device=q_TNH.device)
    results = out_TNV, parts_RNSV, stats_RNS2, parts, stats_RNS2 if sinks_N is None else sinks_N
    where = rows.starts_R1, rows.lengths_R, num_rows
    fixed = {
        "VALUE": value_dim,
        "VALUE_P": max(triton.next_power_of_2(value_dim), LEAST_DOT),
        "WINDOW": window or 0,
        "PROGRAMS": programs,
        "KEYS": shape.keys,
        "SPLIT": max((FIXED_SPLIT_KEYS if exact else SPLIT_KEYS) // shape.keys, 1),
        "SINKS": sinks_N is not None,
        "EXACT": exact,
    }
    _attend[(tiles * head_parts, kv_heads, programs)](
        *results,
        *where,
        *(rows.table_RM, *rows.table_RM.stride()),
        *(q_TNH, q_TNH.stride(0), q_TNH.stride(1), *factors),
        *(as_bytes(k_PKBH, kept), as_bytes(v_PKBV, kept), k_PKBH.stride(0)),
        *(k_PKBH.stride(1), v_PKBV.stride(1), *exponents),
        CODED=kept is not None,
        FP8=is_fp8(k_PKBH),
        DIM=first,
        DIM_P=max(triton.next_power_of_2(first), LEAST_DOT),
        REST=rest if latent else 0,
        REST_P=max(triton.next_power_of_2(rest), LEAST_DOT) if latent else LEAST_DOT,
        LATENT=latent,
        K_SLOT=k_PKBH.stride(2),
        V_SLOT=v_PKBV.stride(2),
        HEAD_PARTS=head_parts,
        GROUP=group,
        BLOCK=block_size,
        CAPPED=soft_cap is not None,
        ONE_TOKEN=rows.one_token,
        QUERIES=shape.queries,
        num_stages=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=not exact,
        **fixed,
    )
    if programs > 1:
        _join[(num_rows, heads)](*results, *where, enable_fp_fusion=not exact, **fixed)


def latent_parts(heads: int, *, exact: bool) -> int:
    """The number of equal parts, each for a program, of the query heads of a latent layer."""
    least = -(-heads // (EXACT_MOST_LATENT if exact else MOST_LATENT))
    return next(parts for parts in range(least, heads + 1) if heads % parts == 0)


@dataclass(frozen=True, slots=True)
class TileShape:
    """A program's tile. `queries` counts queries times heads."""

    queries: int
    keys: int
    stages: int
    warps: int


def tile_shape(
    one_token: bool,
    group: int,
    dim: int,
    item_bytes: int,
    *,
    exact: bool = False,
    tile: OneTokenTile = ONE_TOKEN_TILE,
) -> TileShape:
    """The tile for a step of one-token rows only, or for any step. An `exact` tile is the same for
    both. It is smaller than that of longer rows, because it holds the sums of a split beside those
    of all splits."""
    dim = triton.next_power_of_2(dim)
    # With four warps, the sums of heads of 256 do not fit the registers. Latent rows have 512.
    warps = 4 if dim <= 128 else 8
    least, key_bytes, stages = QUERIES, KEY_BYTES, STAGES
    if exact:
        least = EXACT_QUERIES if dim <= 256 else EXACT_MOST_LATENT
        stages = ONE_TOKEN_STAGES
    elif one_token:
        least, key_bytes, stages, warps = LEAST_DOT, ONE_TOKEN_KEY_BYTES, tile.stages, tile.warps
    if item_bytes == 4:  # no tensor cores: larger tiles overflow into memory
        least = LEAST_DOT
        key_bytes = KEY_BYTES if exact else ONE_TOKEN_KEY_BYTES
    if dim > 256:
        warps = 8
    keys = min(max(key_bytes // (dim * item_bytes), LEAST_DOT), MOST_KEYS)
    if one_token and not exact and tile.keys is not None:
        keys = tile.keys
    return TileShape(max(triton.next_power_of_2(group), least), keys, stages, warps)


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
    programs: tl.tensor,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """The key tiles [begin, stop) that queries at positions [first, end) see, and the number of
    tiles per program: at least a split. If EXACT, programs take whole splits, counted from position
    0."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS
    stop = tl.cdiv(end, KEYS)
    if EXACT:
        begin = begin // SPLIT * SPLIT
        share = tl.cdiv(tl.cdiv(stop - begin, SPLIT), programs) * SPLIT
    else:
        share = tl.maximum(tl.cdiv(stop - begin, programs), SPLIT)
    return begin, stop, share


@triton.jit
def _attend_tiles(
    tile: tl.tensor,
    stop: tl.tensor,
    q_QD: tl.tensor,
    rest_QF: tl.tensor,
    position_Q: tl.tensor,
    low: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    table_M: tl.tensor,
    table_block: tl.tensor,
    k_PBH: tl.tensor,
    v_PBV: tl.tensor,
    pool_block: tl.tensor,
    k_exponents_PB: tl.tensor,
    v_exponents_PB: tl.tensor,
    CODED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    CAPPED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_P: tl.constexpr,
    REST: tl.constexpr,
    REST_P: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Reduce key tiles [tile, stop): the largest score of each query, and the sums of the weights
    and of V times weight. Only keys at positions [low, end) are read: other memory may have any
    value, NaN too. Of codes, the power of two of a key is a factor of its score, and that of a
    value of its weight, which gives the bits of decoded numbers."""
    top_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_Q = tl.zeros([QUERIES], tl.float32)
    acc_QE = tl.zeros([QUERIES, VALUE_P], tl.float32)
    dim_D = tl.arange(0, DIM_P)
    value_E = tl.arange(0, VALUE_P)
    for place in range(tile, stop):
        key_J = place * KEYS + tl.arange(0, KEYS)
        known_J = key_J < end
        if WINDOW > 0:
            known_J &= key_J >= low
        block_J = tl.load(table_M + key_J // BLOCK * table_block, mask=known_J, other=0)
        # The pool has too many elements for 32-bit offsets.
        place_J = block_J.to(tl.int64) * pool_block
        key_place_J = place_J + key_J % BLOCK * K_SLOT
        k_DJ = tl.load(
            k_PBH + key_place_J[None, :] + dim_D[:, None],
            mask=known_J[None, :] & (dim_D < DIM)[:, None],
            other=0.0,
        )
        if CODED:
            k_DJ = numbers_of(k_DJ, q_QD.dtype, FP8)
            exponent_J = tl.load(k_exponents_PB + place_J + key_J % BLOCK, mask=known_J, other=0)
            factor_J = factors_of(exponent_J)
        if LATENT:
            v_JE = tl.trans(k_DJ)
        else:
            value_place_J = place_J + key_J % BLOCK * V_SLOT
            v_JE = tl.load(
                v_PBV + value_place_J[:, None] + value_E[None, :],
                mask=known_J[:, None] & (value_E < VALUE)[None, :],
                other=0.0,
            )
        score_QJ = tl.dot(q_QD, k_DJ, input_precision="ieee")
        if LATENT:
            rest_F = tl.arange(0, REST_P)
            rest_FJ = tl.load(
                k_PBH + VALUE + key_place_J[None, :] + rest_F[:, None],
                mask=known_J[None, :] & (rest_F < REST)[:, None],
                other=0.0,
            )
            if CODED:
                rest_FJ = numbers_of(rest_FJ, q_QD.dtype, FP8)
            score_QJ = tl.dot(rest_QF, rest_FJ, score_QJ, input_precision="ieee")
        if CODED:
            score_QJ = score_QJ * factor_J[None, :]
        score_QJ = score_QJ * scale
        if CAPPED:
            # tanh; exp of a number <= 0 cannot overflow.
            shrunk_QJ = tl.exp(-2.0 * tl.abs(score_QJ))
            tanh_QJ = (1.0 - shrunk_QJ) / (1.0 + shrunk_QJ)
            score_QJ = tl.where(score_QJ < 0, -tanh_QJ, tanh_QJ) * cap
        seen_QJ = (key_J[None, :] <= position_Q[:, None]) & known_J[None, :]
        if WINDOW > 0:
            seen_QJ &= key_J[None, :] > position_Q[:, None] - WINDOW
        score_QJ = tl.where(seen_QJ, score_QJ, float("-inf"))
        new_top_Q = tl.maximum(top_Q, tl.max(score_QJ, 1))
        # A query whose window begins in a later tile has seen no key yet: avoid -inf - -inf = NaN.
        base_Q = tl.where(new_top_Q == float("-inf"), 0.0, new_top_Q)
        weight_QJ = tl.exp2(score_QJ - base_Q[:, None])
        decay_Q = tl.exp2(top_Q - base_Q)
        sum_Q = sum_Q * decay_Q + tl.sum(weight_QJ, 1)
        acc_QE = acc_QE * decay_Q[:, None]
        if CODED:
            if not LATENT:
                v_JE = numbers_of(v_JE, q_QD.dtype, FP8)
                exponent_J = tl.load(
                    v_exponents_PB + place_J + key_J % BLOCK, mask=known_J, other=0
                )
                factor_J = factors_of(exponent_J)
            weight_QJ = weight_QJ * factor_J[None, :]
        acc_QE = tl.dot(weight_QJ.to(v_JE.dtype), v_JE, acc_QE, input_precision="ieee")
        top_Q = new_top_Q
    return top_Q, sum_Q, acc_QE


@triton.jit
def _factors(top: tl.tensor, part_top: tl.tensor) -> tl.tensor:
    """The larger of two maxima, and the factors of the sums that belong to each of the two."""
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - base), tl.exp2(part_top - base)


@triton.jit
def _store_part(
    parts_RNSV: tl.tensor,
    stats_RNS2: tl.tensor,
    where_Q: tl.tensor,
    live_QE: tl.tensor,
    top_Q: tl.tensor,
    sum_Q: tl.tensor,
    acc_QE: tl.tensor,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
) -> None:
    """Store the part of a one-token row, whose GROUP heads are the first lanes."""
    value_E = tl.arange(0, acc_QE.shape[1])
    head_Q = tl.arange(0, acc_QE.shape[0]) < GROUP
    tl.store(parts_RNSV + where_Q[:, None] * VALUE + value_E[None, :], acc_QE, mask=live_QE)
    tl.store(stats_RNS2 + where_Q * 2, top_Q, mask=head_Q)
    tl.store(stats_RNS2 + where_Q * 2 + 1, sum_Q, mask=head_Q)


@triton.jit(do_not_specialize=["parts", "num_rows", "table_row", "table_block"])
def _attend(
    out_TNV: tl.tensor,
    parts_RNSV: tl.tensor,
    stats_RNS2: tl.tensor,
    parts: tl.tensor,
    sinks_N: tl.tensor,
    starts_R1: tl.tensor,
    lengths_R: tl.tensor,
    num_rows: tl.tensor,
    table_RM: tl.tensor,
    table_row: tl.tensor,
    table_block: tl.tensor,
    q_TNH: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    k_PKBH: tl.tensor,
    v_PKBV: tl.tensor,
    pool_block: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    k_exponents: tl.tensor,
    v_exponents: tl.tensor,
    exponent_row: tl.tensor,
    CODED: tl.constexpr,
    FP8: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    CAPPED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_P: tl.constexpr,
    REST: tl.constexpr,
    REST_P: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    index = tl.program_id(0) // HEAD_PARTS
    head_part = tl.program_id(0) % HEAD_PARTS
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
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
    programs = tl.where(count == 1, PROGRAMS, 1)
    tile, stop, share = _key_tiles(past + first, end, programs, WINDOW, KEYS, SPLIT, EXACT)
    divided = stop - tile > share if PROGRAMS > 1 else False
    tile += program * share
    stop = tl.minimum(stop, tile + share)
    if tile >= stop:
        return

    lane_Q = tl.arange(0, QUERIES)
    token_Q = first + lane_Q // GROUP
    head_Q = (kv_head * HEAD_PARTS + head_part) * GROUP + lane_Q % GROUP
    dim_D = tl.arange(0, DIM_P)
    value_E = tl.arange(0, VALUE_P)
    live_Q = (token_Q < count) & (lane_Q < TOKENS * GROUP)
    live_QD = live_Q[:, None] & (dim_D < DIM)[None, :]
    live_QE = live_Q[:, None] & (value_E < VALUE)[None, :]
    # Tensors of a step may have too many elements for 32-bit offsets, too.
    row, at_Q = row.to(tl.int64), (begin + token_Q).to(tl.int64)
    q_ptrs = q_TNH + at_Q * q_token + head_Q * q_head
    q_QD = tl.load(q_ptrs[:, None] + dim_D[None, :], mask=live_QD, other=0.0)
    rest_QF = q_QD
    if LATENT:
        rest_F = tl.arange(0, REST_P)
        live_QF = live_Q[:, None] & (rest_F < REST)[None, :]
        rest_QF = tl.load(q_ptrs[:, None] + VALUE + rest_F[None, :], mask=live_QF, other=0.0)
    heads = tl.num_programs(1) * HEAD_PARTS * GROUP
    part_Q = (row * heads + head_Q) * parts
    position_Q = past + token_Q
    low = past + first - WINDOW + 1
    table_M = table_RM + row * table_row
    k_PBH, v_PBV = k_PKBH + kv_head * k_row, v_PKBV + kv_head * v_row

    keys = q_QD, rest_QF, position_Q, low, end, scale, cap
    exponents = k_exponents + kv_head * exponent_row, v_exponents + kv_head * exponent_row
    pages = table_M, table_block, k_PBH, v_PBV, pool_block, exponents[0], exponents[1]
    to = parts_RNSV, stats_RNS2
    if EXACT:
        top_Q = tl.full([QUERIES], float("-inf"), tl.float32)
        sum_Q = tl.zeros([QUERIES], tl.float32)
        acc_QE = tl.zeros([QUERIES, VALUE_P], tl.float32)
        for at in range(tile, stop, SPLIT):
            last = tl.minimum(at + SPLIT, stop)
            part_top_Q, part_sum_Q, part_acc_QE = _attend_tiles(
                at,
                last,
                *keys,
                *pages,
                CODED,
                FP8,
                BLOCK,
                K_SLOT,
                V_SLOT,
                CAPPED,
                QUERIES,
                DIM,
                DIM_P,
                VALUE,
                VALUE_P,
                REST,
                REST_P,
                LATENT,
                WINDOW,
                KEYS,
            )
            if divided:
                where_Q = part_Q + at // SPLIT
                part = part_top_Q, part_sum_Q, part_acc_QE
                _store_part(*to, where_Q, live_QE, *part, GROUP, VALUE)
            top_Q, decay_Q, weight_Q = _factors(top_Q, part_top_Q)
            sum_Q = sum_Q * decay_Q + part_sum_Q * weight_Q
            acc_QE = acc_QE * decay_Q[:, None] + part_acc_QE * weight_Q[:, None]
    else:
        top_Q, sum_Q, acc_QE = _attend_tiles(
            tile,
            stop,
            *keys,
            *pages,
            CODED,
            FP8,
            BLOCK,
            K_SLOT,
            V_SLOT,
            CAPPED,
            QUERIES,
            DIM,
            DIM_P,
            VALUE,
            VALUE_P,
            REST,
            REST_P,
            LATENT,
            WINDOW,
            KEYS,
        )
        if divided:
            _store_part(*to, part_Q + program, live_QE, top_Q, sum_Q, acc_QE, GROUP, VALUE)
    if divided:
        return
    if SINKS:
        top_Q, decay_Q, weight_Q = _factors(top_Q, tl.load(sinks_N + head_Q) * LOG2_E)
        sum_Q = sum_Q * decay_Q + weight_Q
        acc_QE = acc_QE * decay_Q[:, None]
    # Lanes without a query may have a sum of 0.
    result_QE = acc_QE / tl.where(sum_Q == 0.0, 1.0, sum_Q)[:, None]
    out_Q = (at_Q * heads + head_Q) * VALUE
    result_QE = result_QE.to(out_TNV.dtype.element_ty)
    tl.store(out_TNV + out_Q[:, None] + value_E[None, :], result_QE, mask=live_QE)


@triton.jit(do_not_specialize=["parts", "num_rows"])
def _join(
    out_TNV: tl.tensor,
    parts_RNSV: tl.tensor,
    stats_RNS2: tl.tensor,
    parts: tl.tensor,
    sinks_N: tl.tensor,
    starts_R1: tl.tensor,
    lengths_R: tl.tensor,
    num_rows: tl.tensor,
    VALUE: tl.constexpr,
    VALUE_P: tl.constexpr,
    WINDOW: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Join the parts of a one-token row whose keys were divided. _attend wrote the outputs of all
    other rows."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts_R1 + row)
    length = tl.load(lengths_R + row)
    tile, stop, share = _key_tiles(length - 1, length, PROGRAMS, WINDOW, KEYS, SPLIT, EXACT)
    if (tl.load(starts_R1 + row + 1) - begin != 1) | (stop - tile <= share):
        return

    value_E = tl.arange(0, VALUE_P)
    part = (row.to(tl.int64) * tl.num_programs(1) + head) * parts
    if EXACT:
        # In the order and by the formula of _attend, which adds the splits of all other rows.
        top, total = float("-inf"), 0.0
        acc_E = tl.zeros([VALUE_P], tl.float32)
        for split in tl.range(tile // SPLIT, tl.cdiv(stop, SPLIT), num_stages=JOIN_STAGES):
            part_top = tl.load(stats_RNS2 + (part + split) * 2)
            part_total = tl.load(stats_RNS2 + (part + split) * 2 + 1)
            part_at = parts_RNSV + (part + split) * VALUE + value_E
            part_acc_E = tl.load(part_at, mask=value_E < VALUE, other=0.0)
            top, decay, weight = _factors(top, part_top)
            total = total * decay + part_total * weight
            acc_E = acc_E * decay + part_acc_E * weight
    else:
        program_S = tl.arange(0, PROGRAMS)
        # Programs without keys have written nothing.
        used_S = program_S < tl.cdiv(stop - tile, share)
        part_S = part + program_S
        top_S = tl.load(stats_RNS2 + part_S * 2, mask=used_S, other=float("-inf"))
        sum_S = tl.load(stats_RNS2 + part_S * 2 + 1, mask=used_S, other=0.0)
        top = tl.max(top_S, 0)
        weight_S = tl.exp2(top_S - top)
        parts_SE = tl.load(
            parts_RNSV + part_S[:, None] * VALUE + value_E[None, :],
            mask=used_S[:, None] & (value_E < VALUE)[None, :],
            other=0.0,
        )
        total = tl.sum(weight_S * sum_S, 0)
        acc_E = tl.sum(parts_SE * weight_S[:, None], 0)
    if SINKS:
        top, decay, weight = _factors(top, tl.load(sinks_N + head) * LOG2_E)
        total = total * decay + weight
        acc_E = acc_E * decay
    out_E = (begin.to(tl.int64) * tl.num_programs(1) + head) * VALUE + value_E
    tl.store(out_TNV + out_E, (acc_E / total).to(out_TNV.dtype.element_ty), mask=value_E < VALUE)
