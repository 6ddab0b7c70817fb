"""Bytes that the GPU kernels move per call, counted from their grids.

In: a model's sizes, the rows of a step, and the constants of a launch. Out: `moved`, the bytes that
the programs of the grid load and store, and `floor`, those of inputs and outputs if each is moved
once. What several programs load counts each time, although a cache may have it. Single numbers per
program, such as a row's length, are not counted, nor are the additions of programs to a histogram.
None is a call that such a step does not make. Kernels of sampling are those of samples with top-k
and top-p, of which some tokens on the edge must go; of several calls the largest counts.

Functions have the names of the kernels. Tests compare them with what the interpreter counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton_engine.attention.triton_paged_attention import programs_for
from baton_engine.layers.triton_experts import most_tiles
from baton_engine.layers.triton_matmul import STORED_ROWS
from baton_engine.sampling.triton_sampler import DRAW_TILE
from baton_engine.sampling.triton_topk_topp import BINS, PROGRAMS

PROCESSORS = 132  # of an H100
FLOAT32, INT32, INT64 = 4, 4, 8
HISTOGRAM = BINS.value * INT64
Constants = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of Qwen3-0.6B in bfloat16. `item` is the number of bytes of a value, `chosen` that of a
    token's experts. Heads of v have `value_dim` numbers, 0: `dim`. With `latent`, they are the
    first numbers of k."""

    hidden: int = 1024
    mlp: int = 3072
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    item: int = 2
    vocab: int = 151_936
    chosen: int = 8
    value_dim: int = 0
    latent: bool = False

    @property
    def value(self) -> int:
        return self.value_dim or self.dim

    @property
    def kept(self) -> int:
        """Numbers of a token in the cache, per kv head."""
        return self.dim if self.latent else self.dim + self.value

    def kept_bytes(self, constants: Constants) -> int:
        """Bytes of a token in the cache, per kv head. Codes have an exponent per row."""
        if constants.get("CODED"):
            return self.kept + (1 if self.latent else 2)
        return self.kept * self.item


@dataclass(frozen=True, slots=True)
class Rows:
    """The new tokens of each row of a step. They are the last of `keys` tokens in each row."""

    counts: tuple[int, ...]
    keys: int = 1024

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Bytes:
    moved: int
    floor: int


