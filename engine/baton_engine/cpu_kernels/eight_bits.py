"""Compiled rounding of rows to 8-bit codes and a power of two, and back. Twin of `kv.eight_bits`,
whose codes of int8 these are, bit for bit.

In: pieces of memory, each of some rows of numbers, with the codes and the exponents of these rows.
Out: the codes and exponents, or the numbers, or each row rounded in place.

Shapes: N pieces, H numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import number_at, store_numbers
from baton_engine.cpu_kernels.openmp import (
    COUNTER,
    NONE_TAKEN,
    Task,
    expanded,
    inlined,
    run_here,
    run_kernel,
    task_class,
)
from baton_engine.cpu_kernels.vectors import (
    add,
    broadcast,
    each_power_of_2,
    fma,
    larger,
    larger_words,
    largest_bf16,
    largest_word,
    load_address,
    load_byte,
    load_int8,
    load_int8_pairs,
    load_words,
    lower_halves,
    magnitudes,
    multiply,
    nearest_integer,
    power_of_2,
    prefetch,
    smaller,
    store_bf16_pairs,
    store_byte,
    store_int8,
    store_low_bytes,
    store_low_bytes_of_pairs,
    take_next,
    upper_halves,
    zeros,
)
from baton_engine.kv.eight_bits import (
    CODE_BITS,
    LARGEST_INT8,
    LOWEST_EXPONENT,
    NOT_FINITE,
    rounded,
)

# A piece: the addresses of its numbers, codes and exponents, the number of rows, and H.
Pieces = npt.NDArray[np.int64]  # [N, 5]
PIECE_BYTES = 5 * 8
# Rows of a tensor that a thread takes at a time.
SOME_ROWS = 64
# A row is prefetched while the row this number before it is encoded.
ROWS_AHEAD = 16
LINE_BYTES = 64
_Pieces = task_class([COUNTER, ("count", np.int64), ("pieces", np.int64)])
_FRACTION = 0x7FFFFF
# A number of 255 / 256 of the next power of two or more: its code may be rounded to 128.
_MAY_BE_128 = 0x7F0000
_NAN = np.float32(np.nan)
_INFINITY = 0x7F800000  # the bits of a float32, of which the exponent are those from 23 on
# The stored exponent of a float32 is this much more than that of its row's codes.
_MORE = 126 + CODE_BITS[torch.int8]
_MOST = np.float32(LARGEST_INT8)
# A float32 near it has no bits after the point, and the lowest byte of its bits is the difference.
_WHOLE = np.float32(1.5 * 2**23)


def can_encode(dtype: torch.dtype, size: int) -> bool:
    """Whether there are kernels for rows of `size` numbers of this dtype: they compute whole
    vectors."""
    return dtype in (torch.float32, torch.bfloat16) and size % LANES == 0


def encode_pieces(pieces_N5: Pieces, dtype: torch.dtype) -> None:
    """Store the codes and exponents of each piece, on the calling thread."""
    function = bf16_encode if dtype == torch.bfloat16 else fp32_encode
    run_here(function, _task_of(pieces_N5))


def decode_pieces(pieces_N5: Pieces, dtype: torch.dtype) -> None:
    """Store the numbers of each piece from its codes and exponents, on the calling thread."""
    function = bf16_decode if dtype == torch.bfloat16 else fp32_decode
    run_here(function, _task_of(pieces_N5))


def encode_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """eight_bits.encoded() in int8, on torch's threads, for contiguous rows that can_encode()
    supports."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    exponents = torch.empty((*x.shape[:-1], 1), dtype=torch.int8)
    _run(bf16_encode if x.dtype == torch.bfloat16 else fp32_encode, x, codes, exponents)
    return codes, exponents


