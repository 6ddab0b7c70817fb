"""Vectors of 16 float32 numbers for compiled kernels, and what a kernel may do with them.

In and out: values in numba's compiled code. Memory is given by its address, an int64.

numba's own loops add numbers in an order that the compiler chooses. These operations are LLVM's
vector instructions, so a kernel fixes the order of its additions. On a CPU with smaller registers,
LLVM divides each vector.

bfloat16 numbers are read in pairs, as the two halves of 32-bit words. A bfloat16 is the upper half
of a float32, so each half becomes a float32 by a shift or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from baton_engine.cpu_kernels.llvm_values import (
    ADDRESS,
    LANES,
    NUMBER,
    NUMBERS,
    WORD,
    WORDS,
    after,
    each_word,
    in_each_lane,
    load_at,
    store_at,
)

COLUMNS = 64  # outputs of a block of weights
# From which cache level on a line is fetched, as LLVM numbers them.
FIRST_LEVEL, SECOND_LEVEL = 3, 2
QUARTER = 4  # words of the part of a vector in which shuffles are cheapest
address = types.int64

_MASK = ir.VectorType(ir.IntType(1), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)

_Emit = Any  # (context, builder, signature, arguments) -> value


def _operation(declared: Callable[..., tuple[Any, _Emit]]) -> Any:
    """An operation of compiled code, from a function that returns its signature and what emits it.
    The function's first argument is numba's typing context."""
    return intrinsic(declared)


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__(name=name)


class _Numbers(_Vector):
    pass


class _Words(_Vector):
    pass


@register_model(_Numbers)
class _NumbersModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, NUMBERS)


@register_model(_Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, WORDS)


numbers = _Numbers("float32x16")
words = _Words("uint32x16")


@_operation
def zeros(typing: Any) -> tuple[Any, _Emit]:
    return numbers(), lambda context, builder, signature, given: ir.Constant(NUMBERS, [0.0] * LANES)


@_operation
def broadcast(typing: Any, number: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return in_each_lane(builder, given[0], NUMBERS)

    return numbers(types.float32), emit


@_operation
def fma(typing: Any, one: Any, other: Any, addend: Any) -> tuple[Any, _Emit]:
    """one * other + addend, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(NUMBERS, [NUMBERS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(function, given)

    return numbers(numbers, numbers, numbers), emit


@_operation
def add(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fadd(*given)

    return numbers(numbers, numbers), emit


@_operation
def subtract(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fsub(*given)

    return numbers(numbers, numbers), emit


@_operation
def multiply(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fmul(*given)

    return numbers(numbers, numbers), emit


@_operation
def divide(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fdiv(*given)

    return numbers(numbers, numbers), emit


@_operation
def larger(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    """The larger number at each place; `one` if `other` is NaN."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        one, other = given
        return builder.select(builder.fcmp_ordered(">", other, one), other, one)

    return numbers(numbers, numbers), emit


@_operation
def smaller(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    """The smaller number at each place; `one` if `other` is NaN."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        one, other = given
        return builder.select(builder.fcmp_ordered("<", other, one), other, one)

    return numbers(numbers, numbers), emit


@_operation
def nearest_integer(typing: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(NUMBERS, [NUMBERS])
        name = f"llvm.nearbyint.v{LANES}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)

    return numbers(numbers), emit


@_operation
def magnitudes(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The bits of the absolute numbers: as integers, they have the numbers' order, with infinity
    and NaN above all others."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.and_(builder.bitcast(given[0], WORDS), each_word(0x7FFFFFFF))

    return words(numbers), emit


@_operation
def largest_bf16(typing: Any, place: Any, count: Any) -> tuple[Any, _Emit]:
    """The largest of the magnitudes() of `count` bfloat16 numbers, which are whole vectors, as an
    int64."""

    half = ir.IntType(16)

    def reduced(builder: Any, value: Any) -> Any:
        name = f"llvm.vector.reduce.umax.v{value.type.count}i16"
        kind = ir.FunctionType(half, [value.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])

    def largest(builder: Any, place: Any, steps: Any, lanes: int) -> Any:
        halves = ir.VectorType(half, lanes)
        most = cgutils.alloca_once_value(builder, ir.Constant(halves, [0] * lanes))
        with cgutils.for_range(builder, steps) as loop:
            offset = builder.mul(loop.index, ir.Constant(ADDRESS, 2 * lanes))
            pointer = builder.inttoptr(builder.add(place, offset), halves.as_pointer())
            value = builder.load(pointer, typ=halves)
            value.align = 2
            value = builder.and_(value, ir.Constant(halves, [0x7FFF] * lanes))
            so_far = builder.load(most)
            larger = builder.icmp_unsigned(">", value, so_far)
            builder.store(builder.select(larger, value, so_far), most)
        return reduced(builder, builder.load(most))

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, count = given
        pairs = builder.udiv(count, ir.Constant(ADDRESS, 2 * LANES))
        rest = builder.udiv(
            builder.urem(count, ir.Constant(ADDRESS, 2 * LANES)), ir.Constant(ADDRESS, LANES)
        )
        end = builder.add(place, builder.mul(pairs, ir.Constant(ADDRESS, 4 * LANES)))
        found = [largest(builder, place, pairs, 2 * LANES), largest(builder, end, rest, LANES)]
        most = builder.select(builder.icmp_unsigned(">", *found), *found)
        return builder.shl(builder.zext(most, ADDRESS), ir.Constant(ADDRESS, 16))

    return types.int64(address, types.int64), emit


@_operation
def larger_words(typing: Any, one: Any, other: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *given), *given)

    return words(words, words), emit


@_operation
def largest_word(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The largest of 16 words, as an int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORDS])
        name = f"llvm.vector.reduce.umax.v{LANES}i32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.zext(builder.call(function, given), ir.IntType(64))

    return types.int64(words), emit


@_operation
def power_of_2(typing: Any, exponent: Any) -> tuple[Any, _Emit]:
    """2 to the power of integers from -127 to 128; 0 for -127, infinity for 128."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        biased = builder.add(builder.fptosi(given[0], WORDS), each_word(127))
        return builder.bitcast(builder.shl(biased, each_word(23)), NUMBERS)

    return numbers(numbers), emit


@_operation
def each_power_of_2(typing: Any, exponent: Any) -> tuple[Any, _Emit]:
    """2 to the power of one integer from -126 to 127, in each lane."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        biased = builder.add(builder.trunc(given[0], WORD), ir.Constant(WORD, 127))
        bits = builder.shl(biased, ir.Constant(WORD, 23))
        return in_each_lane(builder, builder.bitcast(bits, NUMBER), NUMBERS)

    return numbers(types.int64), emit


@_operation
def lanes_of(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The 16 numbers as a tuple."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        lanes = [
            builder.extract_element(given[0], ir.Constant(WORD, lane)) for lane in range(LANES)
        ]
        return context.make_tuple(builder, signature.return_type, lanes)

    return types.UniTuple(types.float32, LANES)(numbers), emit


@_operation
def load_bf16(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """16 bfloat16 numbers."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), LANES)
        value = builder.load(builder.inttoptr(given[0], halves.as_pointer()), typ=halves)
        value.align = 2
        return builder.bitcast(builder.shl(builder.zext(value, WORDS), each_word(16)), NUMBERS)

    return numbers(address), emit


@_operation
def store_bf16(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store 16 numbers from rounded_to_bf16()."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), LANES)
        bits = builder.lshr(builder.bitcast(given[1], WORDS), each_word(16))
        pointer = builder.inttoptr(given[0], halves.as_pointer())
        builder.store(builder.trunc(bits, halves), pointer).align = 2
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def load_int8(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """16 integers of a byte each."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value = builder.load(builder.inttoptr(given[0], _BYTES.as_pointer()), typ=_BYTES)
        value.align = 1
        return builder.sitofp(value, NUMBERS)

    return numbers(address), emit


@_operation
def store_int8(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store 16 integers from -128 to 127 as a byte each."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        integers = builder.trunc(builder.fptosi(given[1], WORDS), _BYTES)
        builder.store(integers, builder.inttoptr(given[0], _BYTES.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def load_fp8(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """16 numbers of fp8 (E4M3) that are not NaN."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value = builder.load(builder.inttoptr(given[0], _BYTES.as_pointer()), typ=_BYTES)
        value.align = 1
        shorts = ir.VectorType(ir.IntType(16), LANES)

        def each(number: int) -> Any:
            return ir.Constant(shorts, [number] * LANES)

        # The sign in the highest bit, the others after the highest of a float16's exponent.
        wide = builder.shl(builder.sext(value, shorts), each(7))
        bits = builder.and_(wide, each(0xBFFF))
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        return builder.fmul(builder.fpext(halves, NUMBERS), ir.Constant(NUMBERS, [256.0] * LANES))

    return numbers(address), emit


@_operation
def store_fp8(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store the nearest fp8 numbers, ties to even, of 16 numbers from -448 to 448."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        bits = builder.bitcast(given[1], WORDS)
        sign = builder.and_(builder.lshr(bits, each_word(24)), each_word(0x80))
        size = builder.and_(bits, each_word(0x7FFFFFFF))
        last = builder.and_(builder.lshr(size, each_word(20)), each_word(1))
        near = builder.add(builder.add(size, last), each_word(0x7FFFF))
        # The exponent of fp8 is 120 less than that of float32.
        usual = builder.sub(builder.lshr(near, each_word(20)), each_word(120 << 3))
        # Below 2^-6 codes are multiples of 2^-9, which is the last bit of numbers near 2^14.
        large = ir.Constant(NUMBERS, [2.0**14] * LANES)
        sums = builder.fadd(builder.bitcast(size, NUMBERS), large)
        small = builder.sub(builder.bitcast(sums, WORDS), builder.bitcast(large, WORDS))
        is_small = builder.icmp_unsigned("<", size, each_word((127 - 6) << 23))
        codes = builder.or_(builder.select(is_small, small, usual), sign)
        pointer = builder.inttoptr(given[0], _BYTES.as_pointer())
        builder.store(builder.trunc(codes, _BYTES), pointer).align = 1
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def store_low_bytes(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store the lowest byte of each number's bits."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        integers = builder.trunc(builder.bitcast(given[1], WORDS), _BYTES)
        builder.store(integers, builder.inttoptr(given[0], _BYTES.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def store_low_bytes_of_pairs(typing: Any, place: Any, evens: Any, odds: Any) -> tuple[Any, _Emit]:
    """Store the lowest byte of each number's bits, of both vectors in turn."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, evens, odds = given
        kind = ir.VectorType(ir.IntType(8), 4 * LANES)
        pair = builder.bitcast(evens, kind), builder.bitcast(odds, kind)
        lanes = [4 * (index // 2) + index % 2 * 4 * LANES for index in range(2 * LANES)]
        mask = ir.Constant(ir.VectorType(WORD, 2 * LANES), lanes)
        stored = builder.shuffle_vector(*pair, mask)
        builder.store(stored, builder.inttoptr(place, stored.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(address, numbers, numbers), emit


@_operation
def load_int8_pairs(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """32 integers of a byte each: those at even places, and those at odd ones."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), LANES)
        value = builder.load(builder.inttoptr(given[0], halves.as_pointer()), typ=halves)
        value.align = 1
        pairs = builder.sext(value, WORDS)
        even = builder.ashr(builder.shl(pairs, each_word(24)), each_word(24))
        odd = builder.ashr(pairs, each_word(8))
        found = [builder.sitofp(each, NUMBERS) for each in (even, odd)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(numbers, 2)(address), emit


@_operation
def store_bf16_pairs(typing: Any, place: Any, evens: Any, odds: Any) -> tuple[Any, _Emit]:
    """Store numbers from rounded_to_bf16(), of both vectors in turn."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, evens, odds = given
        low = builder.lshr(builder.bitcast(evens, WORDS), each_word(16))
        high = builder.and_(builder.bitcast(odds, WORDS), each_word(0xFFFF0000))
        pointer = builder.inttoptr(place, WORDS.as_pointer())
        builder.store(builder.or_(low, high), pointer).align = 2
        return context.get_dummy_value()

    return types.void(address, numbers, numbers), emit


@_operation
def load_byte(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One int8, as an int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.IntType(8)
        value = builder.load(builder.inttoptr(given[0], kind.as_pointer()), typ=kind)
        value.align = 1
        return builder.sext(value, ADDRESS)

    return types.int64(address), emit


@_operation
def store_byte(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store an int64 from -128 to 127 as a byte."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.IntType(8)
        pointer = builder.inttoptr(given[0], kind.as_pointer())
        builder.store(builder.trunc(given[1], kind), pointer).align = 1
        return context.get_dummy_value()

    return types.void(address, types.int64), emit


@_operation
def rounded_to_bf16(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The nearest bfloat16 numbers, ties to even. The value of NaN is not specified."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        bits = builder.bitcast(given[0], WORDS)
        last = builder.and_(builder.lshr(bits, each_word(16)), each_word(1))
        bits = builder.add(builder.add(bits, last), each_word(0x7FFF))
        return builder.bitcast(builder.and_(bits, each_word(0xFFFF0000)), NUMBERS)

    return numbers(numbers), emit


@_operation
def lower_halves(typing: Any, pairs: Any) -> tuple[Any, _Emit]:
    """The first bfloat16 number of each pair."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(builder.shl(given[0], each_word(16)), NUMBERS)

    return numbers(words), emit


@_operation
def upper_halves(typing: Any, pairs: Any) -> tuple[Any, _Emit]:
    """The second bfloat16 number of each pair."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(builder.and_(given[0], each_word(0xFFFF0000)), NUMBERS)

    return numbers(words), emit


@_operation
def only_lanes(typing: Any, value: Any, first: Any, end: Any, other: Any) -> tuple[Any, _Emit]:
    """The numbers at places [first, end), and `other` at the others."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value, first, end, other = given
        places = ir.VectorType(ir.IntType(64), LANES)
        lanes = ir.Constant(places, list(range(LANES)))
        begun = builder.icmp_signed(">=", lanes, in_each_lane(builder, first, places))
        not_ended = builder.icmp_signed("<", lanes, in_each_lane(builder, end, places))
        mask = builder.and_(begun, not_ended)
        return builder.select(mask, value, in_each_lane(builder, other, NUMBERS))

    return numbers(numbers, types.int64, types.int64, types.float32), emit


@_operation
def load(typing: Any, place: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return load_at(builder, given[0], NUMBERS)

    return numbers(address), emit


@_operation
def load_words(typing: Any, place: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return load_at(builder, given[0], WORDS)

    return words(address), emit


@_operation
def load_number(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One float32."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return load_at(builder, given[0], NUMBER)

    return types.float32(address), emit


@_operation
def store_number(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        store_at(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, types.float32), emit


@_operation
def load_index(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One int32, as an int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.sext(load_at(builder, given[0], WORD), ir.IntType(64))

    return types.int64(address), emit


@_operation
def load_address(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return load_at(builder, given[0], ADDRESS)

    return address(address), emit


@_operation
def store_address(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        store_at(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, address), emit


@_operation
def store(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        store_at(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def store_transposed(typing: Any, place: Any, row_bytes: Any, target: Any) -> tuple[Any, _Emit]:
    """Read 16 rows of 16 words, `row_bytes` apart, and store their columns one after the other."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, row_bytes, target = given
        rows = [
            builder.add(place, builder.mul(row_bytes, ir.Constant(row_bytes.type, row)))
            for row in range(LANES)
        ]
        # Loads take the words of four rows apart, so that only words within a quarter of a vector
        # are left to exchange.
        for first in range(0, LANES, QUARTER):
            some = [_quarters(builder, rows[row::QUARTER], 4 * first) for row in range(QUARTER)]
            # Exchange one bit of a word's row with the same bit of its column at a time.
            for bit in (1, 2):
                upper = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
                lower = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
                for row in range(QUARTER):
                    if not row & bit:
                        pair = some[row], some[row + bit]
                        some[row] = builder.shuffle_vector(*pair, ir.Constant(WORDS, upper))
                        some[row + bit] = builder.shuffle_vector(*pair, ir.Constant(WORDS, lower))
            for column, value in enumerate(some):
                offset = ir.Constant(target.type, (first + column) * LANES * 4)
                store_at(builder, builder.add(target, offset), value)
        return context.get_dummy_value()

    return types.void(address, types.int64, address), emit


def _quarters(builder: Any, places: Sequence[Any], offset: int) -> Any:
    """A vector of four words from each of four addresses."""
    kind = ir.VectorType(WORD, QUARTER)
    parts = [load_at(builder, after(builder, place, offset), kind) for place in places]
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        mask = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
        parts = [
            builder.shuffle_vector(one, other, mask)
            for one, other in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


@_operation
def interleaved(typing: Any, evens: Any, odds: Any) -> tuple[Any, _Emit]:
    """Both vectors' numbers in turn: a pair of vectors."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = []
        for first in (0, LANES // 2):
            lanes = [first + lane // 2 + (lane % 2) * LANES for lane in range(LANES)]
            halves.append(builder.shuffle_vector(*given, ir.Constant(WORDS, lanes)))
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(numbers, 2)(numbers, numbers), emit


def fetch(builder: Any, place: Any, level: int = SECOND_LEVEL) -> None:
    """Ask for a cache line that is read soon. An address without memory is no error."""
    pointer = builder.inttoptr(place, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(WORD, flag) for flag in (0, level, 1)]  # to read; data
    builder.call(function, [pointer, *flags])


@_operation
def prefetch(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """See fetch()."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        fetch(builder, given[0])
        return context.get_dummy_value()

    return types.void(address), emit


@_operation
def take_next(typing: Any, counter: Any) -> tuple[Any, _Emit]:
    """Add 1 to the int64 that a pointer points to, and return what it was, for all threads in
    turn."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer = builder.bitcast(given[0], ir.IntType(64).as_pointer())
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", pointer, one, "monotonic")

    return types.int64(counter), emit


@_operation
def count_finished(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """Add 1 to the int64 at an address, and return what it was. Who gets the last number sees what
    the threads stored that counted before."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ADDRESS.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ADDRESS, 1), "acq_rel")

    return types.int64(address), emit


def block_product(rows: int, bf16: bool, native: bool, wide: bool) -> Any:
    """An operation that multiplies `rows` rows of x with a block of weights, which has COLUMNS
    outputs, and stores their sums in float32, `rows` times COLUMNS numbers.

    A row of x is read in words of 32 bits: one float32, or with `bf16` two inputs, of which the
    second is added before the first. The weights of a word are a vector after the other. `places`
    is where the addresses of the rows are. With `native`, the instruction of AVX-512 BF16 adds a
    word's two inputs. `wide` says that the CPU has 32 registers of 16 numbers.
    """
    vectors = COLUMNS // LANES if wide else max(1, 4 // rows)  # that are computed together

    @_operation
    def multiply_block(
        typing: Any, weights: Any, places: Any, count: Any, sums: Any
    ) -> tuple[Any, _Emit]:
        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weights, places, count, sums = given
            found = [
                load_at(builder, after(builder, places, 8 * row), ADDRESS) for row in range(rows)
            ]
            for first in range(0, COLUMNS // LANES, vectors):
                part = after(builder, weights, 4 * LANES * first)
                totals = [
                    [cgutils.alloca_once(builder, NUMBERS) for _ in range(vectors)] for _ in found
                ]
                for total in (each for row in totals for each in row):
                    builder.store(ir.Constant(NUMBERS, [0.0] * LANES), total)
                with cgutils.for_range(builder, count) as loop:
                    offset = builder.mul(loop.index, ir.Constant(ADDRESS, 4 * COLUMNS))
                    place = builder.add(part, offset)
                    values = [
                        load_at(builder, after(builder, place, 4 * LANES * vector), WORDS)
                        for vector in range(vectors)
                    ]
                    word_at = builder.mul(loop.index, ir.Constant(ADDRESS, 4))
                    for row, row_totals in zip(found, totals, strict=True):
                        word = load_at(builder, builder.add(row, word_at), WORD)
                        word = in_each_lane(builder, word, WORDS)
                        for value, total in zip(values, row_totals, strict=True):
                            more = add_products(builder, word, value, builder.load(total))
                            builder.store(more, total)
                for row, row_totals in enumerate(totals):
                    for vector, total in enumerate(row_totals):
                        place = 4 * (row * COLUMNS + (first + vector) * LANES)
                        store_at(builder, after(builder, sums, place), builder.load(total))
            return context.get_dummy_value()

        return types.void(address, address, types.int64, address), emit

    def add_products(builder: Any, word: Any, weights: Any, total: Any) -> Any:
        if not bf16:
            return fused(builder, word, weights, total)
        if native:
            kind = ir.FunctionType(NUMBERS, [NUMBERS, WORDS, WORDS])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [total, word, weights])
        upper, low = each_word(0xFFFF0000), each_word(16)
        seconds = builder.and_(word, upper), builder.and_(weights, upper)
        total = fused(builder, *seconds, total)
        return fused(builder, builder.shl(word, low), builder.shl(weights, low), total)

    def fused(builder: Any, one: Any, other: Any, total: Any) -> Any:
        kind = ir.FunctionType(NUMBERS, [NUMBERS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(
            function, [builder.bitcast(one, NUMBERS), builder.bitcast(other, NUMBERS), total]
        )

    return multiply_block
