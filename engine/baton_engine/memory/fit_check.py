"""What a user reads about an engine's memory: the pool's size, or why the engine does not fit.

In: a MemoryDemand and a MemoryBudget (see `demand`). Out: text for the log, or a SettingsError with
the numbers and with changes, each of which is enough.
"""

from __future__ import annotations

from dataclasses import replace

from baton_engine.errors import SettingsError
from baton_engine.memory.demand import MemoryBudget, MemoryDemand
from baton_engine.memory.estimate import (
    GIB,
    SPARE_BYTES,
    activation_bytes,
    graph_bytes,
    head_step_bytes,
    pool_bytes,
    resident_bytes,
)
from baton_engine.memory.fit import fits, least_blocks, least_length, needed_bytes
from baton_engine.memory.remedies import remedies

# Begins the list of remedies at the end of a message.
ENOUGH = "one of these is enough"


def check_fit(demand: MemoryDemand, room: MemoryBudget) -> None:
    """Raise SettingsError, with the numbers and the remedies, unless the demand fits."""
    if not fits(demand, room):
        ways = [remedy.text for remedy in remedies(demand, room)]
        raise SettingsError(f"{_numbers(demand, room)}; {ENOUGH}: {', '.join(ways)}")


def gib(size: int) -> str:
    """GiB with at least two significant digits: 16.1, 0.25."""
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"


def pool_text(demand: MemoryDemand, room: MemoryBudget | None, num_blocks: int) -> str:
    """The pool's size and the reason for it, for the log."""
    if demand.config.encodes:
        return "no KV, as an encoder has none"
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


def _numbers(demand: MemoryDemand, room: MemoryBudget) -> str:
    length = least_length(demand)
    pool = pool_bytes(demand, least_blocks(demand))
    parts = {**_parts(demand, length), _pool_name(demand, length): pool}
    listed = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return (
        f"{_what(demand, room)} does not fit: {listed} = {gib(needed_bytes(demand))} GiB in "
        f"{demand.dtype}, and {_room(demand, room)}"
    )


def _parts(demand: MemoryDemand, length: int) -> dict[str, int]:
    """Bytes of everything except KV, by name."""
    return {
        "weights" if demand.draft_model is None else "weights of both models": resident_bytes(
            demand
        ),
        "activations": activation_bytes(demand, length),
        "graphs": graph_bytes(demand),
        "drafts": head_step_bytes(demand),
        "spare": SPARE_BYTES[demand.device],
    }


def _pool_name(demand: MemoryDemand, length: int) -> str:
    if demand.kv_memory is not None:
        return "--kv-memory"
    if demand.kv_blocks is not None:
        return "--kv-blocks"
    return f"KV of one sequence of {length} tokens"


def _what(demand: MemoryDemand, room: MemoryBudget) -> str:
    """What does not fit: the pool, if the model would fit with a small one, else the model."""
    if demand.pool_blocks is None:
        return "the model"
    small = replace(demand, kv_memory=None, kv_blocks=None)
    return _pool_name(demand, 0) if fits(small, room) else "the model"


def _room(demand: MemoryDemand, room: MemoryBudget) -> str:
    if demand.device == "cpu":
        free = f"{gib(room.limit)} of the {gib(room.total)} GiB that are free here may be used"
        if demand.pool_blocks is None:
            return free
        return f"{free} (--overcommit starts it all the same)"
    held = f"others hold {gib(room.others)} of the card's {gib(room.total)} GiB"
    if demand.pool_blocks is not None:
        return f"{gib(room.limit)} GiB are free: {held}"
    return f"{gib(room.limit)} GiB may be used: --gpu-memory-utilization {room.share:g}, and {held}"