def decode_rows(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """eight_bits.decoded() of int8, on torch's threads, for contiguous codes."""
    x = torch.empty(codes.shape, dtype=dtype)
    _run(bf16_decode if dtype == torch.bfloat16 else fp32_decode, x, codes, exponents)
    return x


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """eight_bits.rounded() in int8, a new contiguous tensor: on a CPU by a kernel, on torch's
    threads, if there is one."""
    if x.device.type != "cpu" or not can_encode(x.dtype, x.shape[-1]):
        return rounded(x).contiguous()
    y = x.clone(memory_format=torch.contiguous_format)
    _run(bf16_round if x.dtype == torch.bfloat16 else fp32_round, y, None, None)
    return y


def _run(
    function: Callable[[Any], None],
    x: torch.Tensor,
    codes: torch.Tensor | None,
    exponents: torch.Tensor | None,
) -> None:
    assert x.is_contiguous(), "rows are apart"
    size = x.shape[-1]
    rows = x.numel() // size
    first_N = np.arange(0, rows, SOME_ROWS)
    pieces_N5 = np.empty((len(first_N), 5), np.int64)
    pieces_N5[:, 0] = x.data_ptr() + first_N * (size * x.element_size())
    pieces_N5[:, 1] = 0 if codes is None else codes.data_ptr() + first_N * size
    pieces_N5[:, 2] = 0 if exponents is None else exponents.data_ptr() + first_N
    pieces_N5[:, 3] = np.minimum(SOME_ROWS, rows - first_N)
    pieces_N5[:, 4] = size
    run_kernel(function, _task_of(pieces_N5))


def _task_of(pieces_N5: Pieces) -> Task:
    """The task of a kernel. It holds no reference to the pieces."""
    assert pieces_N5.flags.c_contiguous, "pieces are apart"
    task: Task = _Pieces(NONE_TAKEN, len(pieces_N5), pieces_N5.ctypes.data)
    return task


def fp32_encode(pointer: Any) -> None:
    _encode_rows(pointer, False)


def bf16_encode(pointer: Any) -> None:
    _encode_rows(pointer, True)


def fp32_decode(pointer: Any) -> None:
    _decode_rows(pointer, False)


def bf16_decode(pointer: Any) -> None:
    _decode_rows(pointer, True)


def fp32_round(pointer: Any) -> None:
    _round_rows(pointer, False)


def bf16_round(pointer: Any) -> None:
    _round_rows(pointer, True)


@inlined
def _encode_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    item = 2 if bf16 else 4
    number = take_next(pointer)
    while number < task.count:
        piece = task.pieces + number * PIECE_BYTES
        numbers, codes = load_address(piece), load_address(piece + 8)
        exponents, rows = load_address(piece + 16), load_address(piece + 24)
        size = load_address(piece + 32)
        for row in range(rows):
            for line in range(0, size * item, LINE_BYTES):
                prefetch(numbers + (row + ROWS_AHEAD) * size * item + line)
            exponent = encode_row(numbers + row * size * item, codes + row * size, size, bf16)
            store_byte(exponents + row, exponent)
        number = take_next(pointer)


@inlined
def _decode_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    item = 2 if bf16 else 4
    number = take_next(pointer)
    while number < task.count:
        piece = task.pieces + number * PIECE_BYTES
        numbers, codes = load_address(piece), load_address(piece + 8)
        exponents, rows = load_address(piece + 16), load_address(piece + 24)
        size = load_address(piece + 32)
        for row in range(rows):
            exponent = load_byte(exponents + row)
            decode_row(codes + row * size, exponent, numbers + row * size * item, size, bf16)
        number = take_next(pointer)


@inlined
def _round_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    item = 2 if bf16 else 4
    number = take_next(pointer)
    while number < task.count:
        piece = task.pieces + number * PIECE_BYTES
        numbers, rows = load_address(piece), load_address(piece + 24)
        size = load_address(piece + 32)
        for row in range(rows):
            place = numbers + row * size * item
            round_row(place, place, size, bf16)
        number = take_next(pointer)


@expanded
def encode_row(source: int, codes: int, size: int, bf16: bool) -> int:
    """Store the codes of a row, and return its exponent."""
    largest: int = largest_number(source, size, bf16)
    exponent: int = exponent_of(largest)
    if exponent == NOT_FINITE:
        for column in range(0, size, LANES):
            store_int8(codes + column, zeros())
    elif largest & _FRACTION >= _MAY_BE_128:
        _store_codes(source, codes, size, exponent, bf16, True)
    else:
        _store_codes(source, codes, size, exponent, bf16, False)
    return exponent


@expanded
def _store_codes(
    source: int, codes: int, size: int, exponent: int, bf16: bool, limited: bool
) -> None:
    inverse = each_power_of_2(-exponent)
    pairs = size // (2 * LANES) * (2 * LANES) if bf16 else 0
    for column in range(0, pairs, 2 * LANES):
        words = load_words(source + 2 * column)
        evens = _low_codes(lower_halves(words), inverse, limited)
        odds = _low_codes(upper_halves(words), inverse, limited)
        store_low_bytes_of_pairs(codes + column, evens, odds)
    for column in range(pairs, size, LANES):
        numbers = number_at(source, column, bf16)
        store_low_bytes(codes + column, _low_codes(numbers, inverse, limited))


@expanded
def _low_codes(numbers: Any, inverse: Any, limited: bool) -> Any:
    """Float32 numbers whose lowest bytes are the codes. With `limited`, those from -127 to 127."""
    sums = fma(numbers, inverse, broadcast(_WHOLE))
    if limited:
        sums = larger(smaller(sums, broadcast(_WHOLE + _MOST)), broadcast(_WHOLE - _MOST))
    return sums


@expanded
def decode_row(codes: int, exponent: int, target: int, size: int, bf16: bool) -> None:
    """Store the numbers of a row of codes."""
    if exponent == NOT_FINITE:
        _store_nan(target, size, bf16)
    else:
        scale = power_of_2(broadcast(np.float32(exponent)))
        pairs = size // (2 * LANES) * (2 * LANES) if bf16 else 0
        for column in range(0, pairs, 2 * LANES):
            evens, odds = load_int8_pairs(codes + column)
            store_bf16_pairs(target + 2 * column, multiply(evens, scale), multiply(odds, scale))
        for column in range(pairs, size, LANES):
            store_numbers(target, column, multiply(load_int8(codes + column), scale), bf16)


@inlined
def round_row(source: int, target: int, size: int, bf16: bool) -> None:
    """Store the numbers that a row becomes when it is encoded and decoded. The two may be the
    same."""
    exponent = row_exponent(source, size, bf16)
    if exponent == NOT_FINITE:
        _store_nan(target, size, bf16)
    else:
        inverse = power_of_2(broadcast(np.float32(-exponent)))
        scale = power_of_2(broadcast(np.float32(exponent)))
        for column in range(0, size, LANES):
            codes = _codes(number_at(source, column, bf16), inverse)
            # A code has no sign if it is 0, and -0.0 + 0.0 is 0.0.
            store_numbers(target, column, add(multiply(codes, scale), zeros()), bf16)


@inlined
def row_exponent(source: int, size: int, bf16: bool) -> int:
    """The exponent of a row of numbers: NOT_FINITE if one of them is infinite or NaN."""
    exponent: int = exponent_of(largest_number(source, size, bf16))
    return exponent


@inlined
def largest_number(source: int, size: int, bf16: bool) -> int:
    """The bits of the largest of the absolute numbers of a row."""
    largest: int = 0
    if bf16:
        largest = largest_bf16(source, size)
    else:
        most = magnitudes(zeros())
        for column in range(0, size, LANES):
            most = larger_words(most, magnitudes(number_at(source, column, bf16)))
        largest = largest_word(most)
    return largest


@inlined
def exponent_of(largest: int) -> int:
    """The exponent of a row whose largest_number() this is."""
    if largest >= _INFINITY:
        return NOT_FINITE
    return max((largest >> 23) - _MORE, LOWEST_EXPONENT)


@inlined
def _codes(numbers: Any, inverse: Any) -> Any:
    """The codes of 16 numbers as float32, from 2 to the power of minus the row's exponent."""
    nearest = nearest_integer(multiply(numbers, inverse))
    return larger(smaller(nearest, broadcast(_MOST)), broadcast(-_MOST))


@inlined
def _store_nan(target: int, size: int, bf16: bool) -> None:
    for column in range(0, size, LANES):
        store_numbers(target, column, broadcast(_NAN), bf16)
