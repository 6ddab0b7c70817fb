"""Check whether an engine fits its device, and suggest changes if it does not.

In: a Demand and a MemoryBudget (see `estimate`). Out: the number of KV blocks that fit, or a
SettingsError with the numbers and with changes, each of which is enough on its own. Pure: the
numbers are read elsewhere. Each suggestion is checked here before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from baton_engine.errors import SettingsError
from baton_engine.memory.estimate import (
    GIB,
    SPARE_BYTES,
    Demand,
    MemoryBudget,
    activation_bytes,
    blocks_for,
    fixed_bytes,
    graph_bytes,
    pool_bytes,
    resident_bytes,
)

# Without --max-model-len: the shortest useful limit of a sequence, in tokens.
LEAST_LEN = 256
MIB = 1 << 20
STEP_TOKENS = 16  # a suggested --max-batched-tokens is a multiple of it
MOST_SHARE = 98  # percent: a suggested --gpu-memory-utilization leaves some memory to the driver


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that is enough: its text for the user, and the resulting demand and budget."""

    text: str
    demand: Demand
    room: MemoryBudget


def fits(demand: Demand, room: MemoryBudget) -> bool:
    """Whether weights, the largest step, graphs and the minimum KV fit."""
    return needed_bytes(demand) <= room.limit


def needed_bytes(demand: Demand) -> int:
    """Minimum bytes of the engine: with the given pool, or with a pool for one sequence."""
    length = least_length(demand)
    return fixed_bytes(demand, length) + pool_bytes(demand, _least_blocks(demand))


def least_length(demand: Demand) -> int:
    """Number of tokens of one sequence that must fit."""
    if demand.max_model_len is not None:
        return demand.max_model_len
    length = min(demand.config.max_positions, LEAST_LEN)
    if demand.pool_blocks is not None:
        length = min(length, demand.layout.tokens_in(demand.pool_blocks))
    return length


def free_blocks(demand: Demand, room: MemoryBudget) -> int:
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
    return (room.limit - fixed_bytes(demand, length)) // demand.layout.block_bytes - 1


def check_fit(demand: Demand, room: MemoryBudget) -> None:
    """Raise SettingsError, with the numbers and the remedies, unless the demand fits."""
    if not fits(demand, room):
        ways = [remedy.text for remedy in remedies(demand, room)]
        raise SettingsError(f"{_numbers(demand, room)}; one of these is enough: {', '.join(ways)}")


def remedies(demand: Demand, room: MemoryBudget) -> Iterator[Remedy]:
    """Single changes that make the demand fit. A larger device is always among them."""
    for change in (
        *(_shorter, _smaller_pool, _fewer_tokens, _fewer_seqs),
        *(_bfloat16, _eager, _larger_share),
    ):
        found = change(demand, room)
        if found is not None and fits(found.demand, found.room):
            yield found
    yield _larger_device(demand, room)


def gib(size: int) -> str:
    """GiB with at least two significant digits: 16.1, 0.25."""
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"


def most_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] for which `holds` is true, or `low` if there is none.
    `holds` must be monotonic: true for all smaller numbers, too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least_blocks(demand: Demand) -> int:
    given = demand.pool_blocks
    return blocks_for(demand, least_length(demand)) if given is None else given


