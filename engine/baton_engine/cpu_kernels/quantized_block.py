"""Products of a few rows with groups of a block's quantized weights: the compiled inner loop.

In: packed codes of COLUMNS outputs, and rows of inputs. Out: each row's sum over each group, times
the group's scales, is added to the row's totals.

Inputs are taken in pairs. The codes of a pair are one load of 64 bytes for each 4 bits of a code:

- 4 bits: a word of 32 bits has the codes of 4 outputs, 16 apart, for the first input of the pair,
  and then those for the second, from the lowest bits on.
- 8 bits: two loads with 2 x 16 outputs each, in the order in which AVX-512 joins bytes, see
  places_of_bytes().
- 16 bits: four loads with the bfloat16 numbers of 16 outputs each, which need no table. Only with
  `native`, see below.
- 32 bits: the float32 numbers of 64 outputs for the first input, and then those for the second.

Weights and inputs in int8 are multiplied four by four, which are taken for a pair with 16 bits.
With AVX-512 VNNI one instruction adds their products in integers, which are exact in any order. A
code is the number + 128, and sums begin at -128 times the sum of the group's inputs.

With `native`, a CPU with AVX-512 BF16 looks up the bfloat16 numbers of both inputs in one
instruction for 32 codes of 4 bits, or two for 64 of 8 bits, and adds their products with x in one
more. Of a code of 8 bits, 7 are looked up, and one is the sign. This cannot hold -128, so int8 is
stored as the sign and magnitude of the number + 1/2, which is n + 1/2 with n from 0 to 127 and
exact in bfloat16. Sums then begin at -1/2 times the sum of the group's inputs.

Other CPUs compute in float32, the second input of a pair before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton_engine.cpu_kernels.llvm_values import (
    ADDRESS,
    LANES,
    NUMBER,
    NUMBERS,
    VECTOR_BYTES,
    WORD,
    WORDS,
    after,
    each_word,
    in_each_lane,
    load_at,
    store_at,
)
from baton_engine.cpu_kernels.vectors import COLUMNS, FIRST_LEVEL, address, fetch

VECTORS = COLUMNS // LANES
PAIR_BYTES = 16  # bytes of codes per input pair and bit of a code

# Rows of a part at most, whose sums begin side by side.
PART_ROWS = 192
# Rows whose totals stay in registers from group to group: with more there are too few of these.
ROWS_IN_REGISTERS = 3
# With more rows, several tables leave registers for the sums of this number of vectors only.
ROWS_BESIDE_TABLES, VECTORS_BESIDE_TABLES = 4, 2
# From this number of rows on, the codes at this distance are fetched. A step of one row only waits
# for memory, and the CPU fetches ahead by itself.
FETCHING_ROWS, FETCHED_BYTES = 4, 2048

# How codes become numbers: "table" looks them up in 16 or 2 x 128 numbers, "two tables" adds two of
# them, and "int8" and "fp8" are computed. "bf16" and "fp32" are the numbers, and "integers" are
# int8 for inputs in int8.
Decoding = Literal["table", "two tables", "int8", "fp8", "bf16", "fp32", "integers"]

_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_INDEXES = ir.VectorType(WORD, 4 * LANES)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What a compiled inner loop computes: codes of `bits` bits, and rows in bfloat16 or float32.
    `native` says that the CPU has AVX-512 BF16 and VBMI, and that rows are bfloat16; `wide` that it
    has 32 registers of 16 numbers."""

    bits: int
    decoding: Decoding
    bf16: bool
    native: bool
    wide: bool

    @property
    def multiplied(self) -> int:
        """How many vectors are multiplied with a pair of inputs for 16 outputs."""
        return 1 if self.native and self.decoding != "two tables" else 2

    @property
    def offset(self) -> float:
        """What is added to the weight's numbers, so that sums begin at minus this times the inputs'
        sum."""
        if self.integers:
            return 128.0
        return 0.5 if self.native and self.decoding == "int8" else 0.0

    @property
    def integers(self) -> bool:
        return self.decoding == "integers"

    @property
    def plain(self) -> bool:
        """Whether weights are not quantized."""
        return self.decoding in ("bf16", "fp32")

    @property
    def looked_up(self) -> bool:
        """Whether instructions look up numbers in tables that registers hold."""
        return self.native and self.bits < 16

    @property
    def several_tables(self) -> bool:
        return self.looked_up and self.decoding != "table"

    @property
    def unpacked_bytes(self) -> int:
        """Bytes that unpack_group() stores per pair."""
        return VECTOR_BYTES * VECTORS * self.multiplied


