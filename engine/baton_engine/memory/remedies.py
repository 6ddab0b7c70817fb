"""Changes of which each is enough on its own to make an engine fit its device.

Each is checked here before it is suggested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton_engine.config.families import not_plain, quantized_online
from baton_engine.memory.demand import HeadDemand, MemoryBudget, MemoryDemand
from baton_engine.memory.estimate import (
    GIB,
    blocks_for,
    blocks_in,
    fixed_bytes,
    weight_bytes,
)
from baton_engine.memory.fit import LEAST_LEN, fits, least_length, most_that, needed_bytes
from baton_protocol.layout import CODES
from baton_protocol.policies import Quantization

MIB = 1 << 20
ROUNDING_LEAST: Sequence[Quantization] = ("int8", "int4")
STEP_TOKENS = 16  # a suggested --max-batched-tokens is a multiple of it
MOST_SHARE = 98  # percent: a suggested --gpu-memory-utilization leaves some memory to the driver


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that is enough: its text for the user, and the resulting demand and budget."""

    text: str
    demand: MemoryDemand
    room: MemoryBudget


def remedies(demand: MemoryDemand, room: MemoryBudget) -> Iterator[Remedy]:
    """Single changes that make the demand fit. A larger device is always among them."""
    for change in (
        *(_shorter, _smaller_pool, _fewer_tokens, _fewer_seqs),
        *(_bfloat16, _quantized, _eight_bit_kv, _no_drafts, _eager, _larger_share),
    ):
        remedy = change(demand, room)
        if remedy is not None and fits(remedy.demand, remedy.room):
            yield remedy
    yield _larger_device(demand, room)


def _shorter(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    """A shorter --max-model-len in whole spans, unless that would be uselessly short."""
    pool_given = demand.pool_blocks is not None and not demand.config.encodes
    if demand.max_model_len is None or pool_given:
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


def _smaller_pool(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    blocks = demand.pool_blocks
    if blocks is None or demand.config.encodes:
        return None
    left = room.limit - fixed_bytes(demand, least_length(demand))
    count = min(blocks - 1, blocks_in(demand, left))
    if demand.kv_memory is not None:
        size = count * demand.layout.block_bytes // MIB
        text, changed = f"--kv-memory {size}MiB", replace(demand, kv_memory=size * MIB)
    else:
        text, changed = f"--kv-blocks {count}", replace(demand, kv_blocks=count)
    kept = changed.pool_blocks or 0
    enough = kept >= blocks_for(demand, least_length(demand))
    return Remedy(text, changed, room) if kept > 0 and enough else None


def _fewer_tokens(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
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


def _fewer_seqs(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    most = most_that(
        lambda count: fits(replace(demand, max_num_seqs=count), room), 0, demand.max_num_seqs - 1
    )
    if not most:
        return None
    return Remedy(f"--max-num-seqs {most}", replace(demand, max_num_seqs=most), room)


def _bfloat16(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    if demand.dtype != "float32":
        return None
    to = "bfloat16"
    changed = demand if demand.layout.dtype in CODES else _kv_in(to, demand)
    return Remedy(f"--dtype {to}", replace(changed, dtype=to), room)


def _kv_in(dtype: str, demand: MemoryDemand) -> MemoryDemand:
    second = demand.draft_model
    return replace(
        demand,
        layout=demand.layout.in_dtype(dtype),
        draft_model=second and replace(second, layout=second.layout.in_dtype(dtype)),
    )


def _quantized(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    """The --quantization that rounds least, of those that are enough. Does not apply to quantized
    checkpoints, and not to models that transformers' code computes."""
    if not_plain(demand.config):
        return None
    for quantization in ROUNDING_LEAST:
        config = quantized_online(demand.config, quantization)
        changed = replace(demand, config=config)
        if demand.measured is not None:
            saved = weight_bytes(demand) - weight_bytes(changed)
            resident = max(0, demand.measured.resident - saved)
            changed = replace(changed, measured=replace(demand.measured, resident=resident))
        if fits(changed, room):
            return Remedy(f"--quantization {quantization}", changed, room)
    return None


def _eight_bit_kv(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    """KV in 8 bits. Does not apply if layers keep different fields, which may then form other
    groups."""
    layouts = [demand.layout, *([] if demand.draft_model is None else [demand.draft_model.layout])]
    groups = [group for layout in layouts for group in layout.groups]
    if demand.layout.dtype in CODES or any(group.fields for group in groups):
        return None
    to = "int8"
    return Remedy(f"--kv-cache-dtype {to}", _kv_in(to, demand), room)


def _no_drafts(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    """Without the draft model, or the head, that drafts. Does not apply to measured bytes, of
    which nobody knows what each part takes."""
    if demand.measured is not None:
        return None
    if demand.draft_model is not None:
        changed, what = replace(demand, draft_model=None), "draft model"
    elif demand.head != HeadDemand():
        changed, what = replace(demand, head=HeadDemand()), "head"
    else:
        return None
    return Remedy(f"--speculative-config without a {what}", changed, room)


def _larger_share(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    """A larger --gpu-memory-utilization in whole percent. Does not apply to a pool of fixed
    size."""
    if demand.device == "cpu" or demand.pool_blocks is not None:
        return None
    percent = math.ceil(100 * (needed_bytes(demand) + room.others) / room.total)
    if percent > MOST_SHARE:
        return None
    share = percent / 100
    return Remedy(f"--gpu-memory-utilization {share:g}", demand, replace(room, share=share))


def _eager(demand: MemoryDemand, room: MemoryBudget) -> Remedy | None:
    return Remedy("--enforce-eager", replace(demand, graphs=False), room) if demand.graphs else None


def _larger_device(demand: MemoryDemand, room: MemoryBudget) -> Remedy:
    """A larger device in whole GiB, of which others hold as many bytes as now."""
    size = math.ceil((needed_bytes(demand) + room.others) / room.share / GIB)
    bigger = replace(room, total=size * GIB)
    if not fits(demand, bigger):  # the share was rounded down
        size += 1
        bigger = replace(room, total=size * GIB)
    what = f"{size} GiB of free memory" if demand.device == "cpu" else f"a card with {size} GiB"
    return Remedy(what, demand, bigger)