def _shorter(demand: Demand, room: MemoryBudget) -> Remedy | None:
    """A shorter --max-model-len in whole spans, unless that would be uselessly short."""
    if demand.max_model_len is None or demand.pool_blocks is not None:
        return None
    size = demand.layout.block_size
    most = most_that(
        lambda spans: fits(replace(demand, max_model_len=spans * size), room),
        0,
        (demand.max_model_len - 1) // size,
    )
    length = most * size
    if length < max(1, min(LEAST_LEN, demand.max_model_len // 2)):
        return None
    return Remedy(f"--max-model-len {length}", replace(demand, max_model_len=length), room)


def _smaller_pool(demand: Demand, room: MemoryBudget) -> Remedy | None:
    blocks = demand.pool_blocks
    if blocks is None:
        return None
    left = room.limit - fixed_bytes(demand, least_length(demand))
    count = min(blocks - 1, left // demand.layout.block_bytes - 1)
    if demand.kv_memory is not None:
        size = count * demand.layout.block_bytes // MIB
        text, changed = f"--kv-memory {size}MiB", replace(demand, kv_memory=size * MIB)
    else:
        text, changed = f"--kv-blocks {count}", replace(demand, kv_blocks=count)
    kept = changed.pool_blocks or 0
    enough = kept >= blocks_for(demand, least_length(demand))
    return Remedy(text, changed, room) if kept > 0 and enough else None


def _fewer_tokens(demand: Demand, room: MemoryBudget) -> Remedy | None:
    most = most_that(
        lambda count: fits(replace(demand, max_batched_tokens=count * STEP_TOKENS), room),
        0,
        (demand.max_batched_tokens - 1) // STEP_TOKENS,
    )
    if not most:
        return None
    tokens = most * STEP_TOKENS
    changed = replace(demand, max_batched_tokens=tokens)
    return Remedy(f"--max-batched-tokens {tokens}", changed, room)


def _fewer_seqs(demand: Demand, room: MemoryBudget) -> Remedy | None:
    most = most_that(
        lambda count: fits(replace(demand, max_num_seqs=count), room), 0, demand.max_num_seqs - 1
    )
    if not most:
        return None
    return Remedy(f"--max-num-seqs {most}", replace(demand, max_num_seqs=most), room)


def _bfloat16(demand: Demand, room: MemoryBudget) -> Remedy | None:
    if demand.layout.dtype != "float32":
        return None
    layout = msgspec.structs.replace(demand.layout, dtype="bfloat16")
    return Remedy("--dtype bfloat16", replace(demand, layout=layout), room)


def _larger_share(demand: Demand, room: MemoryBudget) -> Remedy | None:
    """A larger --gpu-memory-utilization in whole percent. Does not apply to a pool of fixed
    size."""
    if demand.device == "cpu" or demand.pool_blocks is not None:
        return None
    percent = math.ceil(100 * (needed_bytes(demand) + room.others) / room.total)
    if percent > MOST_SHARE:
        return None
    share = percent / 100
    return Remedy(f"--gpu-memory-utilization {share:g}", demand, replace(room, share=share))


def _eager(demand: Demand, room: MemoryBudget) -> Remedy | None:
    return Remedy("--enforce-eager", replace(demand, graphs=False), room) if demand.graphs else None


def _larger_device(demand: Demand, room: MemoryBudget) -> Remedy:
    """A larger device in whole GiB, of which others hold as many bytes as now."""
    size = math.ceil((needed_bytes(demand) + room.others) / room.share / GIB)
    bigger = replace(room, total=size * GIB)
    if not fits(demand, bigger):  # the share was rounded down
        size += 1
        bigger = replace(room, total=size * GIB)
    what = f"{size} GiB of free memory" if demand.device == "cpu" else f"a card with {size} GiB"
    return Remedy(what, demand, bigger)


def pool_text(demand: Demand, room: MemoryBudget | None, num_blocks: int) -> str:
    """The pool's size and the reason for it, for the log."""
    size = f"KV pool of {gib(pool_bytes(demand, num_blocks))} GiB"
    if demand.kv_memory is not None:
        return f"{size} by --kv-memory"
    if demand.kv_blocks is not None:
        return f"{size} by --kv-blocks"
    if room is None or demand.device == "cpu":
        return f"{size} by default, as far as there is memory"
    length = demand.max_model_len or demand.layout.tokens_in(num_blocks)
    parts = _parts(demand, length)
    less = "".join(f" - {name} {gib(part)}" for name, part in parts.items() if part)
    return f"{size}: {gib(room.limit)} that may be used{less}"


def _numbers(demand: Demand, room: MemoryBudget) -> str:
    length = least_length(demand)
    pool = pool_bytes(demand, _least_blocks(demand))
    parts = {**_parts(demand, length), _pool_name(demand, length): pool}
    listed = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return (
        f"{_what(demand, room)} does not fit: {listed} = {gib(needed_bytes(demand))} GiB in "
        f"{demand.layout.dtype}, and {_room(demand, room)}"
    )


def _parts(demand: Demand, length: int) -> dict[str, int]:
    """Bytes of everything except KV, by name."""
    return {
        "weights": resident_bytes(demand),
        "activations": activation_bytes(demand, length),
        "graphs": graph_bytes(demand),
        "spare": SPARE_BYTES[demand.device],
    }


def _pool_name(demand: Demand, length: int) -> str:
    if demand.kv_memory is not None:
        return "--kv-memory"
    if demand.kv_blocks is not None:
        return "--kv-blocks"
    return f"KV of one sequence of {length} tokens"


def _what(demand: Demand, room: MemoryBudget) -> str:
    """What does not fit: the pool, if the model would fit with a small one, else the model."""
    if demand.pool_blocks is None:
        return "the model"
    small = replace(demand, kv_memory=None, kv_blocks=None)
    return _pool_name(demand, 0) if fits(small, room) else "the model"


def _room(demand: Demand, room: MemoryBudget) -> str:
    if demand.device == "cpu":
        free = f"{gib(room.limit)} of the {gib(room.total)} GiB that are free here may be used"
        if demand.pool_blocks is None:
            return free
        return f"{free} (--overcommit starts it all the same)"
    held = f"others hold {gib(room.others)} of the card's {gib(room.total)} GiB"
    if demand.pool_blocks is not None:
        return f"{gib(room.limit)} GiB are free: {held}"
    return f"{gib(room.limit)} GiB may be used: --gpu-memory-utilization {room.share:g}, and {held}"
