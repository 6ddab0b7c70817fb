"""The products of attention for a few rows: compiled inner loops whose sums stay in registers.

In: addresses of rows, and of keys or values. Out: sums in float32.

An addition waits for the one before it in the same sum, so a loop computes as many sums at a time
as the CPU's adders hold: for example, 3 rows times 64 keys, or times 64 numbers of a value. Each
sum is added in one order. In float32 that is one product after the other; in bfloat16 two by two,
the second before the first, which is what the instruction of AVX-512 BF16 does. A CPU without it
computes the same in float32.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton_engine.cpu_kernels.llvm_values import (
    ADDRESS,
    LANES,
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
from baton_engine.cpu_kernels.openmp import inlined
from baton_engine.cpu_kernels.vectors import address, fetch

# Rows that are computed together.
ROWS = 4
# Units of 16 keys whose scores are computed together, and of 16 numbers of values whose sums are.
UNITS = 4

# NUMBA_CPU_NAME compiles for another CPU than this one.
_NATIVE = not numba.config.CPU_NAME and bool(llvm.get_host_cpu_features().get("avx512bf16"))
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def _scores_of(rows: int, bf16: bool) -> Any:
    """An operation: add to the `totals` of `rows` rows, float32 [rows, UNITS, 16], the scores of
    the words [begin, end) of UNITS units of keys. `queries` are words [rows, `words`], and a unit
    has its words' 16 keys one after the other, from `columns` on."""

    @intrinsic
    def score(
        typing: Any, queries: Any, words: Any, columns: Any, begin: Any, end: Any, totals: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            queries, words, columns, begin, end, totals = given
            places = _each(builder, queries, _times(builder, words, 4), rows)
            units = _each(builder, columns, _times(builder, words, VECTOR_BYTES), UNITS)
            sums = _no_sums(builder, rows, UNITS)
            step = ir.Constant(ADDRESS, 1)
            with cgutils.for_range_slice(builder, begin, end, step, ADDRESS) as (word, _):
                column, at = _times(builder, word, VECTOR_BYTES), _times(builder, word, 4)
                keys = [load_at(builder, builder.add(unit, column), WORDS) for unit in units]
                for place, row_sums in zip(places, sums, strict=True):
                    query = load_at(builder, builder.add(place, at), WORD)
                    _add_products(
                        builder, in_each_lane(builder, query, WORDS), keys, row_sums, bf16
                    )
            for row, row_sums in enumerate(sums):
                for unit, place in enumerate(row_sums):
                    target = after(builder, totals, VECTOR_BYTES * (UNITS * row + unit))
                    total = builder.fadd(load_at(builder, target, NUMBERS), builder.load(place))
                    store_at(builder, target, total)
            return context.get_dummy_value()

        arguments = (address, types.int64, address, types.int64, types.int64, address)
        return types.void(*arguments), emit

    return score


def _sums_of(rows: int, units: int, bf16: bool) -> Any:
    """An operation: store the sums of values times weights of `rows` rows, float32
    [rows, UNITS, 16], for `units` units of 16 numbers of the values. The addresses of `count` units
    of 16 keys are at `places`; numbers begin `offset` bytes after these, and keys are `step` bytes
    apart. The same parts of the units whose addresses are at `later` are prefetched. Rows have
    their weights `weight_step` bytes apart, in the dtype of the values."""
    loads = units // 2 if bf16 else units

    @intrinsic
    def sum_values(
        typing: Any,
        places: Any,
        later: Any,
        count: Any,
        offset: Any,
        step: Any,
        weights: Any,
        weight_step: Any,
        target: Any,
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            places, later, count, offset, step, weights, weight_step, target = given
            row_weights = _each(builder, weights, weight_step, rows)
            sums = _no_sums(builder, rows, units)
            keys = LANES // 2 if bf16 else LANES  # words of weights
            with cgutils.for_range(builder, count) as unit_loop:
                unit = unit_loop.index
                source, ahead = (
                    builder.add(
                        load_at(builder, builder.add(array, _times(builder, unit, 8)), ADDRESS),
                        offset,
                    )
                    for array in (places, later)
                )
                first = _times(builder, unit, 4 * keys)
                with cgutils.for_range(builder, ir.Constant(ADDRESS, keys)) as loop:
                    skipped = _times(builder, loop.index, 2 if bf16 else 1)
                    here = builder.add(source, builder.mul(skipped, step))
                    there = builder.add(ahead, builder.mul(skipped, step))
                    for place in (there, builder.add(there, step)) if bf16 else (there,):
                        for load in range(loads):
                            fetch(builder, after(builder, place, VECTOR_BYTES * load))
                    if bf16:
                        values = _pairs(builder, here, builder.add(here, step), loads)
                    else:
                        values = [
                            load_at(builder, after(builder, here, VECTOR_BYTES * load), WORDS)
                            for load in range(loads)
                        ]
                    at = builder.add(first, _times(builder, loop.index, 4))
                    for place, row_sums in zip(row_weights, sums, strict=True):
                        weight = load_at(builder, builder.add(place, at), WORD)
                        weight = in_each_lane(builder, weight, WORDS)
                        _add_products(builder, weight, values, row_sums, bf16)
            for row, row_sums in enumerate(sums):
                found = [builder.load(place) for place in row_sums]
                if bf16:
                    found = _in_turn(builder, found)
                for unit, value in enumerate(found):
                    store_at(
                        builder, after(builder, target, VECTOR_BYTES * (UNITS * row + unit)), value
                    )
            return context.get_dummy_value()

        arguments = (address, address, *(types.int64,) * 3, address, types.int64, address)
        return types.void(*arguments), emit

    return sum_values


def _pairs(builder: Any, one: Any, other: Any, loads: int) -> list[Any]:
    """Words with a number of each of two keys, 32 numbers per load in the order of instructions
    that join halves: of each 8 numbers the first 4, and then the others."""
    found = []
    for load in range(loads):
        both = [
            load_at(builder, after(builder, place, VECTOR_BYTES * load), _HALVES)
            for place in (one, other)
        ]
        for half in (0, 4):
            lanes = [
                8 * (lane // 8) + half + lane % 8 // 2 + lane % 2 * 2 * LANES
                for lane in range(2 * LANES)
            ]
            mask = ir.Constant(ir.VectorType(WORD, 2 * LANES), lanes)
            found.append(builder.bitcast(builder.shuffle_vector(*both, mask), WORDS))
    return found


def _in_turn(builder: Any, sums: list[Any]) -> list[Any]:
    """The sums of numbers in the order of _pairs(), in their own order."""
    found = []
    for first in range(0, len(sums), 2):
        for half in (0, LANES // 2):
            # Of each 8 numbers, the first 4 are in the first vector.
            numbers = range(half, half + LANES // 2)
            lanes = [
                LANES * (place // 4 % 2) + place // 8 * 4 + place % 4
                for number in numbers
                for place in (2 * number, 2 * number + 1)
            ]
            mask = ir.Constant(WORDS, lanes)
            found.append(builder.shuffle_vector(sums[first], sums[first + 1], mask))
    return found


def _no_sums(builder: Any, rows: int, units: int) -> list[list[Any]]:
    sums = [[cgutils.alloca_once(builder, NUMBERS) for _ in range(units)] for _ in range(rows)]
    for place in (each for row_sums in sums for each in row_sums):
        builder.store(ir.Constant(NUMBERS, [0.0] * LANES), place)
    return sums


def _add_products(
    builder: Any, factor: Any, values: list[Any], sums: list[Any], bf16: bool
) -> None:
    for value, place in zip(values, sums, strict=True):
        total = builder.load(place)
        if not bf16:
            total = _fused(builder, factor, value, total)
        elif _NATIVE:
            kind = ir.FunctionType(NUMBERS, [NUMBERS, WORDS, WORDS])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            total = builder.call(function, [total, factor, value])
        else:
            upper, low = each_word(0xFFFF0000), each_word(16)
            seconds = builder.and_(factor, upper), builder.and_(value, upper)
            total = _fused(builder, *seconds, total)
            total = _fused(builder, builder.shl(factor, low), builder.shl(value, low), total)
        builder.store(total, place)


def _fused(builder: Any, one: Any, other: Any, total: Any) -> Any:
    kind = ir.FunctionType(NUMBERS, [NUMBERS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(
        function, [builder.bitcast(one, NUMBERS), builder.bitcast(other, NUMBERS), total]
    )


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(ADDRESS, factor))


def _each(builder: Any, place: Any, step: Any, count: int) -> list[Any]:
    """`count` addresses, `step` bytes apart."""
    return [
        builder.add(place, builder.mul(step, ir.Constant(ADDRESS, number)))
        for number in range(count)
    ]


_BF16_SCORES_1, _BF16_SCORES_2, _BF16_SCORES_3, _BF16_SCORES_4 = (
    _scores_of(rows, True) for rows in (1, 2, 3, 4)
)
_FP32_SCORES_1, _FP32_SCORES_2, _FP32_SCORES_3, _FP32_SCORES_4 = (
    _scores_of(rows, False) for rows in (1, 2, 3, 4)
)
_BF16_SUMS_1, _BF16_SUMS_2, _BF16_SUMS_3, _BF16_SUMS_4 = (
    _sums_of(rows, UNITS, True) for rows in (1, 2, 3, 4)
)
_FP32_SUMS_1, _FP32_SUMS_2, _FP32_SUMS_3, _FP32_SUMS_4 = (
    _sums_of(rows, UNITS, False) for rows in (1, 2, 3, 4)
)
_BF16_FEW_SUMS, _FP32_FEW_SUMS = (_sums_of(ROWS, UNITS // 2, bf16) for bf16 in (True, False))


@inlined
def add_scores(
    rows: int, queries: int, words: int, columns: int, begin: int, end: int, totals: int, bf16: bool
) -> None:
    """See _scores_of()."""
    given = queries, words, columns, begin, end, totals
    if bf16:
        if rows == 1:
            _BF16_SCORES_1(*given)
        elif rows == 2:
            _BF16_SCORES_2(*given)
        elif rows == 3:
            _BF16_SCORES_3(*given)
        else:
            _BF16_SCORES_4(*given)
    elif rows == 1:
        _FP32_SCORES_1(*given)
    elif rows == 2:
        _FP32_SCORES_2(*given)
    elif rows == 3:
        _FP32_SCORES_3(*given)
    else:
        _FP32_SCORES_4(*given)


@inlined
def sum_values(
    rows: int,
    places: int,
    later: int,
    count: int,
    offset: int,
    step: int,
    weights: int,
    weight_step: int,
    sums: int,
    bf16: bool,
) -> None:
    """See _sums_of(), for UNITS units of numbers."""
    given = places, later, count, offset, step, weights, weight_step, sums
    if bf16:
        if rows == 1:
            _BF16_SUMS_1(*given)
        elif rows == 2:
            _BF16_SUMS_2(*given)
        elif rows == 3:
            _BF16_SUMS_3(*given)
        else:
            _BF16_SUMS_4(*given)
    elif rows == 1:
        _FP32_SUMS_1(*given)
    elif rows == 2:
        _FP32_SUMS_2(*given)
    elif rows == 3:
        _FP32_SUMS_3(*given)
    else:
        _FP32_SUMS_4(*given)


@inlined
def sum_few_values(
    places: int,
    later: int,
    count: int,
    offset: int,
    step: int,
    weights: int,
    weight_step: int,
    sums: int,
    bf16: bool,
) -> None:
    """The same for half as many numbers, and ROWS rows: weights of further rows may be anything."""
    if bf16:
        _BF16_FEW_SUMS(places, later, count, offset, step, weights, weight_step, sums)
    else:
        _FP32_FEW_SUMS(places, later, count, offset, step, weights, weight_step, sums)
