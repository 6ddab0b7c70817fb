"""Compiled kernels that multiply queries and weights with K and V in the blocks of the pool.

In: a task (see TASK). Out: scores of keys, or weighted sums of V.

torch's products need K and V as one matrix, and copying it out of the blocks takes as long as the
product. These kernels read the blocks. They add in the order of one of torch's products, which is
given as an Order, so that a query of one row gets the bits of the same query in a prompt (see
`paged_products` for how the order is found).

A task has X matrices of M rows: for example, the G query heads of each row and kv head. Matrix x
has a list of pages, and its rows see its keys [begin, end). Threads take the matrices in turn.

Shapes: X matrices, M rows of a matrix, P pages of a matrix, B block size, H head_dim, L scores of a
row, Q all rows.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from baton_engine.attention.exact import vectors
from baton_engine.attention.exact.openmp import COUNTER, compiled
from baton_engine.attention.exact.vectors import (
    add,
    broadcast,
    fma,
    interleaved,
    load,
    load_index,
    load_number,
    load_words,
    lower_halves,
    multiply,
    only_lanes,
    prefetch,
    rounded_to_bf16,
    store,
    store_transposed,
    subtract,
    take_next,
    upper_halves,
    zeros,
)

# Keys, or words of a key, that a kernel reads at a time.
UNIT = vectors.LANES
CACHE_LINE = 64
# Rows that are computed together, so that additions do not wait for each other.
ROWS = 4
# Outputs of a sum that are computed together: a cache line in bfloat16.
OUTPUTS = 32
# Inputs of an AMX instruction, in bfloat16.
TILE = 32


class Order(enum.IntEnum):
    """In which order a product adds the inputs of an output."""

    IN_TURN = 0  # one by one
    PAIRS = 1  # two by two, the second before the first: AVX-512 BF16
    TILES = 2  # per 32 inputs, those at even and at odd places apart: AMX


_PAIRS, _TILES = int(Order.PAIRS), int(Order.TILES)

# The argument of a kernel. The addresses are of arrays: `pages` int32 [X, P], `rows` int32 [X, M]
# (which of the Q rows), `seen` int32 [X, 2] (begin, end), `queries` float32 [Q, H], `scores`
# float32 [Q, L], `out` float32 [Q, H]. Page p is at `pool` + p * `page_bytes`. Key 0 of a matrix
# has its scores in column `column`. `next` is the matrix that the next free thread takes. `order`
# is the Order of bfloat16 products; those of float32 add one by one.
TASK = np.dtype(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "height", "width", "block", "dim")),
        *((name, np.int64) for name in ("pages", "rows", "seen", "queries", "scores", "out")),
        *((name, np.int64) for name in ("pool", "page_bytes", "row_scores", "column", "split")),
        *((name, np.int64) for name in ("order", "rounded")),
        ("scale", np.float32),
    ],
    align=True,
)
_HIDDEN = np.float32(-np.inf)
_compiled = numba.njit(nogil=True, error_model="numpy")


@functools.cache
def kernel(function: Callable[[Any], None]) -> int:
    """The address of one of the kernels of this module."""
    return compiled(function, TASK)


def fp32_scores(pointer: Any) -> None:
    """Scores of all keys, and -inf for those that are not seen."""
    _score_matrices(pointer, False)


def bf16_scores(pointer: Any) -> None:
    """The same of bfloat16 keys. With `rounded`, products are rounded to bfloat16 twice (see
    cpu_bf16.wide_scores)."""
    _score_matrices(pointer, True)


def fp32_sums(pointer: Any) -> None:
    """Adds V times weight to `out`, one split of `split` keys after the other. The weights are in
    `scores`."""
    task = numba.carray(pointer, 1)[0]
    memory = _scratch(4 * OUTPUTS * UNIT)
    x = take_next(pointer)
    while x < task.matrices:
        _sum_matrix(task, x, _aligned(memory), 0, False)
        x = take_next(pointer)


def bf16_sums(pointer: Any) -> None:
    """The same of bfloat16 values. Weights and the sums of splits are rounded to bfloat16."""
    task = numba.carray(pointer, 1)[0]
    memory, weights = _scratch(2 * OUTPUTS * UNIT), _scratch(4 * ROWS * task.split)
    x = take_next(pointer)
    while x < task.matrices:
        _sum_matrix(task, x, _aligned(memory), _aligned(weights), True)
        x = take_next(pointer)


@_compiled
def _scratch(size: int) -> Any:
    return np.empty(size + CACHE_LINE, np.uint8)


@_compiled
def _aligned(memory: Any) -> int:
    place: int = memory.ctypes.data
    return (place + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@_compiled
def _score_matrices(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    memory = _scratch((2 if bf16 else 4) * task.dim * UNIT)
    x = take_next(pointer)
    while x < task.matrices:
        _score_matrix(task, x, _aligned(memory), bf16)
        x = take_next(pointer)


@_compiled
def _score_matrix(task: Any, x: int, columns: int, bf16: bool) -> None:
    """`columns` has room for the words of 16 keys."""
    row_bytes = task.dim * (2 if bf16 else 4)
    words = row_bytes // 4
    pages, rows = task.pages + 4 * x * task.width, task.rows + 4 * x * task.height
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    for page in range(task.width):
        first = page * task.block
        place = task.pool + load_index(pages + 4 * page) * task.page_bytes
        if page + 1 < task.width and first + task.block < end:
            ahead = task.pool + load_index(pages + 4 * (page + 1)) * task.page_bytes
            _prefetch_all(ahead, task.block * row_bytes)
        elif first < end and x + 1 < task.matrices:
            ahead = task.pool + load_index(pages + 4 * task.width) * task.page_bytes
            _prefetch_all(ahead, task.block * row_bytes)
        for unit in range(first, first + task.block, UNIT):
            seen = begin < unit + UNIT and unit < end
            if seen:
                for word in range(0, words, UNIT):
                    source = place + (unit - first) * row_bytes + 4 * word
                    store_transposed(source, row_bytes, columns + CACHE_LINE * word)
            for index in range(0, task.height, ROWS):
                some = _rows(rows, index, task.height)
                queries = _places(task.queries, some, task.dim)
                targets = _places(task.scores + 4 * (task.column + unit), some, task.row_scores)
                if not seen:
                    for target in targets:
                        store(target, broadcast(_HIDDEN))
                    continue
                if bf16:
                    found = _bf16_scores(queries, columns, words, task.order)
                else:
                    found = _fp32_scores(queries, columns, words)
                for lane in range(ROWS):
                    scores = found[lane]
                    if task.rounded:
                        near = rounded_to_bf16(scores)
                        scores = add(near, rounded_to_bf16(subtract(scores, near)))
                        scores = multiply(scores, broadcast(task.scale))
                    if begin > unit or end < unit + UNIT:
                        scores = only_lanes(scores, begin - unit, end - unit, _HIDDEN)
                    store(targets[lane], scores)


@_compiled
def _rows(rows: int, index: int, height: int) -> Any:
    """Four rows of a matrix from `index` on. The last one stands for those that are missing."""
    last = height - 1
    return (
        load_index(rows + 4 * index),
        load_index(rows + 4 * min(index + 1, last)),
        load_index(rows + 4 * min(index + 2, last)),
        load_index(rows + 4 * min(index + 3, last)),
    )


@_compiled
def _places(array: int, rows: Any, width: int) -> Any:
    """The addresses of four rows of a float32 array with `width` columns."""
    return (
        array + 4 * rows[0] * width,
        array + 4 * rows[1] * width,
        array + 4 * rows[2] * width,
        array + 4 * rows[3] * width,
    )


@_compiled
def _no_sums() -> Any:
    return (zeros(), zeros(), zeros(), zeros())


@_compiled
def _both(some: Any, others: Any) -> Any:
    """The sums of four pairs of vectors."""
    return (
        add(some[0], others[0]),
        add(some[1], others[1]),
        add(some[2], others[2]),
        add(some[3], others[3]),
    )


@_compiled
def _more(factors: Any, place: int, values: Any, sums: Any) -> Any:
    """The sums of four rows with one more product each: of `values` and the row's factor, which is
    `place` bytes after the row's address in `factors`."""
    return (
        fma(_number(factors[0] + place), values, sums[0]),
        fma(_number(factors[1] + place), values, sums[1]),
        fma(_number(factors[2] + place), values, sums[2]),
        fma(_number(factors[3] + place), values, sums[3]),
    )


