"""Vectors of 16 float32 numbers for compiled kernels, and what a kernel may do with them.

In and out: values in numba's compiled code. Memory is given by its address, an int64.

numba's own loops add numbers in an order that the compiler chooses. These operations are LLVM's
vector instructions, so a kernel fixes the order of its additions. On a CPU with smaller registers,
LLVM divides each vector.

bfloat16 numbers are read in pairs, as the two halves of 32-bit words. A bfloat16 is the upper half
of a float32, so each half becomes a float32 by a shift or a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
COLUMNS = 64  # outputs of a block of weights
address = types.int64

_NUMBER = ir.FloatType()
_WORD = ir.IntType(32)
_ADDRESS = ir.IntType(64)
_NUMBERS = ir.VectorType(_NUMBER, LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)

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
        super().__init__(manager, kind, _NUMBERS)


@register_model(_Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORDS)


numbers = _Numbers("float32x16")
words = _Words("uint32x16")


@_operation
def zeros(typing: Any) -> tuple[Any, _Emit]:
    return numbers(), lambda context, builder, signature, given: ir.Constant(
        _NUMBERS, [0.0] * LANES
    )


@_operation
def broadcast(typing: Any, number: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _broadcast(builder, given[0], _NUMBERS)

    return numbers(types.float32), emit


@_operation
def fma(typing: Any, one: Any, other: Any, addend: Any) -> tuple[Any, _Emit]:
    """one * other + addend, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(_NUMBERS, [_NUMBERS] * 3)
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
        kind = ir.FunctionType(_NUMBERS, [_NUMBERS])
        name = f"llvm.nearbyint.v{LANES}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)

    return numbers(numbers), emit


@_operation
def power_of_2(typing: Any, exponent: Any) -> tuple[Any, _Emit]:
    """2 to the power of integers from -127 to 128; 0 for -127, infinity for 128."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        biased = builder.add(builder.fptosi(given[0], _WORDS), _words(127))
        return builder.bitcast(builder.shl(biased, _words(23)), _NUMBERS)

    return numbers(numbers), emit


@_operation
def lanes_of(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The 16 numbers as a tuple."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        lanes = [
            builder.extract_element(given[0], ir.Constant(_WORD, lane)) for lane in range(LANES)
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
        return builder.bitcast(builder.shl(builder.zext(value, _WORDS), _words(16)), _NUMBERS)

    return numbers(address), emit


@_operation
def store_bf16(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    """Store 16 numbers from rounded_to_bf16()."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), LANES)
        bits = builder.lshr(builder.bitcast(given[1], _WORDS), _words(16))
        pointer = builder.inttoptr(given[0], halves.as_pointer())
        builder.store(builder.trunc(bits, halves), pointer).align = 2
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def rounded_to_bf16(typing: Any, value: Any) -> tuple[Any, _Emit]:
    """The nearest bfloat16 numbers, ties to even. The value of NaN is not specified."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        bits = builder.bitcast(given[0], _WORDS)
        last = builder.and_(builder.lshr(bits, _words(16)), _words(1))
        bits = builder.add(builder.add(bits, last), _words(0x7FFF))
        return builder.bitcast(builder.and_(bits, _words(0xFFFF0000)), _NUMBERS)

    return numbers(numbers), emit


@_operation
def lower_halves(typing: Any, pairs: Any) -> tuple[Any, _Emit]:
    """The first bfloat16 number of each pair."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(builder.shl(given[0], _words(16)), _NUMBERS)

    return numbers(words), emit


@_operation
def upper_halves(typing: Any, pairs: Any) -> tuple[Any, _Emit]:
    """The second bfloat16 number of each pair."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(builder.and_(given[0], _words(0xFFFF0000)), _NUMBERS)

    return numbers(words), emit


@_operation
def only_lanes(typing: Any, value: Any, first: Any, end: Any, other: Any) -> tuple[Any, _Emit]:
    """The numbers at places [first, end), and `other` at the others."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value, first, end, other = given
        places = ir.VectorType(ir.IntType(64), LANES)
        lanes = ir.Constant(places, list(range(LANES)))
        begun = builder.icmp_signed(">=", lanes, _broadcast(builder, first, places))
        not_ended = builder.icmp_signed("<", lanes, _broadcast(builder, end, places))
        mask = builder.and_(begun, not_ended)
        return builder.select(mask, value, _broadcast(builder, other, _NUMBERS))

    return numbers(numbers, types.int64, types.int64, types.float32), emit