def attend(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """Each tile of a row's queries loads the keys that it sees and their block numbers, once per
    kv head, and a sink for each of its lanes. Parts of divided keys go to `join`, which loads the
    sinks of their rows."""
    key = shape.kv_heads * shape.kept_bytes(constants)
    query, result = (shape.heads * size * shape.item for size in (shape.dim, shape.value))
    # Query heads of latent rows may be divided among programs, each of which loads the rows.
    group = constants.get("GROUP", shape.heads // shape.kv_heads)
    parts = shape.heads // shape.kv_heads // group
    moved = floor = 0
    for count in rows.counts:
        step = constants["QUERIES"] // group
        for first in range(0, count, step):
            tokens = min(step, count - first)
            end = rows.keys - count + first + tokens
            keys = _seen(end - tokens, end, constants)
            used, stored = _parts(end, constants) if count == 1 else (1, 0)
            moved += parts * keys * (key + shape.kv_heads * INT32) + used * tokens * query
            moved += _part(shape) * stored if stored else tokens * result
            if constants["SINKS"] and not stored:
                moved += constants["QUERIES"] * shape.kv_heads * FLOAT32
        keys = _seen(rows.keys - count, rows.keys, constants)
        floor += keys * key + -(-keys // shape.block) * INT32 + count * (query + result)
    return Bytes(moved, floor + _sinks(shape, constants))


def join(shape: Shape, rows: Rows, constants: Constants) -> Bytes | None:
    stored = sum(_parts(rows.keys, constants)[1] for count in rows.counts if count == 1)
    if not stored:
        return None
    divided = rows.counts.count(1)
    both = stored * _part(shape) + divided * shape.heads * shape.value * shape.item
    sinks = _sinks(shape, constants)
    return Bytes(both + divided * sinks, both + sinks)


def _sinks(shape: Shape, constants: Constants) -> int:
    return shape.heads * FLOAT32 if constants["SINKS"] else 0


def _seen(first: int, end: int, constants: Constants) -> int:
    """Keys that queries at positions [first, end) see."""
    window = constants["WINDOW"]
    return end - (max(first - window + 1, 0) if window else 0)


def _parts(length: int, constants: Constants) -> tuple[int, int]:
    """The programs that share the keys of a one-token row of this length, and the parts that they
    store, 0 if there is one program."""
    exact, split = constants["EXACT"], constants["SPLIT"]
    begin = (length - _seen(length - 1, length, constants)) // constants["KEYS"]
    if exact:
        begin = begin // split * split
    tiles = -(-length // constants["KEYS"]) - begin
    share = -(-tiles // constants["PROGRAMS"])
    share = -(-share // split) * split if exact else max(share, split)
    used = -(-tiles // share)
    if used == 1:
        return 1, 0
    return used, -(-tiles // split) if exact else used


def _part(shape: Shape) -> int:
    """Bytes of a part: sums of V, and the maximum and the sum of the weights."""
    return shape.heads * (shape.value + 2) * FLOAT32


def rotate_store(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """Programs of the same token load the same cos and sin, and tokens the same norm."""
    head = shape.dim * shape.item
    turned = shape.heads + shape.kv_heads
    norm = constants["HAS_NORM"] * turned * head
    programs = -(-constants["ALL"] // constants["HEADS"])
    tables = 2 * constants["ROTARY"] * shape.item
    stored = shape.kv_heads * shape.kept_bytes(constants)
    both = (turned + shape.kv_heads) * head + turned * head + stored
    tokens = rows.tokens
    return Bytes(tokens * (both + norm + programs * tables), tokens * (both + tables) + norm)


def store_kv(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    each = shape.kept * shape.item + shape.kept_bytes(constants)
    return _once(rows.tokens * shape.kv_heads * each)


def add_norm(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """Tokens load the same weight."""
    row = shape.hidden * shape.item
    passes = 4 if constants["HAS_DELTA"] else 2
    both = rows.tokens * passes * row
    return Bytes(both + rows.tokens * row, both + row)


def activation_mul(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    return _once(rows.tokens * 3 * shape.mlp * shape.item)


def matmul(shape: Shape, rows: Rows, constants: Constants) -> Bytes | None:
    """Tiles in a row of the grid load the same inputs, and tiles in a column the same weights."""
    tokens, outputs, inputs = rows.tokens, constants["OUTPUTS"], constants["INPUTS"]
    splits, stored = constants["SPLITS"], constants["STORED"]
    if stored != (splits > 1 and tokens <= STORED_ROWS):
        return None
    x, weight = tokens * inputs * shape.item, outputs * inputs * shape.item
    result = tokens * outputs * shape.item
    down, across = -(-tokens // constants["M"]), -(-outputs // constants["N"])
    bias = constants["HAS_BIAS"] * outputs * shape.item
    read = x * across + weight * down
    if stored:
        return Bytes(read + splits * tokens * outputs * FLOAT32, x + weight + result + bias)
    return Bytes(read + bias * down + result, x + weight + result + bias)


def add_splits(shape: Shape, rows: Rows, constants: Constants) -> Bytes | None:
    if rows.tokens > STORED_ROWS:
        return None
    sums = constants["SPLITS"] * FLOAT32 + shape.item
    bias = constants["HAS_BIAS"] * constants["OUTPUTS"] * shape.item
    both = rows.tokens * constants["OUTPUTS"] * sums
    return Bytes(both + rows.tokens * bias, both + bias)


def expert_inner(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """Pairs are divided evenly among the experts. Tiles of an expert load the same weights, and
    tiles of the same pairs the same inputs."""
    return _experts(shape, rows, constants, parts=2, sources=rows.tokens)


def expert_outputs(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    return _experts(shape, rows, constants, parts=1, sources=rows.tokens * shape.chosen)


def _experts(shape: Shape, rows: Rows, constants: Constants, parts: int, sources: int) -> Bytes:
    """A product of all experts: `parts` weights are multiplied with the same inputs, which are
    `sources` different rows."""
    experts, tile = constants["EXPERTS"], constants["M"]
    outputs, inputs = constants["OUTPUTS"], constants["INPUTS"]
    pairs = rows.tokens * shape.chosen
    used = min(pairs, experts)
    shares = [pairs // used + (expert < pairs % used) for expert in range(used)]
    tiles = sum(-(-share // tile) for share in shares)
    across = -(-outputs // constants["N"])
    weight = parts * outputs * (inputs + constants["HAS_BIAS"]) * shape.item
    begins = most_tiles(pairs, experts, tile) * across * 2 * experts * INT32
    pair = inputs * shape.item + INT64
    result = pairs * outputs * shape.item
    moved = begins + tiles * weight + pairs * across * pair + result
    floor = used * weight + sources * inputs * shape.item + pairs * INT64 + result
    return Bytes(moved, floor + (experts + 1) * INT32)


def add_experts(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    row = constants["OUTPUTS"] * shape.item
    return _once(rows.tokens * (constants["CHOSEN"] + 1) * row)


def put_sampled(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """All tokens are those of the previous step."""
    return _once(rows.tokens * (INT32 + INT64 + INT32))


def count(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """Programs of the same sample load the same histogram, to find the digit before."""
    tiles = -(-shape.vocab // constants["TILE"])
    programs = min(tiles, -(-PROGRAMS // rows.tokens))
    logits = shape.vocab * FLOAT32
    floor = rows.tokens * (logits + HISTOGRAM)
    return Bytes(rows.tokens * (logits + programs * HISTOGRAM), floor)


def weigh(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    return count(shape, rows, constants)


def count_ties(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    tiles = rows.tokens * -(-shape.vocab // constants["TILE"]) * INT32
    both = count(shape, rows, constants)
    return Bytes(both.moved + tiles, both.floor + tiles)


def limits(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    """The counts of all tiles, and the logits of the one with the last token that stays."""
    tiles = -(-shape.vocab // constants["TILE"])
    return _once(rows.tokens * (tiles * INT32 + constants["TILE"] * FLOAT32))


def draw(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    tiles = -(-shape.vocab // constants["TILE"])
    return _once(rows.tokens * (shape.vocab * FLOAT32 + tiles * (FLOAT32 + INT32)))


def pick(shape: Shape, rows: Rows, constants: Constants) -> Bytes:
    tiles = -(-shape.vocab // DRAW_TILE)
    return _once(rows.tokens * (tiles * FLOAT32 + INT64))


def _once(size: int) -> Bytes:
    """Nothing is loaded twice."""
    return Bytes(size, size)


ESTIMATES: Mapping[str, Callable[[Shape, Rows, Constants], Bytes | None]] = {
    f"_{each.__name__}": each
    for each in (
        *(attend, join, rotate_store, store_kv),
        *(add_norm, activation_mul, matmul, add_splits, put_sampled),
        *(expert_inner, expert_outputs, add_experts),
        *(count, weigh, count_ties, limits, draw, pick),
    )
}


def step_of(rows: int, kernel: str, constants: Constants) -> Rows:
    """A step of this number of rows of 1,024 tokens that launches the kernel's variant: rows with
    one new token; beside longer rows, one of 256 new tokens; without one-token rows, one of 256
    new tokens or several of 8."""
    if kernel != "_attend" or constants["ONE_TOKEN"]:
        return Rows((1,) * rows)
    if constants["PROGRAMS"] > 1:
        return Rows((*(1,) * (rows - 1), 256))
    return Rows((8,) * rows if rows > 1 else (256,))


def bytes_of(kernel: str, shape: Shape, rows: int, constants: Constants) -> Bytes | None:
    """The bytes of a kernel's call in a step of this number of rows on an H100. None if the step
    does not launch it, or if no function counts them."""
    if kernel not in ESTIMATES:
        return None
    chosen = dict(constants)
    if chosen.get("PROGRAMS", 1) > 1:
        keys = step_of(rows, kernel, constants).keys
        chosen["PROGRAMS"] = programs_for(rows, shape.kv_heads, keys, PROCESSORS)
    return ESTIMATES[kernel](shape, step_of(rows, kernel, constants), chosen)


def describe(kernel: str, constants: Constants) -> str:
    """The variant of a kernel, in a few words."""
    if kernel == "_attend":
        if constants["ONE_TOKEN"]:
            return "one-token rows"
        return "one-token and longer rows" if constants["PROGRAMS"] > 1 else "longer rows"
    if kernel == "_add_norm":
        return "with a delta" if constants["HAS_DELTA"] else ""
    if kernel == "_activation_mul":
        return "gelu" if constants["GELU"] else "silu"
    if kernel in ("_expert_inner", "_expert_outputs"):
        size = f"{constants['EXPERTS']} of {constants['OUTPUTS']} x {constants['INPUTS']}"
        return size + (", bias" if constants["HAS_BIAS"] else "")
    if kernel in ("_matmul", "_add_splits"):
        size = f"{constants['OUTPUTS']} outputs"
        if kernel == "_matmul":
            size = f"{constants['OUTPUTS']} x {constants['INPUTS']}"
        size += ", bias" if constants["HAS_BIAS"] else ""
        if constants["SPLITS"] == 1:
            return size
        where = " stored" if constants.get("STORED", True) else " in a program"
        return f"{size}, {constants['SPLITS']} splits{where}"
    return ""