def places_of_bytes() -> list[tuple[int, int]]:
    """The output and the input of a pair, for each byte of a pair's 8-bit codes."""
    found = []
    for byte in range(2 * VECTOR_BYTES):
        load, place = divmod(byte, VECTOR_BYTES)
        lane, half, within = place // 16, place % 16 // 8, place % 8
        found.append(((2 * load + half) * LANES + 4 * lane + within // 2, within % 2))
    return found


def group_product(rows: int, kind: BlockKind, *, unpacked: bool) -> Any:
    """An operation: multiply `rows` rows with `groups` groups of `pairs` pairs of a block's inputs.

    `codes` is the address of the first pair's codes, or of what unpack_group() stored, `places`
    where the addresses of the rows are, `offset` that of the pair in a row, `tables` the address of
    the numbers of codes; if sums do not begin at 0, they begin at the float32 numbers at `starts`,
    [groups, PART_ROWS]. Plain weights are fetched from `ahead` on, `ahead_step` bytes further for
    each pair. Sums times the `scales`, [groups, 64], are added to `totals`, float32
    [rows, 64].
    """
    together = VECTORS if kind.wide else max(1, VECTORS // rows)  # vectors of a row
    if kind.several_tables and rows > ROWS_BESIDE_TABLES and not unpacked:
        together = VECTORS_BESIDE_TABLES
    fetching = kind.looked_up and rows >= FETCHING_ROWS and not unpacked
    lines_ahead = 0
    if kind.plain and not unpacked:
        lines_ahead = (4 if rows < FETCHING_ROWS else 2) * (2 if kind.decoding == "fp32" else 1)
    pair_bytes = kind.unpacked_bytes if unpacked else PAIR_BYTES * kind.bits
    kept = kind.wide and rows <= ROWS_IN_REGISTERS

    @intrinsic
    def multiply_group(
        typing: Any,
        codes: Any,
        places: Any,
        offset: Any,
        pairs: Any,
        groups: Any,
        tables: Any,
        starts: Any,
        scales: Any,
        totals: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, places, offset, pairs, groups, tables, starts, scales, totals, *given = given
            ahead, ahead_step = given
            found = [
                builder.add(load_at(builder, after(builder, places, 8 * row), ADDRESS), offset)
                for row in range(rows)
            ]
            numbers = _stored(builder, kind) if unpacked else _numbers(builder, kind, tables)

            def multiply_pairs(vectors: range, before: Any, group_starts: Any) -> list[list[Any]]:
                """Where the sums of a group are, by row and vector."""
                shape = WORDS if kind.integers else NUMBERS
                sums = [[cgutils.alloca_once(builder, shape) for _ in vectors] for _ in found]
                for row, row_sums in enumerate(sums):
                    start = ir.Constant(NUMBERS, [0.0] * LANES)
                    if kind.offset:
                        one = load_at(builder, after(builder, group_starts, 4 * row), NUMBER)
                        start = in_each_lane(builder, one, NUMBERS)
                    if kind.integers:
                        start = builder.fptosi(start, WORDS)
                    for each in row_sums:
                        builder.store(start, each)
                with cgutils.for_range(builder, pairs) as loop:
                    index = builder.add(before, loop.index)
                    pair = builder.add(codes, _times(builder, index, pair_bytes))
                    here = _times(builder, index, 4 if kind.bf16 else 8)
                    if lines_ahead:
                        place = builder.add(ahead, builder.mul(index, ahead_step))
                        for line in range(lines_ahead):
                            fetch(builder, after(builder, place, VECTOR_BYTES * line))
                    if fetching:
                        _fetch(builder, kind, after(builder, pair, FETCHED_BYTES), vectors)

                    def add_products(row_inputs: Any, weights: Any, place: Any) -> None:
                        total = builder.load(place)
                        for number, weight in enumerate(weights):
                            one = row_inputs[number % len(row_inputs)]
                            total = _add_product(builder, one, weight, total, kind)
                        builder.store(total, place)

                    if kind.looked_up:
                        # The inputs of all rows at once would take registers from sums.
                        looked_up = [numbers(pair, vector) for vector in vectors]
                        for row, row_sums in zip(found, sums, strict=True):
                            row_inputs = _inputs(builder, builder.add(row, here), kind)
                            for weights, place in zip(looked_up, row_sums, strict=True):
                                add_products(row_inputs, weights, place)
                    elif kind.decoding == "fp32":
                        # One input after the other: those of all rows would not fit the registers.
                        for one in range(2):
                            some = [numbers(pair, vector)[one] for vector in vectors]
                            for row, row_sums in zip(found, sums, strict=True):
                                row_input = _inputs(builder, builder.add(row, here), kind)[one]
                                for weight, place in zip(some, row_sums, strict=True):
                                    add_products([row_input], [weight], place)
                    else:
                        inputs = [_inputs(builder, builder.add(row, here), kind) for row in found]
                        for vector in vectors:
                            weights = numbers(pair, vector)
                            for row_inputs, row_sums in zip(inputs, sums, strict=True):
                                add_products(row_inputs, weights, row_sums[vector - vectors.start])
                return sums

            for first in range(0, VECTORS, together):
                vectors = range(first, first + together)
                places_of_totals = [
                    [
                        after(builder, totals, 4 * COLUMNS * row + VECTOR_BYTES * vector)
                        for vector in vectors
                    ]
                    for row in range(rows)
                ]
                kept_totals = [
                    [cgutils.alloca_once(builder, NUMBERS) for _ in vectors]
                    for _ in (found if kept else ())
                ]
                for kept_row, row_places in zip(kept_totals, places_of_totals, strict=False):
                    for each, place in zip(kept_row, row_places, strict=True):
                        builder.store(load_at(builder, place, NUMBERS), each)
                with cgutils.for_range(builder, groups) as loop:
                    before = builder.mul(loop.index, pairs)
                    group_starts = builder.add(starts, _times(builder, loop.index, 4 * PART_ROWS))
                    group_scales = builder.add(scales, _times(builder, loop.index, 4 * COLUMNS))
                    sums = multiply_pairs(vectors, before, group_starts)
                    for vector in vectors:
                        place = after(builder, group_scales, VECTOR_BYTES * vector)
                        scale = load_at(builder, place, NUMBERS)
                        for row, row_sums in enumerate(sums):
                            more = builder.load(row_sums[vector - first])
                            if kind.integers:
                                more = builder.sitofp(more, NUMBERS)
                            if kept:
                                each = kept_totals[row][vector - first]
                                builder.store(
                                    _fused(builder, more, scale, builder.load(each)), each
                                )
                            else:
                                place = places_of_totals[row][vector - first]
                                total = load_at(builder, place, NUMBERS)
                                store_at(builder, place, _fused(builder, more, scale, total))
                for kept_row, row_places in zip(kept_totals, places_of_totals, strict=False):
                    for each, place in zip(kept_row, row_places, strict=True):
                        store_at(builder, place, builder.load(each))
            return context.get_dummy_value()

        arguments = (address, address, types.int64, types.int64, types.int64, *(address,) * 4)
        return types.void(*arguments, address, types.int64), emit

    return multiply_group


def group_unpacking(kind: BlockKind) -> Any:
    """An operation that stores the numbers of `pairs` pairs, as they are multiplied, for products
    of many rows."""

    @intrinsic
    def unpack_group(
        typing: Any, codes: Any, pairs: Any, tables: Any, target: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, pairs, tables, target = given
            numbers = _numbers(builder, kind, tables)
            with cgutils.for_range(builder, pairs) as loop:
                pair = builder.add(codes, _times(builder, loop.index, PAIR_BYTES * kind.bits))
                place = builder.add(target, _times(builder, loop.index, kind.unpacked_bytes))
                each = [one for vector in range(VECTORS) for one in numbers(pair, vector)]
                for number, value in enumerate(each):
                    store_at(builder, after(builder, place, VECTOR_BYTES * number), value)
            return context.get_dummy_value()

        return types.void(address, types.int64, address, address), emit

    return unpack_group


def _stored(builder: Any, kind: BlockKind) -> Callable[[Any, int], list[Any]]:
    """As _numbers(), of what unpack_group() stored."""
    size = VECTOR_BYTES * kind.multiplied
    shape = WORDS if kind.native else NUMBERS

    def numbers(pair: Any, vector: int) -> list[Any]:
        places = range(size * vector, size * (vector + 1), VECTOR_BYTES)
        return [load_at(builder, after(builder, pair, place), shape) for place in places]

    return numbers


@intrinsic
def row_sum(typing: Any, place: Any, pairs: Any, bf16: Any) -> tuple[Any, Any]:
    """The sum of a row's inputs from an address on, bfloat16 or float32: those at the same place of
    each 16 pairs first."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, pairs, bf16 = given
        number = cgutils.alloca_once(builder, NUMBERS)
        builder.store(ir.Constant(NUMBERS, [0.0] * LANES), number)
        # Words of 32 bits: a pair of bfloat16, or one float32.
        words = builder.select(bf16, pairs, builder.add(pairs, pairs))
        step = ir.Constant(ADDRESS, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(ADDRESS, 0), words, step, ADDRESS) as (
            first,
            _,
        ):
            found = _some_words(
                builder,
                builder.add(place, builder.shl(first, ir.Constant(ADDRESS, 2))),
                builder.sub(words, first),
            )
            total = builder.load(number)
            with builder.if_else(bf16) as (pair, single):
                with pair:
                    lower = builder.bitcast(builder.shl(found, each_word(16)), NUMBERS)
                    upper = builder.bitcast(builder.and_(found, each_word(0xFFFF0000)), NUMBERS)
                    builder.store(builder.fadd(builder.fadd(total, lower), upper), number)
                with single:
                    builder.store(builder.fadd(total, builder.bitcast(found, NUMBERS)), number)
        total = builder.load(number)
        size = LANES
        while size > 1:
            size //= 2
            other = [min(lane + size, LANES - 1) for lane in range(LANES)]
            total = builder.fadd(total, builder.shuffle_vector(total, total, _words_of(other)))
        return builder.extract_element(total, ir.Constant(WORD, 0))

    return types.float32(address, types.int64, types.boolean), emit


@intrinsic
def byte_sum(typing: Any, place: Any, fours: Any) -> tuple[Any, Any]:
    """The sum of int8 inputs from an address on, four for each of `fours`; exact."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, fours = given
        total = cgutils.alloca_once(builder, WORDS)
        builder.store(each_word(0), total)
        step = ir.Constant(ADDRESS, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(ADDRESS, 0), fours, step, ADDRESS) as (
            first,
            _,
        ):
            here = builder.add(place, builder.shl(first, ir.Constant(ADDRESS, 2)))
            found = _some_words(builder, here, builder.sub(fours, first))
            for left in (0, 8, 16, 24):
                byte = builder.ashr(builder.shl(found, each_word(left)), each_word(24))
                builder.store(builder.add(builder.load(total), byte), total)
        lanes = builder.load(total)
        found = ir.Constant(WORD, 0)
        for lane in range(LANES):
            found = builder.add(found, builder.extract_element(lanes, ir.Constant(WORD, lane)))
        return builder.sitofp(found, NUMBER)

    return types.float32(address, types.int64), emit


def _some_words(builder: Any, place: Any, count: Any) -> Any:
    """16 words, of which those from `count` on are 0 and not read."""
    lanes = ir.Constant(ir.VectorType(ADDRESS, LANES), list(range(LANES)))
    mask = builder.icmp_signed("<", lanes, in_each_lane(builder, count, lanes.type))
    pointer = builder.inttoptr(place, WORDS.as_pointer())
    arguments = [pointer, ir.Constant(WORD, 4), mask, each_word(0)]
    return _call(builder, f"llvm.masked.load.v{LANES}i32.p0", WORDS, arguments)


def _inputs(builder: Any, place: Any, kind: BlockKind) -> list[Any]:
    """A pair of inputs in all lanes: both in one word, or the second and the first in float32."""
    if not kind.bf16:
        both = [load_at(builder, after(builder, place, 4 * one), NUMBER) for one in (1, 0)]
        return [in_each_lane(builder, each, NUMBERS) for each in both]
    word = load_at(builder, place, WORD)
    if kind.native:
        return [in_each_lane(builder, word, WORDS)]
    upper, low = ir.Constant(WORD, 0xFFFF0000), ir.Constant(WORD, 16)
    both = [builder.and_(word, upper), builder.shl(word, low)]
    return [in_each_lane(builder, builder.bitcast(each, NUMBER), NUMBERS) for each in both]


def _add_product(builder: Any, one: Any, other: Any, total: Any, kind: BlockKind) -> Any:
    if not kind.native:
        return _fused(builder, one, other, total)
    if kind.integers:  # bytes without a sign, which are the weight's, with bytes that have one
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, other, one])
    words = [total, one, other]
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", NUMBERS, words)


def _numbers(builder: Any, kind: BlockKind, tables: Any) -> Callable[[Any, int], list[Any]]:
    """Gives, for the place of a pair's codes and a vector, what is multiplied with _inputs()."""

    def table(index: int, shape: Any) -> Any:
        return load_at(builder, after(builder, tables, VECTOR_BYTES * index), shape)

    if kind.decoding == "fp32":
        return lambda pair, vector: [
            load_at(
                builder, after(builder, pair, 4 * COLUMNS * one + VECTOR_BYTES * vector), NUMBERS
            )
            for one in (1, 0)
        ]
    if kind.bits == 16:
        assert kind.native, "a CPU without the instruction"
        return lambda pair, vector: [
            load_at(builder, after(builder, pair, VECTOR_BYTES * vector), WORDS)
        ]
    if kind.native and kind.bits == 4:
        found = [
            table(index, _HALVES) for index in range(2 if kind.decoding == "two tables" else 1)
        ]
        return lambda pair, vector: _native_halves(builder, found, pair, vector)
    if kind.native:
        found = [table(index, _BYTES) for index in range(4)]
        return lambda pair, vector: [_native_bytes(builder, found, pair, vector)]
    if kind.bits == 4 and kind.wide:
        numbers = table(0, NUMBERS)

        def look_up(index: Any) -> Any:
            return _call(builder, "llvm.x86.avx512.permvar.sf.512", NUMBERS, [numbers, index])
    else:

        def look_up(index: Any) -> Any:
            return _gathered(builder, tables, builder.and_(index, each_word(15)))

    if kind.bits == 4:

        def halves(pair: Any, vector: int) -> list[Any]:
            words = load_at(builder, pair, WORDS)
            shifts = [16 * one + 4 * vector for one in (1, 0)]
            return [look_up(builder.lshr(words, each_word(shift))) for shift in shifts]

        return halves

    def octets(pair: Any, vector: int) -> list[Any]:
        half = vector % 2
        codes = load_at(builder, after(builder, pair, VECTOR_BYTES * (vector // 2)), _BYTES)
        if kind.decoding == "int8":
            codes = _signed(builder, codes)
        found = []
        for one in (1, 0):
            lanes = [16 * (lane // 4) + 8 * half + 2 * (lane % 4) + one for lane in range(LANES)]
            some = builder.shuffle_vector(codes, codes, _words_of(lanes))
            found.append(_int8(builder, some) if kind.decoding == "int8" else _fp8(builder, some))
        return found

    return octets


def _native_halves(builder: Any, tables: list[Any], pair: Any, vector: int) -> list[Any]:
    """The instruction takes 5 bits of each 16, and the tables are the same for both values of the
    fifth."""
    codes = load_at(builder, pair, _HALVES)
    shifted = builder.lshr(codes, ir.Constant(_HALVES, [4 * vector] * 2 * LANES))
    name = "llvm.x86.avx512.permvar.hi.512"
    found = [_call(builder, name, _HALVES, [table, shifted]) for table in tables]
    return [builder.bitcast(each, WORDS) for each in found]


def _native_bytes(builder: Any, tables: list[Any], pair: Any, vector: int) -> Any:
    """The instruction takes 7 bits of each 8. The sign is the eighth of both."""
    codes = load_at(builder, after(builder, pair, VECTOR_BYTES * (vector // 2)), _BYTES)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    upper, lower = (
        _call(builder, name, _BYTES, [tables[first], codes, tables[first + 1]]) for first in (0, 2)
    )
    sign = builder.and_(codes, ir.Constant(_BYTES, [0x80] * 4 * LANES))
    upper = builder.or_(upper, sign)
    lanes = []
    for lane in range(4):
        for byte in range(8):
            place = 16 * lane + 8 * (vector % 2) + byte
            lanes += [place, 4 * LANES + place]
    joined = builder.shuffle_vector(lower, upper, ir.Constant(_INDEXES, lanes))
    return builder.bitcast(joined, WORDS)


def _fetch(builder: Any, kind: BlockKind, pair: Any, vectors: range) -> None:
    """Begin to load the codes of these vectors into the cache."""
    for line in sorted({vector * kind.bits // 16 for vector in vectors}):
        fetch(builder, after(builder, pair, VECTOR_BYTES * line), FIRST_LEVEL)


def _signed(builder: Any, codes: Any) -> Any:
    """Integers from the sign and magnitude of the number + 1/2."""
    signs = builder.ashr(codes, ir.Constant(_BYTES, [7] * 4 * LANES))
    return builder.xor(codes, builder.and_(signs, ir.Constant(_BYTES, [0x7F] * 4 * LANES)))


def _int8(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.sext(codes, WORDS), NUMBERS)


def _fp8(builder: Any, codes: Any) -> Any:
    """4 bits of exponent and 3 of mantissa, in float32's places; exponents there are 120 more."""
    words = builder.zext(codes, WORDS)
    size = builder.shl(builder.and_(words, each_word(0x7F)), each_word(20))
    scaled = builder.fmul(builder.bitcast(size, NUMBERS), ir.Constant(NUMBERS, [2.0**120] * LANES))
    sign = builder.shl(builder.and_(words, each_word(0x80)), each_word(24))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, WORDS), sign), NUMBERS)


def _gathered(builder: Any, table: Any, index: Any) -> Any:
    """The float32 numbers of a table in memory."""
    offsets = builder.shl(index, each_word(2))
    found = ir.Constant(NUMBERS, ir.Undefined)
    for lane in range(LANES):
        place = ir.Constant(WORD, lane)
        offset = builder.zext(builder.extract_element(offsets, place), ADDRESS)
        number = load_at(builder, builder.add(table, offset), NUMBER)
        found = builder.insert_element(found, number, place)
    return found


def _fused(builder: Any, one: Any, other: Any, addend: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", NUMBERS, [one, other, addend])


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _words_of(values: list[int]) -> Any:
    return ir.Constant(WORDS, values)


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(ADDRESS, factor))
