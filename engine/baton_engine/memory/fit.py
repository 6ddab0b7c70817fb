"""Whether an engine fits its device, and how many KV blocks do.

In: a MemoryDemand and a MemoryBudget (see `demand`). Out: bytes, blocks, yes or no. Pure: the
numbers are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton_engine.memory.demand import MemoryBudget, MemoryDemand
from baton_engine.memory.estimate import (
    blocks_for,
    blocks_in,
    fixed_bytes,
    pool_bytes,
)

# Without --max-model-len: the shortest useful limit of a sequence, in tokens.
LEAST_LEN = 256


def fits(demand: MemoryDemand, room: MemoryBudget) -> bool:
    """Whether weights, the largest step, graphs and the minimum KV fit."""
    return needed_bytes(demand) <= room.limit


def needed_bytes(demand: MemoryDemand) -> int:
    """Minimum bytes of the engine: with the given pool, or with a pool for one sequence."""
    length = least_length(demand)
    return fixed_bytes(demand, length) + pool_bytes(demand, least_blocks(demand))


def least_length(demand: MemoryDemand) -> int:
    """Number of tokens of one sequence that must fit."""
    if demand.max_model_len is not None:
        return demand.max_model_len
    length = min(demand.config.max_positions, LEAST_LEN)
    if demand.pool_blocks is not None:
        length = min(length, demand.layout.tokens_in(demand.pool_blocks))
    return length


def free_blocks(demand: MemoryDemand, room: MemoryBudget) -> int:
    """Number of usable blocks of the largest pool that fits, for a demand that fits. Without a
    `max_model_len`, the estimate of a step uses the longest sequence that this pool can hold."""
    length = demand.max_model_len
    if length is None:
        size, longest = demand.layout.block_size, demand.config.max_positions
        most = -(-longest // size)
        held = most_that(
            lambda spans: fits(replace(demand, max_model_len=min(longest, spans * size)), room),
            *(0, most),
        )
        if held < most:
            return held * demand.layout.num_groups
        length = longest
    return blocks_in(demand, room.limit - fixed_bytes(demand, length))


def most_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] for which `holds` is true, or `low` if there is none.
    `holds` must be monotonic: true for all smaller numbers, too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def least_blocks(demand: MemoryDemand) -> int:
    """Blocks of the given pool, or of a pool for one sequence."""
    given = demand.pool_blocks
    return blocks_for(demand, least_length(demand)) if given is None else given
