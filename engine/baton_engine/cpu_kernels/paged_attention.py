"""Compiled kernels for attention of few queries, with K and V in the blocks of the pool.

In: a task (see AttentionTask). Out: scores of keys, weights, weighted sums of V, or all of these.

torch's products need K and V as one matrix, and copying it out of the blocks takes as long as the
product. These kernels read the blocks. They add in the order of one of torch's products, which is
given as an Order, so that a query of one row gets the bits of the same query in a prompt (see
`paged_products` for how the order is found).

A task has X matrices of M rows or fewer: for example, the G query heads of each row and kv head.
Matrix x has a list of pages, and its rows see its keys [begin, end). Threads take the matrices in
turn.

A page is one block of one kv head. Of a pool of codes, K is decoded 16 keys at a time and V a split
at a time, into memory of the thread.

Shapes: X matrices, M rows of a matrix, P pages of a matrix, B block size, H head_dim, V numbers of
a head of v, L scores of a row, Q all rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from baton_engine.cpu_kernels.attention_task import Order, Part
from baton_engine.cpu_kernels.codes import load_row
from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import ONE, ZERO, number_at, store_numbers
from baton_engine.cpu_kernels.openmp import inlined, keep_until_here
from baton_engine.cpu_kernels.softmax import HIDDEN, joined, softmax_in_place, split_exponentials
from baton_engine.cpu_kernels.vectors import (
    add,
    broadcast,
    fma,
    interleaved,
    load,
    load_address,
    load_index,
    load_number,
    load_words,
    lower_halves,
    multiply,
    only_lanes,
    prefetch,
    rounded_to_bf16,
    store,
    store_address,
    store_number,
    store_transposed,
    subtract,
    take_next,
    upper_halves,
    zeros,
)

# Keys, or words of a key, that a kernel reads at a time.
UNIT = LANES
CACHE_LINE = 64
# Rows that are computed together, so that additions do not wait for each other.
ROWS = 4
# Outputs of a sum that are computed together: a cache line in bfloat16.
OUTPUTS = 32
# Inputs of an AMX instruction, in bfloat16.
TILE = 32
_PAIRS, _TILES = int(Order.PAIRS), int(Order.TILES)
_SCORES, _SOFTMAX, _NO_SUMS = int(Part.SCORES), int(Part.SOFTMAX), int(Part.NO_SUMS)
_SUMS, _OUTPUT, _SPLITS = int(Part.SUMS), int(Part.OUTPUT), int(Part.SPLITS)
# A row's state: the largest score and the sum of weights so far; the factors of the sums of earlier
# splits and of those of the next.
STATE_BYTES, TOTAL, DECAY, WEIGHT = 16, 4, 8, 12


def fp32_attention(pointer: Any) -> None:
    _compute(pointer, False, False)


def bf16_attention(pointer: Any) -> None:
    """Weights and the sums of splits are rounded to bfloat16."""
    _compute(pointer, True, False)


def fp32_attention_by_split(pointer: Any) -> None:
    """Parts NO_SUMS, SPLITS and OUTPUT."""
    _compute_by_split(pointer, False, False)


def bf16_attention_by_split(pointer: Any) -> None:
    _compute_by_split(pointer, True, False)


def fp32_attention_of_codes(pointer: Any) -> None:
    _compute(pointer, False, True)


def bf16_attention_of_codes(pointer: Any) -> None:
    _compute(pointer, True, True)


def fp32_attention_of_codes_by_split(pointer: Any) -> None:
    _compute_by_split(pointer, False, True)


def bf16_attention_of_codes_by_split(pointer: Any) -> None:
    _compute_by_split(pointer, True, True)


@inlined
def _compute(pointer: Any, bf16: bool, coded: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    memory = np.empty(_room(task, 0, bf16, coded)[-1], np.uint8)
    room = _room(task, memory.ctypes.data, bf16, coded)
    columns, queries, places, values, weights, decoded, _ = room
    x = take_next(pointer)
    while x < task.matrices:
        following = take_next(pointer)
        if task.parts & _SCORES:
            _score_matrix(task, x, following, columns, queries, decoded, bf16, coded)
        if task.parts & _SOFTMAX:
            for index in range(_height(task, x)):
                row = load_index(task.rows + 4 * (x * task.height + index))
                sink = load_number(task.sinks + 4 * row) if task.sinks else HIDDEN
                softmax_in_place(task.scores + 4 * row * task.row_scores, task.row_scores, sink)
        if task.parts & _NO_SUMS:
            _empty_sums(task, x)
        if task.parts & _SUMS:
            _sum_matrix(task, x, following, places, values, weights, decoded, bf16, coded)
        if task.parts & _OUTPUT:
            _write_output(task, x, bf16)
        x = following
    keep_until_here(memory)


@inlined
def _compute_by_split(pointer: Any, bf16: bool, coded: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    memory = np.empty(_room(task, 0, bf16, coded)[-1], np.uint8)
    room = _room(task, memory.ctypes.data, bf16, coded)
    columns, queries, places, values, weights, decoded, _ = room
    x = take_next(pointer)
    while x < task.matrices:
        following = take_next(pointer)
        if task.parts & _NO_SUMS:
            _empty_sums(task, x)
        _attend_matrix(
            task,
            x,
            following,
            columns,
            queries,
            places,
            values,
            weights,
            decoded,
            bf16,
            coded,
        )
        if task.parts & _OUTPUT:
            _write_output(task, x, bf16)
        x = following
    keep_until_here(memory)


@inlined
def _room(task: Any, place: int, bf16: bool, coded: bool) -> Any:
    """The memory of a thread from `place` on, in parts of whole cache lines: the words of 16 keys;
    the queries of a matrix; where its units of V are; values of a unit for 32 outputs; weights of
    four rows; of codes, decoded K of 16 keys, or V of a split. Returns where each part begins, and
    the size of all."""
    item = 2 if bf16 else 4
    columns = _whole_lines(place)
    queries = columns + item * task.dim * UNIT
    places = queries + 4 * task.height * task.dim
    values = places + _whole_lines(8 * task.width * task.block // UNIT)
    weights = values + item * OUTPUTS * UNIT
    decoded = _whole_lines(weights + 4 * ROWS * task.split)
    numbers = max(task.dim * UNIT, task.value_dim * task.split) if coded else 0
    size = CACHE_LINE + decoded + item * numbers - columns
    return columns, queries, places, values, weights, decoded, size


@inlined
def _whole_lines(size: Any) -> Any:
    return (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@inlined
def _height(task: Any, x: int) -> Any:
    """The number of rows of matrix x."""
    return load_index(task.heights + 4 * x)


@inlined
def _sees_page(task: Any, x: int, page: int) -> Any:
    """Whether the rows of matrix x see a key of a page."""
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    return begin < (page + 1) * task.block and page * task.block < end


@inlined
def _key_page(task: Any, x: int, page: int) -> Any:
    """The address of a page of K of matrix x."""
    block = load_index(task.blocks + 4 * (x * task.width + page))
    head = load_index(task.heads + 4 * x)
    return task.keys + block * task.key_block_bytes + head * task.key_head_bytes


@inlined
def _value_page(task: Any, x: int, page: int) -> Any:
    """The address of a page of V of matrix x."""
    block = load_index(task.blocks + 4 * (x * task.width + page))
    head = load_index(task.heads + 4 * x)
    return task.values + block * task.value_block_bytes + head * task.value_head_bytes


@inlined
def _key_exponents(task: Any, x: int, page: int) -> Any:
    """The address of the exponents of a page of K of matrix x."""
    block = load_index(task.blocks + 4 * (x * task.width + page))
    head = load_index(task.heads + 4 * x)
    place = block * task.exponent_block_bytes + head * task.exponent_head_bytes
    return task.key_exponents + place


@inlined
def _value_exponents(task: Any, x: int, page: int) -> Any:
    return _key_exponents(task, x, page) + (task.value_exponents - task.key_exponents)


@inlined
def _score_matrix(
    task: Any,
    x: int,
    following: int,
    columns: int,
    queries: int,
    decoded: int,
    bf16: bool,
    coded: bool,
) -> None:
    """`columns` has room for the words of 16 keys, `queries` for those of the matrix. The next
    matrix is `following`."""
    _widen_queries(task, x, queries, bf16)
    _score_pages(
        task,
        x,
        following,
        0,
        task.width,
        task.column,
        columns,
        queries,
        decoded,
        bf16,
        coded,
    )


@inlined
def _score_pages(
    task: Any,
    x: int,
    following: int,
    low: int,
    high: int,
    column: int,
    columns: int,
    queries: int,
    decoded: int,
    bf16: bool,
    coded: bool,
) -> None:
    """The scores of pages [low, high). Key 0 would have its scores in `column`."""
    row_bytes = task.key_slot_bytes
    page_bytes = task.block * row_bytes
    words, block = task.dim, task.scores_block
    if bf16:
        words, block = words // 2, block // 2
    rows, height = task.rows + 4 * x * task.height, _height(task, x)
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    for page in range(low, high):
        first = page * task.block
        place = _key_page(task, x, page)
        if page + 1 < task.width and _sees_page(task, x, page + 1):
            _prefetch_all(_key_page(task, x, page + 1), page_bytes)
        if task.parts & _SUMS:
            if first < task.split and _sees_page(task, x, page):
                _prefetch_all(_value_page(task, x, page), task.block * task.value_slot_bytes)
        elif (
            (end <= first + task.block and first < end)
            and following < task.matrices
            and _sees_page(task, following, 0)
        ):
            _prefetch_all(_key_page(task, following, 0), page_bytes)
        for unit in range(first, first + task.block, UNIT):
            seen = begin < unit + UNIT and unit < end
            if seen:
                source, step = place + (unit - first) * row_bytes, row_bytes
                if coded:
                    step = (2 if bf16 else 4) * task.dim
                    exponents = _key_exponents(task, x, page) + unit - first
                    for key in range(UNIT):
                        load_row(
                            source + key * row_bytes,
                            exponents + key,
                            decoded + key * step,
                            task.dim,
                            bf16,
                            task.fp8,
                        )
                    source = decoded
                for word in range(0, words, UNIT):
                    store_transposed(source + 4 * word, step, columns + CACHE_LINE * word)
            for index in range(0, height, ROWS):
                some = _rows(rows, index, height)
                targets = _places(task.scores + 4 * (column + unit), some, task.row_scores)
                if not seen:
                    for target in targets:
                        store(target, broadcast(HIDDEN))
                    continue
                wide = _places(queries, _indexes(index, height), task.dim)
                scores_of = _no_sums()
                for word in range(0, words, block):
                    stop = min(word + block, words)
                    if bf16:
                        parts = _bf16_scores(wide, columns, word, stop, task.scores_order)
                    else:
                        parts = _fp32_scores(wide, columns, word, stop)
                    scores_of = _both(scores_of, parts)
                for lane in range(ROWS):
                    scores = scores_of[lane]
                    if task.rounded:
                        near = rounded_to_bf16(scores)
                        scores = add(near, rounded_to_bf16(subtract(scores, near)))
                        scores = multiply(scores, broadcast(task.scale))
                    if begin > unit or end < unit + UNIT:
                        scores = only_lanes(scores, begin - unit, end - unit, HIDDEN)
                    store(targets[lane], scores)


@inlined
def _widen_queries(task: Any, x: int, target: int, bf16: bool) -> None:
    """Write the queries of matrix x in float32, with the scale unless the products get it."""
    factor = broadcast(ONE if task.rounded else task.scale)
    for index in range(_height(task, x)):
        row = load_index(task.rows + 4 * (x * task.height + index)) * task.dim
        for place in range(0, task.dim, UNIT):
            values = multiply(number_at(task.queries, row + place, bf16), factor)
            store(target + 4 * (index * task.dim + place), values)


@inlined
def _indexes(index: int, height: int) -> Any:
    """Four rows from `index` on. The last one stands for those that are missing."""
    last = height - 1
    return index, min(index + 1, last), min(index + 2, last), min(index + 3, last)


@inlined
def _empty_sums(task: Any, x: int) -> None:
    for index in range(_height(task, x)):
        row = load_index(task.rows + 4 * (x * task.height + index))
        for place in range(0, 4 * task.value_dim, CACHE_LINE):
            store(task.sums + 4 * row * task.value_dim + place, zeros())
        if task.states:
            store_number(task.states + STATE_BYTES * row, HIDDEN)
            store_number(task.states + STATE_BYTES * row + TOTAL, ZERO)


@inlined
def _write_output(task: Any, x: int, bf16: bool) -> None:
    for index in range(_height(task, x)):
        row = load_index(task.rows + 4 * (x * task.height + index))
        factor = broadcast(ONE)
        if task.states:
            factor = broadcast(ONE / load_number(task.states + STATE_BYTES * row + TOTAL))
        for place in range(row * task.value_dim, (row + 1) * task.value_dim, UNIT):
            sums = multiply(load(task.sums + 4 * place), factor)
            store_numbers(task.output, place, rounded_to_bf16(sums) if bf16 else sums, bf16)


@inlined
def _rows(rows: int, index: int, height: int) -> Any:
    """Which of all rows are those of _indexes()."""
    one, two, three, four = _indexes(index, height)
    return (
        load_index(rows + 4 * one),
        load_index(rows + 4 * two),
        load_index(rows + 4 * three),
        load_index(rows + 4 * four),
    )


@inlined
def _places(array: int, rows: Any, width: int) -> Any:
    """The addresses of four rows of a float32 array with `width` columns."""
    return (
        array + 4 * rows[0] * width,
        array + 4 * rows[1] * width,
        array + 4 * rows[2] * width,
        array + 4 * rows[3] * width,
    )


@inlined
def _no_sums() -> Any:
    return (zeros(), zeros(), zeros(), zeros())


@inlined
def _both(some: Any, others: Any) -> Any:
    """The sums of four pairs of vectors."""
    return (
        add(some[0], others[0]),
        add(some[1], others[1]),
        add(some[2], others[2]),
        add(some[3], others[3]),
    )


@inlined
def _more(factors: Any, place: int, values: Any, sums: Any) -> Any:
    """The sums of four rows with one more product each: of `values` and the row's factor, which is
    `place` bytes after the row's address in `factors`."""
    return (
        fma(_number(factors[0] + place), values, sums[0]),
        fma(_number(factors[1] + place), values, sums[1]),
        fma(_number(factors[2] + place), values, sums[2]),
        fma(_number(factors[3] + place), values, sums[3]),
    )


