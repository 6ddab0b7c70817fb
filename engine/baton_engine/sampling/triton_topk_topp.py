"""Min-p, top-k and top-p of rows of logits, without sorting them.

In: logits in float32, and `metadata.Draws`. Out, per sample, an edge and a last token: a token
stays if its logit / temperature is above the edge, or equal to the edge and its id is not above the
last token. Torch twin: `sampler.shape_logits`.

Top-k and top-p both need the largest value v such that the values >= v have enough weight. A value
weighs 1 for top-k and exp(value - largest) for top-p. Each search is a radix select: float32 values
are mapped to 32-bit keys, whose digits of 11, 11 and 10 bits are found one after the other. For a
digit many programs per row add the weights of the values with the digits found so far to the row's
histogram, and the programs of the next launch read it to find the digit. Weights are integers (for
top-p in units of 2^-40), so sums, and the result, depend neither on the order of addition nor on
the number of programs. A row's result depends on no other row.

    launch         if a sample has   programs   per row
    torch.zeros    any filter        torch      96 KiB of histograms
    _count  1      any filter        many       the largest value; top-k's first digit
    _count  2, 3   top-k             many       the other digits
    _weigh  1 - 3  top-p             many       digits of the mass; the first also adds the total
    _count_ties    top-p             many       tokens on the edge by tile, if some of them must go
    _limits        any filter        1          edge and last token

So there are 9 launches for top-k with top-p, 5 for top-k, 7 for top-p and 3 for min-p alone. Each
but the first and `_limits` reads the logits once, and `_count_ties` only where ties are cut. A row
without a filter costs four loads per program, and a row without top-k or top-p the same in their
launches. A launch has some 2,048 programs for all rows together: 149 for one row of 151,936
values, which more than fills the 132 multiprocessors of an H100. Estimates for an H100, not
measured: 3 to 4 us per launch for one row; 50 us per launch for 256 rows, which is the time to read
156 MB of logits.

Shapes: S samples, V vocabulary, L tiles, W words of 64 bits.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from baton_engine.sampling.metadata import MASS, TEMPERATURE, TOP_K, Columns, Draws

TILE = 1024
WARPS = 8
PROGRAMS = 2048  # of a launch; eight warps each, so an H100 runs half of them at a time
DIGITS = 3
BITS = tl.constexpr(11)  # of a digit; the last has one less
BINS = tl.constexpr(1 << BITS.value)
# A program splits the values that it has read into this number of groups. If k is not larger, no
# value below the least of the groups' largest values is among the k largest, and it is not counted:
# most values are below it, and many additions to one bin are slow.
GROUPS = tl.constexpr(64)
UNIT = tl.constexpr(float(1 << 40))
LEAST_FLOAT = tl.constexpr(float(np.finfo(np.float32).min))
LAST_KEY = tl.constexpr(0xFFFFFFFF)
LEAST_KEY = tl.constexpr(0xFF800000)  # of -inf; the keys behind it are those of NaN

# The 64-bit words of a row.
LARGEST = tl.constexpr(0)  # the key of the largest value, with all bits inverted: 0 is none
TOTAL = tl.constexpr(1)  # the mass of the values that pass min-p and top-k
FLOOR = tl.constexpr(2)  # the key of the least of them
NEEDED = tl.constexpr(3)  # how many of the tokens on the edge stay; 0: all
# Of each search, 2 * n words further: its first n digits, then the goal among their values.
BY_COUNT = tl.constexpr(2)
BY_MASS = tl.constexpr(8)
COUNTS = tl.constexpr(16)  # top-k's histograms
MASSES = tl.constexpr(COUNTS.value + DIGITS * BINS.value)  # top-p's
WORDS = tl.constexpr(MASSES.value + DIGITS * BINS.value)


def shape(
    logits_SV: torch.Tensor,
    draws: Draws,
    edge_S: torch.Tensor,
    last_S: torch.Tensor,
    programs: int = PROGRAMS,
) -> None:
    """Fill `edge_S` (float32) and `last_S` (int32). Each row of `logits_SV` must be contiguous.
    `programs` of a launch share the rows; the result does not depend on it."""
    samples, vocab = logits_SV.shape
    tiles = triton.cdiv(vocab, TILE)
    by_count, by_mass = _searches(draws.host_6S, vocab)
    work_SW = torch.zeros(samples, WORDS.value, dtype=torch.int64, device=logits_SV.device)
    ties_SL = torch.empty(samples, tiles, dtype=torch.int32, device=logits_SV.device)
    grid = samples, min(tiles, triton.cdiv(programs, samples))
    rows = work_SW, logits_SV, draws.columns_6S, samples, vocab, logits_SV.stride(0)
    # Without fused multiply-adds a value has the same mass in all kernels.
    options = {"TILE": TILE, "num_warps": WARPS, "enable_fp_fusion": False}
    for digit in range(DIGITS if by_count else 1):
        _count[grid](*rows, digit, **options)
    for digit in range(DIGITS if by_mass else 0):
        _weigh[grid](*rows, digit, **options)
    if by_mass:
        _count_ties[grid](ties_SL, *rows, **options)
    all_tiles = triton.next_power_of_2(tiles)
    _limits[(samples,)](edge_S, last_S, ties_SL, *rows, TILES=all_tiles, **options)


def _searches(columns_6S: Columns, vocab: int) -> tuple[bool, bool]:
    """Whether any sample has top-k, and whether any has top-p."""
    drawn_S = columns_6S[TEMPERATURE] > 0  # the bits of a float >= 0 are 0 only for 0.0
    by_count_S = (columns_6S[TOP_K] > 0) & (columns_6S[TOP_K] < vocab)
    by_mass_S = columns_6S[MASS].view(np.float32) < 1
    return bool((drawn_S & by_count_S).any()), bool((drawn_S & by_mass_S).any())


@triton.jit(do_not_specialize=["samples", "digit"])
def _count(
    work_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    digit: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Count the values of samples with top-k by a digit of their keys. With the first digit, find
    the largest value of all samples with a filter."""
    temperature, log_min_p, share, top_k = _params(columns_ptr, samples, vocab)
    others = (digit == 0) & ((share < 1) | (log_min_p > float("-inf")))
    if (temperature > 0) & ((top_k > 0) | others):
        row_ptr, words_ptr = _row_of(logits_ptr, work_ptr, stride)
        prefix, _ = _descend(words_ptr, words_ptr + COUNTS, BY_COUNT, digit, top_k)
        ones = tl.full((TILE,), 1, tl.int64)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        bound = float("-inf")
        for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1)):
            x = _scaled(row_ptr, tile, vocab, temperature, TILE)
            if digit == 0:
                best = tl.maximum(best, x)
                if top_k <= GROUPS:
                    groups = tl.reshape(best, (GROUPS, TILE // GROUPS))
                    bound = tl.min(tl.max(groups, axis=1), axis=0)
            counted = (x >= bound) & (x > float("-inf")) & (top_k > 0)
            _add(words_ptr + COUNTS, _key(x), ones, counted, prefix, digit)
        if digit == 0:
            largest = _key(tl.max(best, axis=0)).to(tl.int64) ^ LAST_KEY
            tl.atomic_max(words_ptr + LARGEST, largest, sem="relaxed")


@triton.jit(do_not_specialize=["samples", "digit"])
def _weigh(
    work_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    digit: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Add the masses of the values that pass min-p and top-k by a digit of their keys, for
    top-p. With the first digit add the total, too."""
    temperature, log_min_p, share, top_k = _params(columns_ptr, samples, vocab)
    if (temperature > 0) & (share < 1):
        row_ptr, words_ptr = _row_of(logits_ptr, work_ptr, stride)
        largest = _largest(words_ptr)
        if digit == 0:
            floor = _floor(words_ptr, words_ptr + COUNTS, log_min_p, top_k)
            if tl.program_id(1) == 0:
                tl.store(words_ptr + FLOOR, _key(floor).to(tl.int64))
        else:
            floor = _value(tl.load(words_ptr + FLOOR).to(tl.uint32))
        goal = _goal(words_ptr, share)
        prefix, _ = _descend(words_ptr, words_ptr + MASSES, BY_MASS, digit, goal)
        # All values below this weigh less than half of what top-p drops, so the edge is not among
        # them, and they need not be added one by one. They are most of a vocabulary.
        likely = tl.maximum(floor, largest + tl.log((1.0 - share) / (2.0 * vocab)))
        total = tl.zeros((TILE,), tl.int64)
        for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1)):
            x = _scaled(row_ptr, tile, vocab, temperature, TILE)
            mass = tl.where(x >= floor, _mass(x, largest), 0)
            total += mass
            added = (x >= likely) & (mass > 0)
            _add(words_ptr + MASSES, _key(x), mass, added, prefix, digit)
        if digit == 0:
            tl.atomic_add(words_ptr + TOTAL, tl.sum(total, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["samples"])
def _count_ties(
    ties_ptr: tl.tensor,
    work_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Count the tokens on the edge of top-p in each tile, if not all of them stay."""
    sample = tl.program_id(0)
    temperature, _, share, _ = _params(columns_ptr, samples, vocab)
    if (temperature > 0) & (share < 1):
        row_ptr, words_ptr = _row_of(logits_ptr, work_ptr, stride)
        goal = _goal(words_ptr, share)
        bins_ptr = words_ptr + MASSES
        edge, goal = _descend(words_ptr, bins_ptr, BY_MASS, 3, goal)
        # The number of tokens on the edge that bring the mass to the goal. They weigh at least one
        # unit each, unless no token is possible.
        each = tl.maximum(_mass(_value(edge), _largest(words_ptr)), 1)
        needed = (goal + each - 1) // each
        on_edge = tl.load(bins_ptr + 2 * BINS + edge % (BINS // 2))
        needed = tl.where(needed * each >= on_edge, 0, needed)
        if tl.program_id(1) == 0:
            tl.store(words_ptr + NEEDED, needed)
        if needed > 0:
            tiles = tl.cdiv(vocab, TILE)
            for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
                x = _scaled(row_ptr, tile, vocab, temperature, TILE)
                tied = tl.sum((_key(x) == edge).to(tl.int32), axis=0)
                tl.store(ties_ptr + sample * tiles + tile, tied)


@triton.jit(do_not_specialize=["samples"])
def _limits(
    edge_ptr: tl.tensor,
    last_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    work_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """The edge and the last token, from what the searches have found."""
    sample = tl.program_id(0)
    temperature, log_min_p, share, top_k = _params(columns_ptr, samples, vocab)
    words_ptr = work_ptr + sample.to(tl.int64) * WORDS
    edge, last = float("-inf"), vocab
    if temperature > 0:
        if share < 1:
            key = tl.load(words_ptr + BY_MASS + 2 * 3).to(tl.uint32)
            edge = _value(key)
            needed = tl.load(words_ptr + NEEDED)
            if needed > 0:
                tiles = tl.cdiv(vocab, TILE)
                tile = tl.arange(0, TILES)
                tied = tl.load(ties_ptr + sample * tiles + tile, mask=tile < tiles, other=0)
                upto = tl.cumsum(tied, axis=0)
                short = upto < needed
                at = tl.sum(short.to(tl.int32), axis=0)  # the tile with the last token that stays
                before = tl.max(tl.where(short, upto, 0), axis=0)
                row_ptr = logits_ptr + sample.to(tl.int64) * stride
                x = _scaled(row_ptr, at, vocab, temperature, TILE)
                token = at * TILE + tl.arange(0, TILE)
                on_edge = (_key(x) == key).to(tl.int32)
                order = before + tl.cumsum(on_edge, axis=0)
                last = tl.max(tl.where((on_edge > 0) & (order <= needed), token, 0), axis=0)
        elif (top_k > 0) | (log_min_p > float("-inf")):
            edge = _floor(words_ptr, words_ptr + COUNTS, log_min_p, top_k)
    tl.store(edge_ptr + sample, edge)
    tl.store(last_ptr + sample, last)


@triton.jit
def _params(columns_ptr: tl.tensor, samples: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """The sample's temperature, min-p, top-p and top-k. Top-k is 0 if it keeps the vocabulary."""
    column_ptr = columns_ptr + tl.program_id(0)
    temperature = tl.load(column_ptr).to(tl.float32, bitcast=True)
    log_min_p = tl.load(column_ptr + samples).to(tl.float32, bitcast=True)
    share = tl.load(column_ptr + 2 * samples).to(tl.float32, bitcast=True)
    top_k = tl.load(column_ptr + 3 * samples)
    return temperature, log_min_p, share, tl.where(top_k < vocab, top_k, 0)


@triton.jit
def _row_of(logits_ptr: tl.tensor, work_ptr: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """Where the sample's logits and its words are."""
    sample = tl.program_id(0).to(tl.int64)
    return logits_ptr + sample * stride, work_ptr + sample * WORDS


@triton.jit
def _scaled(
    row_ptr: tl.tensor,
    tile: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A tile's logits / temperature, rounded as torch does; -inf beyond the vocabulary."""
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
    return tl.math.div_rn(x, temperature)


@triton.jit
def _mass(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """exp(x - largest) in units."""
    return (tl.exp(x - largest) * UNIT).to(tl.int64)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Map floats to uint32 in reverse order: the largest has the smallest key. -0.0 equals 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return _reversed(bits).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float of a key; -inf for keys that no number has."""
    bits = tl.minimum(key, LEAST_KEY).to(tl.int32, bitcast=True)
    return _reversed(bits).to(tl.float32, bitcast=True)


@triton.jit
def _reversed(bits: tl.tensor) -> tl.tensor:
    """Invert all bits but the sign if the sign is +. The bits of floats below 0 already fall as the
    floats grow."""
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _add(
    bins_ptr: tl.tensor,
    key: tl.tensor,
    weight: tl.tensor,
    added: tl.tensor,
    prefix: tl.tensor,
    digit: tl.tensor,
) -> None:
    """Add the weights of the values with the digits found so far to the bins of the next."""
    bits = tl.where(digit == 2, BITS - 1, BITS)
    leading = key >> tl.maximum(32 - (digit + 1) * BITS, 0)
    added = added & ((leading >> bits) == prefix)
    bin = leading & ((1 << bits) - 1)
    tl.atomic_add(bins_ptr + digit * BINS + bin, weight, mask=added, sem="relaxed")


@triton.jit
def _descend(
    words_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    SEARCH: tl.constexpr,
    digits: tl.tensor,
    goal: tl.tensor,
) -> tl.tensor:
    """The first `digits` digits of the key that a search looks for, and the goal among the values
    with these digits. The last of these digits is the first bin with which the weights reach the
    goal."""
    prefix = tl.zeros((), tl.uint32)
    goal = goal.to(tl.int64)
    if digits > 0:
        found_ptr = words_ptr + SEARCH + 2 * digits
        if digits > 1:
            prefix = tl.load(found_ptr - 2).to(tl.uint32)
            goal = tl.load(found_ptr - 1)
        upto = tl.cumsum(tl.load(bins_ptr + (digits - 1) * BINS + tl.arange(0, BINS)), axis=0)
        short = upto < goal
        bits = tl.where(digits == 3, BITS - 1, BITS)
        # If all weights are less than the goal (fewer than k values are finite), the last bin.
        bin = tl.minimum(tl.sum(short.to(tl.int32), axis=0), (1 << bits) - 1)
        goal -= tl.max(tl.where(short, upto, 0), axis=0)
        prefix = (prefix << bits) | bin.to(tl.uint32)
        if tl.program_id(1) == 0:
            tl.store(found_ptr, prefix.to(tl.int64))
            tl.store(found_ptr + 1, goal)
    return prefix, goal


@triton.jit
def _largest(words_ptr: tl.tensor) -> tl.tensor:
    """The largest value. Finite also if no token is possible, when all masses are 0."""
    largest = _value((tl.load(words_ptr + LARGEST) ^ LAST_KEY).to(tl.uint32))
    return tl.maximum(largest, LEAST_FLOAT)


@triton.jit
def _floor(
    words_ptr: tl.tensor, bins_ptr: tl.tensor, log_min_p: tl.tensor, top_k: tl.tensor
) -> tl.tensor:
    """The least value that passes min-p and top-k."""
    floor = _largest(words_ptr) + log_min_p
    if top_k > 0:
        key, _ = _descend(words_ptr, bins_ptr, BY_COUNT, 3, top_k)
        floor = tl.maximum(floor, _value(key))
    return floor


@triton.jit
def _goal(words_ptr: tl.tensor, share: tl.tensor) -> tl.tensor:
    """The mass that the tokens which stay must reach."""
    total = tl.load(words_ptr + TOTAL).to(tl.float64)
    return tl.maximum(tl.ceil(total * share.to(tl.float64)), 1.0).to(tl.int64)
