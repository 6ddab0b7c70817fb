"""Compiled kernels for attention of few queries, with K and V in the blocks of the pool.

In: a task (see AttentionTask). Out: scores of keys, weights, weighted sums of V, or all of these.

torch's products need K and V as one matrix, and copying it out of the blocks takes as long as the
product. These kernels read the blocks. They add in the order of one of torch's products, which is
given as an Order, so that a query of one row gets the bits of the same query in a prompt (see
`paged_products` for how the order is found).

A task has X matrices of M rows or fewer: for example, the G query heads of each row and kv head.
Matrix x has a list of pages, and its rows see its keys [begin, end). Threads take the matrices in
turn.

Scores and sums of float32, and of bfloat16 in the order PAIRS, are computed for as many keys, or
numbers of values, at a time as the CPU's adders hold (see `attention_products`). Other orders of
bfloat16 are computed for 16 keys and four rows at a time.

A page is one block of one kv head. Of a pool of codes, K is decoded 16 keys at a time and V a split
at a time, into memory of the thread.

Shapes: X matrices, M rows of a matrix, P pages of a matrix, B block size, H head_dim, V numbers of
a head of v, L scores of a row, Q all rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from baton_engine.cpu_kernels.attention_products import (
    ROWS,
    UNITS,
    add_scores,
    sum_few_values,
    sum_values,
)
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
    store_bf16,
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
# How many units of 16 keys ahead K and V are prefetched: computing with one takes less time than
# waiting for it. They are prefetched a few lines at a time, because a CPU that waits for as many
# lines as it can (24 on Zen 4 and 5) does nothing else.
AHEAD = 4
# Outputs of a sum that are computed together: a cache line in bfloat16.
OUTPUTS = 32
# Numbers of the scores or sums that are computed together, for four rows.
TOGETHER = ROWS * UNITS * LANES
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
    columns, queries, places, values, weights, decoded, sums, _ = room
    x = take_next(pointer)
    while x < task.matrices:
        following = take_next(pointer)
        if task.parts & _SCORES:
            _score_matrix(task, x, following, columns, queries, decoded, sums, bf16, coded)
        if task.parts & _SOFTMAX:
            for index in range(_height(task, x)):
                row = load_index(task.rows + 4 * (x * task.height + index))
                sink = load_number(task.sinks + 4 * row) if task.sinks else HIDDEN
                softmax_in_place(task.scores + 4 * row * task.row_scores, task.row_scores, sink)
        if task.parts & _NO_SUMS:
            _empty_sums(task, x)
        if task.parts & _SUMS:
            _sum_matrix(task, x, following, places, values, weights, decoded, sums, bf16, coded)
        if task.parts & _OUTPUT:
            _write_output(task, x, bf16)
        x = following
    keep_until_here(memory)


@inlined
def _compute_by_split(pointer: Any, bf16: bool, coded: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    memory = np.empty(_room(task, 0, bf16, coded)[-1], np.uint8)
    room = _room(task, memory.ctypes.data, bf16, coded)
    columns, queries, places, values, weights, decoded, sums, _ = room
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
            sums,
            bf16,
            coded,
        )
        if task.parts & _OUTPUT:
            _write_output(task, x, bf16)
        x = following
    keep_until_here(memory)


@inlined
def _room(task: Any, place: int, bf16: bool, coded: bool) -> Any:
    """The memory of a thread from `place` on, in parts of whole cache lines: the words of UNITS
    units of 16 keys; the queries of a matrix; where its units of V are; values of two units;
    weights of four rows; of codes, decoded K of 16 keys, or V of a split; scores or sums that are
    computed together, and where the units are that are prefetched for a split's. Returns where each
    part begins, and the size of all."""
    item = 2 if bf16 else 4
    columns = _whole_lines(place)
    queries = columns + UNITS * item * task.dim * UNIT
    places = queries + 4 * task.height * task.dim
    values = places + _whole_lines(8 * task.width * task.block // UNIT)
    weights = _whole_lines(values + 2 * task.value_slot_bytes * UNIT)
    decoded = _whole_lines(weights + 4 * ROWS * task.split)
    numbers = max(task.dim * UNIT, task.value_dim * task.split) if coded else 0
    sums = decoded + item * numbers
    size = CACHE_LINE + sums + 4 * TOGETHER + 8 * task.split // UNIT - columns
    return columns, queries, places, values, weights, decoded, sums, size


@inlined
def _whole_lines(size: Any) -> Any:
    return (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@inlined
def _height(task: Any, x: int) -> Any:
    """The number of rows of matrix x."""
    return load_index(task.heights + 4 * x)


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
    sums: int,
    bf16: bool,
    coded: bool,
) -> None:
    """`columns` has room for the words of some keys, `queries` for those of the matrix, `sums` for
    scores. The next matrix is `following`."""
    _read_queries(task, x, queries, bf16)
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
        sums,
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
    sums: int,
    bf16: bool,
    coded: bool,
) -> None:
    """The scores of pages [low, high). Key 0 would have its scores in `column`."""
    row_bytes = task.key_slot_bytes
    words = task.dim // 2 if bf16 else task.dim
    together = UNITS if _in_pairs(task, bf16) else 1
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    ready = 0  # units whose words are in `columns`; the last of them has been seen last
    for page in range(low, high):
        first = page * task.block
        place = _key_page(task, x, page)
        for unit in range(first, first + task.block, UNIT):
            if begin >= unit + UNIT or unit >= end:
                _hide_unit(task, x, column + unit)
                continue
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
            target = columns + ready * words * CACHE_LINE
            later = _later_unit(task, x, following, True, unit // UNIT)
            for word in range(0, words, UNIT):
                store_transposed(source + 4 * word, step, target + CACHE_LINE * word)
                if later != 0:
                    for key in range(UNIT):
                        prefetch(later + key * row_bytes + 4 * word)
            ready += 1
            if ready == together or unit + UNIT >= end or unit + UNIT >= high * task.block:
                some = unit - (ready - 1) * UNIT
                _score_units(task, x, some, ready, column, columns, queries, sums, bf16)
                ready = 0


@inlined
def _in_pairs(task: Any, bf16: bool) -> Any:
    """Whether scores are computed by add_scores(). The queries are bfloat16 then, if keys are."""
    return not bf16 or (task.scores_order == _PAIRS and task.rounded != 0)


@inlined
def _hide_unit(task: Any, x: int, column: int) -> None:
    for index in range(_height(task, x)):
        row = load_index(task.rows + 4 * (x * task.height + index))
        store(task.scores + 4 * (row * task.row_scores + column), broadcast(HIDDEN))


@inlined
def _score_units(
    task: Any,
    x: int,
    key: int,
    units: int,
    column: int,
    columns: int,
    queries: int,
    sums: int,
    bf16: bool,
) -> None:
    """The scores of some units from `key` on, whose words are in `columns`."""
    words, block = task.dim, task.scores_block
    if bf16:
        words, block = words // 2, block // 2
    height = _height(task, x)
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    for index in range(0, height, ROWS):
        count = min(ROWS, height - index)
        if _in_pairs(task, bf16):
            for place in range(sums, sums + count * UNITS * CACHE_LINE, CACHE_LINE):
                store(place, zeros())
            some = queries + 4 * index * words
            for word in range(0, words, block):
                stop = min(word + block, words)
                add_scores(count, some, words, columns, word, stop, sums, bf16)
        else:
            _scores_in_order(task, index, height, columns, queries, sums)
        for lane in range(count):
            row = load_index(task.rows + 4 * (x * task.height + index + lane))
            target = task.scores + 4 * (row * task.row_scores + column + key)
            for unit in range(units):
                scores = load(sums + CACHE_LINE * (UNITS * lane + unit))
                if task.rounded:
                    near = rounded_to_bf16(scores)
                    scores = add(near, rounded_to_bf16(subtract(scores, near)))
                    scores = multiply(scores, broadcast(task.scale))
                first = key + unit * UNIT
                if begin > first or end < first + UNIT:
                    scores = only_lanes(scores, begin - first, end - first, HIDDEN)
                store(target + CACHE_LINE * unit, scores)


@inlined
def _scores_in_order(
    task: Any, index: int, height: int, columns: int, queries: int, sums: int
) -> None:
    """The scores of a unit for four rows, in the orders of bfloat16 but PAIRS."""
    words, block = task.dim // 2, task.scores_block // 2
    wide = _places(queries, _indexes(index, height), task.dim)
    scores = _no_sums()
    for word in range(0, words, block):
        stop = min(word + block, words)
        scores = _both(scores, _bf16_scores(wide, columns, word, stop, task.scores_order))
    for lane in range(ROWS):
        store(sums + CACHE_LINE * UNITS * lane, scores[lane])


@inlined
def _read_queries(task: Any, x: int, target: int, bf16: bool) -> None:
    """Write the queries of matrix x as the products need them: in bfloat16 for pairs, else in
    float32, with the scale unless the products get it."""
    if bf16 and _in_pairs(task, bf16):
        for index in range(_height(task, x)):
            row = load_index(task.rows + 4 * (x * task.height + index)) * task.dim
            for place in range(0, task.dim, 2 * UNIT):
                values = load(task.queries + 2 * (row + place))
                store(target + 2 * (index * task.dim + place), values)
        return
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
def _bf16_scores(queries: Any, columns: int, first: int, end: int, order: int) -> Any:
    """Scores of words [first, end) of 16 keys for four queries. A word has two numbers of a
    key."""
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
    sums: int,
    bf16: bool,
    coded: bool,
) -> None:
    """`places` has room for the address of each unit of 16 keys, `part` for the values of two
    units, `rounded` for the weights of a split of four rows, `decoded` for the values of a split,
    `sums` for sums. The next matrix is `following`."""
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
                sums,
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
    sums: int,
    bf16: bool,
    coded: bool,
) -> None:
    """Scores, weights and sums of a matrix, one split after the other."""
    rows = task.rows + 4 * x * task.height
    begin, end = load_index(task.seen + 8 * x), load_index(task.seen + 8 * x + 4)
    _read_queries(task, x, queries, bf16)
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
            sums,
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
        _sum_split(task, x, following, first, 0, places, part, rounded, decoded, sums, bf16, coded)


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
    sums: int,
    bf16: bool,
    coded: bool,
) -> None:
    """Add the sums of the split that begins with unit `first` and has its weights from `column` on.
    Of those keys that the matrix sees, [low_key, high_key) are in it."""
    low_key = load_index(task.seen + 8 * x) - first * UNIT
    high_key = load_index(task.seen + 8 * x + 4) - first * UNIT
    if coded:
        _decode_values(task, x, first, low_key, high_key, places, decoded, bf16)
    for number in range(max(low_key, 0) // UNIT, -(-min(high_key, task.split) // UNIT)):
        later = _later_unit(task, x, following, False, first + number)
        store_address(sums + 4 * TOGETHER + 8 * number, later)
    if not bf16 or task.sums_order == _PAIRS:
        step = task.value_slot_bytes
        if coded:
            step = (2 if bf16 else 4) * task.value_dim
            for number in range(task.split // UNIT):
                store_address(places + 8 * (first + number), decoded + number * UNIT * step)
        else:
            _replace_parts(task, first, low_key, high_key, places, part, bf16)
        _add_sums(task, x, first, column, low_key, high_key, places, step, rounded, sums, bf16)
    else:
        source = decoded if coded else 0
        _add_in_order(task, x, first, column, low_key, high_key, places, part, rounded, source)


@inlined
def _replace_parts(
    task: Any, first: int, low_key: int, high_key: int, places: int, part: int, bf16: bool
) -> None:
    """Put copies in place of units of which the matrix sees a part, which may be the first and the
    last of the keys that it sees, without the keys that it does not see."""
    size, step = (2 if bf16 else 4) * task.value_dim, task.value_slot_bytes
    for number in range(max(low_key, 0) // UNIT, -(-min(high_key, task.split) // UNIT)):
        least, most = low_key - number * UNIT, high_key - number * UNIT
        if least > 0 or most < UNIT:
            copy = part if least > 0 else part + UNIT * step
            place = places + 8 * (first + number)
            _copy_seen(load_address(place), step, copy, step, size, least, most)
            store_address(place, copy)


@inlined
def _add_sums(
    task: Any,
    x: int,
    first: int,
    column: int,
    low_key: int,
    high_key: int,
    places: int,
    step: int,
    copied: int,
    sums: int,
    bf16: bool,
) -> None:
    """Add the sums of the units of a split of which the matrix sees a key. `copied` gets weights of
    four rows in the dtype of the values."""
    item = 2 if bf16 else 4
    height = _height(task, x)
    unit, last = max(low_key, 0) // UNIT, -(-min(high_key, task.split) // UNIT)
    here, weight_step = places + 8 * (first + unit), item * task.split
    for index in range(0, height, ROWS):
        count = min(ROWS, height - index)
        for lane in range(count):
            row = load_index(task.rows + 4 * (x * task.height + index + lane))
            weights = task.scores + 4 * (row * task.row_scores + column)
            for key in range(unit * UNIT, last * UNIT, UNIT):
                values = load(weights + 4 * key)
                if bf16:
                    store_bf16(copied + lane * weight_step + 2 * key, rounded_to_bf16(values))
                else:
                    store(copied + lane * weight_step + 4 * key, values)
        weights = copied + item * unit * UNIT
        # Once for all rows.
        later = sums + 4 * TOGETHER + 8 * unit if index == 0 else here
        for output in range(0, task.value_dim, UNITS * UNIT):
            numbers = min(UNITS * UNIT, task.value_dim - output)
            if numbers == UNITS * UNIT:
                sum_values(
                    count,
                    here,
                    later,
                    last - unit,
                    item * output,
                    step,
                    weights,
                    weight_step,
                    sums,
                    bf16,
                )
            else:
                sum_few_values(
                    here, later, last - unit, item * output, step, weights, weight_step, sums, bf16
                )
            for lane in range(count):
                row = load_index(task.rows + 4 * (x * task.height + index + lane))
                target = task.sums + 4 * (row * task.value_dim + output)
                for place in range(0, 4 * numbers, CACHE_LINE):
                    more = load(sums + CACHE_LINE * UNITS * lane + place)
                    _add_sum(task, row, target + place, rounded_to_bf16(more) if bf16 else more)


@inlined
def _add_sum(task: Any, row: int, target: int, more: Any) -> None:
    """Add a split's sums to those of earlier splits at `target`."""
    before = load(target)
    if task.parts & _SPLITS:
        state = task.states + STATE_BYTES * row
        before = multiply(before, _number(state + DECAY))
        more = multiply(more, _number(state + WEIGHT))
    store(target, add(before, more))