@_operation
def load(typing: Any, place: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _load(builder, given[0], _NUMBERS)

    return numbers(address), emit


@_operation
def load_words(typing: Any, place: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _load(builder, given[0], _WORDS)

    return words(address), emit


@_operation
def load_number(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One float32."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _load(builder, given[0], _NUMBER)

    return types.float32(address), emit


@_operation
def store_number(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _store(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, types.float32), emit


@_operation
def load_index(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One int32, as an int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.sext(_load(builder, given[0], _WORD), ir.IntType(64))

    return types.int64(address), emit


@_operation
def load_address(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """One int64."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _load(builder, given[0], _ADDRESS)

    return address(address), emit


@_operation
def store_address(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _store(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, address), emit


@_operation
def store(typing: Any, place: Any, value: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _store(builder, given[0], given[1])
        return context.get_dummy_value()

    return types.void(address, numbers), emit


@_operation
def store_transposed(typing: Any, place: Any, row_bytes: Any, target: Any) -> tuple[Any, _Emit]:
    """Read 16 rows of 16 words, `row_bytes` apart, and store their columns one after the other."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, row_bytes, target = given
        rows = []
        for row in range(LANES):
            offset = builder.mul(row_bytes, ir.Constant(row_bytes.type, row))
            rows.append(_load(builder, builder.add(place, offset), _WORDS))
        # Exchange one bit of a word's row with the same bit of its column at a time.
        bit = 1
        while bit < LANES:
            upper = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
            lower = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for row in range(LANES):
                if not row & bit:
                    pair = rows[row], rows[row + bit]
                    rows[row] = builder.shuffle_vector(*pair, ir.Constant(_WORDS, upper))
                    rows[row + bit] = builder.shuffle_vector(*pair, ir.Constant(_WORDS, lower))
            bit *= 2
        for column, value in enumerate(rows):
            offset = ir.Constant(target.type, column * LANES * 4)
            _store(builder, builder.add(target, offset), value)
        return context.get_dummy_value()

    return types.void(address, types.int64, address), emit


@_operation
def interleaved(typing: Any, evens: Any, odds: Any) -> tuple[Any, _Emit]:
    """Both vectors' numbers in turn: a pair of vectors."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        halves = []
        for first in (0, LANES // 2):
            lanes = [first + lane // 2 + (lane % 2) * LANES for lane in range(LANES)]
            halves.append(builder.shuffle_vector(*given, ir.Constant(_WORDS, lanes)))
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(numbers, 2)(numbers, numbers), emit


@_operation
def prefetch(typing: Any, place: Any) -> tuple[Any, _Emit]:
    """Ask for a cache line that is read soon."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _WORD, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(_WORD, flag) for flag in (0, 3, 1)]  # read, keep, data
        builder.call(function, [pointer, *flags])
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
        pointer = builder.inttoptr(given[0], _ADDRESS.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_ADDRESS, 1), "acq_rel")

    return types.int64(address), emit


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _broadcast(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _words(0))


def _load(builder: Any, place: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(place, kind.as_pointer()), typ=kind)
    value.align = 4
    return value


def _store(builder: Any, place: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 4


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
                _load(builder, _after(builder, places, 8 * row), _ADDRESS) for row in range(rows)
            ]
            for first in range(0, COLUMNS // LANES, vectors):
                part = _after(builder, weights, 4 * LANES * first)
                totals = [
                    [cgutils.alloca_once(builder, _NUMBERS) for _ in range(vectors)] for _ in found
                ]
                for total in (each for row in totals for each in row):
                    builder.store(ir.Constant(_NUMBERS, [0.0] * LANES), total)
                with cgutils.for_range(builder, count) as loop:
                    offset = builder.mul(loop.index, ir.Constant(_ADDRESS, 4 * COLUMNS))
                    place = builder.add(part, offset)
                    values = [
                        _load(builder, _after(builder, place, 4 * LANES * vector), _WORDS)
                        for vector in range(vectors)
                    ]
                    word_at = builder.mul(loop.index, ir.Constant(_ADDRESS, 4))
                    for row, row_totals in zip(found, totals, strict=True):
                        word = _load(builder, builder.add(row, word_at), _WORD)
                        word = _broadcast(builder, word, _WORDS)
                        for value, total in zip(values, row_totals, strict=True):
                            more = add_products(builder, word, value, builder.load(total))
                            builder.store(more, total)
                for row, row_totals in enumerate(totals):
                    for vector, total in enumerate(row_totals):
                        place = 4 * (row * COLUMNS + (first + vector) * LANES)
                        _store(builder, _after(builder, sums, place), builder.load(total))
            return context.get_dummy_value()

        return types.void(address, address, types.int64, address), emit

    def add_products(builder: Any, word: Any, weights: Any, total: Any) -> Any:
        if not bf16:
            return fused(builder, word, weights, total)
        if native:
            kind = ir.FunctionType(_NUMBERS, [_NUMBERS, _WORDS, _WORDS])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [total, word, weights])
        upper, low = _words(0xFFFF0000), _words(16)
        seconds = builder.and_(word, upper), builder.and_(weights, upper)
        total = fused(builder, *seconds, total)
        return fused(builder, builder.shl(word, low), builder.shl(weights, low), total)

    def fused(builder: Any, one: Any, other: Any, total: Any) -> Any:
        kind = ir.FunctionType(_NUMBERS, [_NUMBERS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(
            function, [builder.bitcast(one, _NUMBERS), builder.bitcast(other, _NUMBERS), total]
        )

    return multiply_block


def _after(builder: Any, place: Any, offset: int) -> Any:
    return builder.add(place, ir.Constant(_ADDRESS, offset))