@inlined
def _fp32_scores(queries: Any, columns: int, first: int, end: int) -> Any:
    """Scores of words [first, end) of 16 keys for four queries."""
    sums = _no_sums()
    for word in range(first, end):
        sums = _more(queries, 4 * word, load(columns + CACHE_LINE * word), sums)
    return sums


@inlined
def _bf16_scores(queries: Any, columns: int, first: int, end: int, order: int) -> Any:
    """The same. A word has two numbers of a key."""
    sums = _no_sums()
    if order == _TILES:
        for tile in range(first, end, TILE // 2):
            even = odd = _no_sums()
            for word in range(tile, tile + TILE // 2):
                pair = load_words(columns + CACHE_LINE * word)
                even = _more(queries, 8 * word, lower_halves(pair), even)
                odd = _more(queries, 8 * word + 4, upper_halves(pair), odd)
            sums = _both(sums, _both(even, odd))
    elif order == _PAIRS:
        for word in range(first, end):
            pair = load_words(columns + CACHE_LINE * word)
            sums = _more(queries, 8 * word + 4, upper_halves(pair), sums)
            sums = _more(queries, 8 * word, lower_halves(pair), sums)
    else:
        for word in range(first, end):
            pair = load_words(columns + CACHE_LINE * word)
            sums = _more(queries, 8 * word, lower_halves(pair), sums)
            sums = _more(queries, 8 * word + 4, upper_halves(pair), sums)
    return sums


@inlined
def _number(place: int) -> Any:
    return broadcast(load_number(place))


@inlined
def _sum_matrix(
    task: Any,
    x: int,
    following: int,
    places: int,
    part: int,
    rounded: int,
    decoded: int,
    bf16: bool,
    coded: bool,
) -> None:
    """`places` has room for the address of each unit of 16 keys, `part` for the values of a unit
    for 32 outputs, `rounded` for the weights of a split of four rows, `decoded` for the values of a
    split. The next matrix is `following`."""
    units = task.split // UNIT
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    _find_units(task, x, task.value_slot_bytes, places)
    for first in range(0, task.width * task.block // UNIT, units):
        if begin < (first + units) * UNIT and first * UNIT < end:
            column = task.column + first * UNIT
            _sum_split(
                task,
                x,
                following,
                first,
                column,
                places,
                part,
                rounded,
                decoded,
                bf16,
                coded,
            )


@inlined
def _attend_matrix(
    task: Any,
    x: int,
    following: int,
    columns: int,
    queries: int,
    places: int,
    part: int,
    rounded: int,
    decoded: int,
    bf16: bool,
    coded: bool,
) -> None:
    """Scores, weights and sums of a matrix, one split after the other."""
    rows = task.rows + 4 * x * task.height
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    _widen_queries(task, x, queries, bf16)
    _find_units(task, x, task.value_slot_bytes, places)
    pages = task.split // task.block
    for page in range(0, task.width, pages):
        key = page * task.block
        if begin >= key + task.split or key >= end:
            continue
        stop = page + pages
        _score_pages(
            task,
            x,
            following,
            page,
            stop,
            -key,
            columns,
            queries,
            decoded,
            bf16,
            coded,
        )
        for index in range(_height(task, x)):
            row = load_index(rows + 4 * index)
            state = task.states + STATE_BYTES * row
            scores = task.scores + 4 * row * task.row_scores
            part_top, part_total = split_exponentials(scores, 0, task.split)
            top, total, decay, weight = joined(
                load_number(state), load_number(state + TOTAL), part_top, part_total
            )
            store_number(state, top)
            store_number(state + TOTAL, total)
            store_number(state + DECAY, decay)
            store_number(state + WEIGHT, weight)
        first = key // UNIT
        _sum_split(task, x, following, first, 0, places, part, rounded, decoded, bf16, coded)


@inlined
def _sum_split(
    task: Any,
    x: int,
    following: int,
    first: int,
    column: int,
    places: int,
    part: int,
    rounded: int,
    decoded: int,
    bf16: bool,
    coded: bool,
) -> None:
    """Add the sums of the split that begins with unit `first` and has its weights from `column` on.
    Of those keys that the matrix sees, [low_key, high_key) are in it."""
    item = 2 if bf16 else 4
    row_bytes = task.value_slot_bytes
    units = task.split // UNIT
    rows, height = task.rows + 4 * x * task.height, _height(task, x)
    low_key = load_index(task.seen + 8 * x) - first * UNIT
    high_key = load_index(task.seen + 8 * x + 4) - first * UNIT
    if coded:
        _decode_values(task, x, first, low_key, high_key, places, decoded, bf16)
    for index in range(0, height, ROWS):
        some = _rows(rows, index, height)
        weights = _places(task.scores + 4 * column, some, task.row_scores)
        if bf16:
            weights = _rounded_weights(weights, task.split, rounded)
        targets = _places(task.sums, some, task.value_dim)
        for output in range(0, task.value_dim, OUTPUTS):
            low = high = _no_sums()
            even = odd = (low, high)
            for number in range(units):
                unit = first + number
                if index == 0 and output == 0:
                    _prefetch_later(task, x, following, first, number, places)
                source, step = load_address(places + 8 * unit) + item * output, row_bytes
                least, most = low_key - number * UNIT, high_key - number * UNIT
                if coded:
                    step = item * task.value_dim
                    source = decoded + number * UNIT * step + item * output
                elif least > 0 or most < UNIT:
                    _copy_seen(source, step, part, item * OUTPUTS, least, most)
                    source, step = part, item * OUTPUTS
                place = 4 * UNIT * number
                if bf16:
                    low, high, even, odd = _bf16_unit(
                        source, step, weights, place, task.sums_order, low, high, even, odd
                    )
                    if task.sums_order == _TILES and number % 2:
                        low = _both(low, _both(even[0], odd[0]))
                        high = _both(high, _both(even[1], odd[1]))
                        even = odd = (_no_sums(), _no_sums())
                else:
                    low, high = _fp32_unit(source, step, weights, place, low, high)
            for lane in range(min(ROWS, height - index)):
                target = targets[lane] + 4 * output
                one, other = low[lane], high[lane]
                if bf16:
                    one, other = interleaved(rounded_to_bf16(one), rounded_to_bf16(other))
                before, further = load(target), load(target + 4 * UNIT)
                if task.parts & _SPLITS:
                    state = task.states + STATE_BYTES * some[lane]
                    decay, weight = _number(state + DECAY), _number(state + WEIGHT)
                    before, further = multiply(before, decay), multiply(further, decay)
                    one, other = multiply(one, weight), multiply(other, weight)
                store(target, add(before, one))
                store(target + 4 * UNIT, add(further, other))


@inlined
def _decode_values(
    task: Any, x: int, first: int, begin: int, end: int, places: int, target: int, bf16: bool
) -> None:
    """Write the values of the split that begins with unit `first` to `target`, and 0 for keys
    outside [begin, end), which may have no values."""
    row = (2 if bf16 else 4) * task.value_dim
    for number in range(task.split // UNIT):
        key = (first + number) * UNIT
        codes = load_address(places + 8 * (first + number))
        exponents = _value_exponents(task, x, key // task.block) + key % task.block
        for place in range(UNIT):
            if begin <= number * UNIT + place and number * UNIT + place < end:
                load_row(
                    codes + place * task.value_slot_bytes,
                    exponents + place,
                    target,
                    task.value_dim,
                    bf16,
                    task.fp8,
                )
            else:
                for column in range(0, row, CACHE_LINE):
                    store(target + column, zeros())
            target += row


@inlined
def _prefetch_later(
    task: Any, x: int, following: int, first: int, number: int, places: int
) -> None:
    """Prefetch unit `number` of the split behind the one that begins with unit `first`, or of the
    first split of the next matrix."""
    units, end = task.split // UNIT, load_index(task.seen + 8 * x + 4)
    if (first + units) * UNIT < end:
        unit = first + units + number
        if unit * UNIT < end:
            _prefetch_all(load_address(places + 8 * unit), UNIT * task.value_slot_bytes)
    elif following < task.matrices and number * UNIT % task.block == 0:
        page = number * UNIT // task.block
        if not _sees_page(task, following, page):
            return
        if task.parts & (_SCORES | _SPLITS):
            ahead = _key_page(task, following, page)
            _prefetch_all(ahead, task.block * task.key_slot_bytes)
        else:
            ahead = _value_page(task, following, page)
            _prefetch_all(ahead, task.block * task.value_slot_bytes)


@inlined
def _find_units(task: Any, x: int, row_bytes: int, places: int) -> None:
    """Write the address of each unit of 16 values of a matrix to `places`."""
    for page in range(task.width):
        address = _value_page(task, x, page)
        for number in range(task.block // UNIT):
            place = places + 8 * (page * (task.block // UNIT) + number)
            store_address(place, address + number * UNIT * row_bytes)


@inlined
def _prefetch_all(place: int, size: int) -> None:
    for line in range(0, size, CACHE_LINE):
        prefetch(place + line)


@inlined
def _rounded_weights(weights: Any, split: int, target: int) -> Any:
    """Copies of four rows of weights, rounded to bfloat16."""
    for lane in range(ROWS):
        for key in range(0, split, UNIT):
            values = load(weights[lane] + 4 * key)
            store(target + 4 * (lane * split + key), rounded_to_bf16(values))
    return _places(target, (0, 1, 2, 3), split)


@inlined
def _fp32_unit(source: int, step: int, weights: Any, place: int, low: Any, high: Any) -> Any:
    """The sums of the first and the last 16 of 32 outputs, with 16 more keys."""
    for key in range(UNIT):
        values = source + key * step
        low = _more(weights, place + 4 * key, load(values), low)
        high = _more(weights, place + 4 * key, load(values + CACHE_LINE), high)
    return low, high


@inlined
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


@inlined
def _bf16_key(weights: Any, place: int, values: Any, low: Any, high: Any) -> Any:
    return (
        _more(weights, place, lower_halves(values), low),
        _more(weights, place, upper_halves(values), high),
    )


@inlined
def _copy_seen(source: int, step: int, target: int, size: int, begin: int, end: int) -> None:
    """Copy `size` bytes of each of 16 keys, and 0 for keys outside [begin, end): memory that no
    token has written may hold NaN, which a weight of 0 does not remove."""
    for key in range(UNIT):
        for place in range(0, size, CACHE_LINE):
            values = zeros()
            if begin <= key and key < end:
                values = load(source + key * step + place)
            store(target + key * size + place, values)