@inlined
def _add_in_order(
    task: Any,
    x: int,
    first: int,
    column: int,
    low_key: int,
    high_key: int,
    places: int,
    part: int,
    rounded: int,
    decoded: int,
) -> None:
    """The same in the orders of bfloat16 but PAIRS, of all keys of the split. `decoded` has the
    values of the split, if it is not 0."""
    rows, height = task.rows + 4 * x * task.height, _height(task, x)
    for index in range(0, height, ROWS):
        some = _rows(rows, index, height)
        weights = _places(task.scores + 4 * column, some, task.row_scores)
        weights = _rounded_weights(weights, task.split, rounded)
        targets = _places(task.sums, some, task.value_dim)
        for output in range(0, task.value_dim, OUTPUTS):
            low = high = _no_sums()
            even = odd = (low, high)
            for number in range(task.split // UNIT):
                unit = first + number
                source, step = load_address(places + 8 * unit) + 2 * output, task.value_slot_bytes
                least, most = low_key - number * UNIT, high_key - number * UNIT
                if decoded != 0:
                    step = 2 * task.value_dim
                    source = decoded + number * UNIT * step + 2 * output
                elif least > 0 or most < UNIT:
                    _copy_seen(source, step, part, 2 * OUTPUTS, 2 * OUTPUTS, least, most)
                    source, step = part, 2 * OUTPUTS
                place = 4 * UNIT * number
                low, high, even, odd = _bf16_unit(
                    source, step, weights, place, task.sums_order, low, high, even, odd
                )
                if task.sums_order == _TILES and number % 2:
                    low = _both(low, _both(even[0], odd[0]))
                    high = _both(high, _both(even[1], odd[1]))
                    even = odd = (_no_sums(), _no_sums())
            for lane in range(min(ROWS, height - index)):
                target = targets[lane] + 4 * output
                one, other = interleaved(rounded_to_bf16(low[lane]), rounded_to_bf16(high[lane]))
                _add_sum(task, some[lane], target, one)
                _add_sum(task, some[lane], target + 4 * UNIT, other)


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
def _later_unit(task: Any, x: int, following: int, keys: bool, unit: int) -> Any:
    """The address of the unit that is read AHEAD units after a unit of K, with `keys`, or of V; 0
    if there is none. Of those that matrix x sees, first K and then V are read, as far as the task
    computes with them, and then those of the next matrix."""
    low = load_index(task.seen + 8 * x) // UNIT
    count = -(-load_index(task.seen + 8 * x + 4) // UNIT) - low
    place = unit - low + AHEAD
    if keys and place >= count and task.parts & _SUMS:
        keys, place = False, place - count
    if place >= count:
        x, place = following, place - count
        if x >= task.matrices:
            return 0
        keys = task.parts & (_SCORES | _SPLITS) != 0
        low = load_index(task.seen + 8 * x) // UNIT
        if (low + place) * UNIT >= load_index(task.seen + 8 * x + 4):
            return 0
    page, within = (low + place) * UNIT // task.block, (low + place) * UNIT % task.block
    if keys:
        return _key_page(task, x, page) + within * task.key_slot_bytes
    return _value_page(task, x, page) + within * task.value_slot_bytes


@inlined
def _find_units(task: Any, x: int, row_bytes: int, places: int) -> None:
    """Write the address of each unit of 16 values of a matrix to `places`."""
    for page in range(task.width):
        address = _value_page(task, x, page)
        for number in range(task.block // UNIT):
            place = places + 8 * (page * (task.block // UNIT) + number)
            store_address(place, address + number * UNIT * row_bytes)


@inlined
def _rounded_weights(weights: Any, split: int, target: int) -> Any:
    """Copies of four rows of weights, rounded to bfloat16."""
    for lane in range(ROWS):
        for key in range(0, split, UNIT):
            values = load(weights[lane] + 4 * key)
            store(target + 4 * (lane * split + key), rounded_to_bf16(values))
    return _places(target, (0, 1, 2, 3), split)


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
    """The sums of 32 outputs, with 16 more keys: `low` and `high` are those of outputs at even and
    at odd places. With Order.TILES, those of keys at even and at odd places are apart in `even` and
    `odd`."""
    for key in range(0, UNIT, 2):
        first, second = load_words(source + key * step), load_words(source + (key + 1) * step)
        first_place, second_place = place + 4 * key, place + 4 * (key + 1)
        if order == _TILES:
            even = _bf16_key(weights, first_place, first, even[0], even[1])
            odd = _bf16_key(weights, second_place, second, odd[0], odd[1])
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
def _copy_seen(
    source: int, step: int, target: int, target_step: int, size: int, begin: int, end: int
) -> None:
    """Copy `size` bytes of each of 16 keys, and 0 for keys outside [begin, end): memory that no
    token has written may hold NaN, which a weight of 0 does not remove."""
    for key in range(UNIT):
        for place in range(0, size, CACHE_LINE):
            values = zeros()
            if begin <= key and key < end:
                values = load(source + key * step + place)
            store(target + key * target_step + place, values)