@_compiled
def _fp32_scores(queries: Any, columns: int, words: int) -> Any:
    """Scores of 16 keys for four queries."""
    sums = _no_sums()
    for word in range(words):
        sums = _more(queries, 4 * word, load(columns + CACHE_LINE * word), sums)
    return sums


@_compiled
def _bf16_scores(queries: Any, columns: int, words: int, order: int) -> Any:
    """The same. A word has two numbers of a key."""
    sums = _no_sums()
    if order == _TILES:
        for tile in range(0, words, TILE // 2):
            even = odd = _no_sums()
            for word in range(tile, tile + TILE // 2):
                pair = load_words(columns + CACHE_LINE * word)
                even = _more(queries, 8 * word, lower_halves(pair), even)
                odd = _more(queries, 8 * word + 4, upper_halves(pair), odd)
            sums = _both(sums, _both(even, odd))
    elif order == _PAIRS:
        for word in range(words):
            pair = load_words(columns + CACHE_LINE * word)
            sums = _more(queries, 8 * word + 4, upper_halves(pair), sums)
            sums = _more(queries, 8 * word, lower_halves(pair), sums)
    else:
        for word in range(words):
            pair = load_words(columns + CACHE_LINE * word)
            sums = _more(queries, 8 * word, lower_halves(pair), sums)
            sums = _more(queries, 8 * word + 4, upper_halves(pair), sums)
    return sums


@_compiled
def _number(place: int) -> Any:
    return broadcast(load_number(place))


@_compiled
def _sum_matrix(task: Any, x: int, part: int, rounded: int, bf16: bool) -> None:
    """`part` has room for the values of a unit for 32 outputs, `rounded` for the weights of a split
    of four rows."""
    item = 2 if bf16 else 4
    row_bytes = task.dim * item
    units = task.split // UNIT
    rows = task.rows + 4 * x * task.height
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    places = _unit_places(task, x, row_bytes)
    for first in range(0, len(places), units):
        low_key, high_key = begin - first * UNIT, end - first * UNIT  # that are seen in this split
        if high_key <= 0 or low_key >= task.split:
            continue
        for index in range(0, task.height, ROWS):
            some = _rows(rows, index, task.height)
            column = task.column + first * UNIT
            weights = _places(task.scores + 4 * column, some, task.row_scores)
            if bf16:
                weights = _rounded_weights(weights, task.split, rounded)
            outputs = _places(task.out, some, task.dim)
            for output in range(0, task.dim, OUTPUTS):
                low = high = _no_sums()
                even = odd = (low, high)
                for number in range(units):
                    unit = first + number
                    if index == 0 and output == 0:
                        if (first + units) * UNIT < end:
                            _prefetch_all(places[unit + units], UNIT * row_bytes)
                        elif x + 1 < task.matrices and number * UNIT % task.block == 0:
                            place = number * UNIT // task.block + (x + 1) * task.width
                            page = task.pool + load_index(task.pages + 4 * place) * task.page_bytes
                            _prefetch_all(page, task.block * row_bytes)
                    source, step = places[unit] + item * output, row_bytes
                    least, most = low_key - number * UNIT, high_key - number * UNIT
                    if least > 0 or most < UNIT:
                        _copy_seen(source, step, part, item * OUTPUTS, least, most)
                        source, step = part, item * OUTPUTS
                    place = 4 * UNIT * number
                    if bf16:
                        low, high, even, odd = _bf16_unit(
                            source, step, weights, place, task.order, low, high, even, odd
                        )
                        if task.order == _TILES and number % 2:
                            low = _both(low, _both(even[0], odd[0]))
                            high = _both(high, _both(even[1], odd[1]))
                            even = odd = (_no_sums(), _no_sums())
                    else:
                        low, high = _fp32_unit(source, step, weights, place, low, high)
                for lane in range(min(ROWS, task.height - index)):
                    target = outputs[lane] + 4 * output
                    one, other = low[lane], high[lane]
                    if bf16:
                        one, other = interleaved(rounded_to_bf16(one), rounded_to_bf16(other))
                    store(target, add(load(target), one))
                    store(target + 4 * UNIT, add(load(target + 4 * UNIT), other))


@_compiled
def _unit_places(task: Any, x: int, row_bytes: int) -> Any:
    """Where the values of each unit of 16 keys of a matrix are."""
    each = task.block // UNIT
    places = np.empty(task.width * each, np.int64)
    for page in range(task.width):
        index = load_index(task.pages + 4 * (x * task.width + page))
        for number in range(each):
            offset = index * task.page_bytes + number * UNIT * row_bytes
            places[page * each + number] = task.pool + offset
    return places


@_compiled
def _prefetch_all(place: int, size: int) -> None:
    for line in range(0, size, CACHE_LINE):
        prefetch(place + line)


@_compiled
def _rounded_weights(weights: Any, split: int, target: int) -> Any:
    """Copies of four rows of weights, rounded to bfloat16."""
    for lane in range(ROWS):
        for key in range(0, split, UNIT):
            values = load(weights[lane] + 4 * key)
            store(target + 4 * (lane * split + key), rounded_to_bf16(values))
    return _places(target, (0, 1, 2, 3), split)


@_compiled
def _fp32_unit(source: int, step: int, weights: Any, place: int, low: Any, high: Any) -> Any:
    """The sums of the first and the last 16 of 32 outputs, with 16 more keys."""
    for key in range(UNIT):
        values = source + key * step
        low = _more(weights, place + 4 * key, load(values), low)
        high = _more(weights, place + 4 * key, load(values + CACHE_LINE), high)
    return low, high


@_compiled
def _bf16_unit(
    source: int,
    step: int,
    weights: Any,
    place: int,
    order: int,
    low: Any,
    high: Any,
    even: Any,
    odd: Any,
) -> Any:
    """The same; `low` and `high` are the sums of outputs at even and at odd places. With
    Order.TILES, those of keys at even and at odd places are apart in `even` and `odd`."""
    for key in range(0, UNIT, 2):
        first, second = load_words(source + key * step), load_words(source + (key + 1) * step)
        first_place, second_place = place + 4 * key, place + 4 * (key + 1)
        if order == _TILES:
            even = _bf16_key(weights, first_place, first, even[0], even[1])
            odd = _bf16_key(weights, second_place, second, odd[0], odd[1])
        elif order == _PAIRS:
            low, high = _bf16_key(weights, second_place, second, low, high)
            low, high = _bf16_key(weights, first_place, first, low, high)
        else:
            low, high = _bf16_key(weights, first_place, first, low, high)
            low, high = _bf16_key(weights, second_place, second, low, high)
    return low, high, even, odd


@_compiled
def _bf16_key(weights: Any, place: int, values: Any, low: Any, high: Any) -> Any:
    return (
        _more(weights, place, lower_halves(values), low),
        _more(weights, place, upper_halves(values), high),
    )


@_compiled
def _copy_seen(source: int, step: int, target: int, size: int, begin: int, end: int) -> None:
    """Copy `size` bytes of each of 16 keys, and 0 for keys outside [begin, end): memory that no
    token has written may hold NaN, which a weight of 0 does not remove."""
    for key in range(UNIT):
        for place in range(0, size, CACHE_LINE):
            values = zeros()
            if begin <= key and key < end:
                values = load(source + key * step + place)
            store(target + key * size + place, values)
