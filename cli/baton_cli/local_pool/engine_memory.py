"""Estimates each engine's memory before any engine starts, and divides the machine's memory.

In: flags, the model's config. Out: a MemoryDemand (see baton_engine.memory.demand), and for engines
that share one machine's memory, each engine's KV size. Engines that start together would each count
all memory as free, so this module divides it. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baton_cli.errors import CommandError
from baton_cli.options.sizes import about_size
from baton_engine.config.engine_config import on_cuda
from baton_node.settings import ModelSettings

if TYPE_CHECKING:
    from baton_engine.memory.demand import MemoryDemand

MIB = 1 << 20


def demand_of(options: ModelSettings, card: int = 0) -> MemoryDemand:
    """The memory demand of one torch engine with these flags; its dtype must be resolved. `card` is
    the memory of its GPU in bytes, and does not count on a CPU. Raise CommandError for settings
    that the engine refuses."""
    from baton_engine.config.engine_config import TorchSettings
    from baton_engine.config.families import read_config
    from baton_engine.errors import EngineError
    from baton_engine.memory import requirements

    kernels = options.kernels
    if kernels == "auto":
        kernels = "triton" if on_cuda(options.device) else "torch"
    try:
        settings = TorchSettings.of(options, Path(options.model))
        settings.check()
        config = read_config(
            *(settings.model, settings.model_impl, settings.quantization, settings.runner)
        )
        layout = requirements.layout_of(settings, config)
        memory = card if on_cuda(options.device) else None
        return requirements.demand_of(settings, config, layout, kernels=kernels, card=memory)
    except EngineError as error:
        raise CommandError(str(error)) from error


def fixed_bytes(options: ModelSettings, card: int = 0) -> int:
    """Bytes that one engine takes besides KV; `card` is the memory of its GPU in bytes."""
    from baton_engine.memory import estimate, fit

    demand = demand_of(options, card)
    return estimate.fixed_bytes(demand, fit.least_length(demand))


def check_memory(options: ModelSettings, engines: int, store: int, free: int | None) -> None:
    """Raise CommandError if the engines and the store together need more than `free` bytes.

    `store` is the store's size in bytes. `free` is what this machine or container has left; None,
    if unknown, skips the check. An engine that sizes its own KV cache counts with its minimum; if
    not even these minimums fit, share_memory() reports it.
    """
    from baton_engine.memory.fit_check import ENOUGH
    from baton_engine.memory.requirements import CPU_SHARE

    if free is None:
        return
    kv, beside = _required_bytes(options)
    decides = not kv and beside
    limit = int(free * CPU_SHARE) if decides else free
    if decides and engines * beside > limit:
        return
    parts = {
        "--store-memory": store,
        f"{engines} x {'--kv-blocks' if options.kv_blocks else '--kv-memory'}": engines * kv,
        f"{engines} x --host-kv-memory": engines * options.host_kv_memory,
        f"{engines} x the rest of an engine": engines * beside,
    }
    parts = {name: size for name, size in parts.items() if size}
    excess = sum(parts.values()) - limit
    if excess <= 0:
        return
    ways = []
    for name, size in parts.items():
        flag = name.rpartition(" ")[2]
        left = (size - excess) // (1 if name == flag else engines)
        if flag == "--kv-blocks" and options.kv_blocks:
            blocks = left // (kv // options.kv_blocks) - 1
            ways += [f"{flag} {blocks}"] if blocks > 0 else []
        elif flag.startswith("--") and left >= MIB:
            ways.append(f"{flag} {left // MIB}MiB")
    listed = " + ".join(f"{name} {about_size(size)}" for name, size in parts.items())
    room = f"{about_size(limit)} of the {about_size(free)}" if decides else about_size(free)
    raise CommandError(
        f"{listed} = {about_size(limit + excess)} do not fit: {room} of free memory may be used"
        f" (--overcommit starts the pool anyway); {ENOUGH}:"
        f" {', '.join([*ways, f'{about_size(excess)} more of free memory'])}"
    )


def _required_bytes(options: ModelSettings) -> tuple[int, int]:
    """One engine's bytes in this machine's memory: its KV pool, and the rest. If no pool size was
    given, the pool is 0 and the rest is the engine's minimum. GPU memory does not count."""
    from baton_engine.errors import EngineError
    from baton_engine.memory import estimate, fit
    from baton_engine.sim.build import SimSettings

    given = options.kv_memory is not None or options.kv_blocks is not None
    if options.engine == "sim":
        try:
            sim = SimSettings.of(options, options.sim, model="")
        except EngineError as error:
            raise CommandError(str(error)) from error
        return sim.num_blocks * sim.layout().block_bytes, 0
    if on_cuda(options.device):
        return 0, 0
    demand = demand_of(options)
    if not given:
        return 0, fit.needed_bytes(demand)
    kv = estimate.pool_bytes(demand, demand.pool_blocks or 0)
    return kv, estimate.fixed_bytes(demand, fit.least_length(demand))


def share_memory(options: ModelSettings, engines: int, others: int, free: int | None) -> int | None:
    """Bytes of KV for each of several engines on this machine's CPU; None if `free` is unknown or
    suffices for each engine's default. `others` is the memory of the pool's other parts. Raise
    CommandError if the engines do not fit."""
    from baton_engine.errors import SettingsError
    from baton_engine.memory.demand import MemoryBudget
    from baton_engine.memory.fit import free_blocks
    from baton_engine.memory.fit_check import check_fit
    from baton_engine.memory.requirements import CPU_KV_BYTES, CPU_SHARE

    if free is None:
        return None
    demand = demand_of(options)
    room = MemoryBudget(
        total=free // engines,
        others=others // engines + (0 if options.overcommit else options.host_kv_memory),
        share=CPU_SHARE,
    )
    try:
        check_fit(demand, room)
    except SettingsError as error:
        raise CommandError(f"each of {engines} engines: {error}") from error
    kv_bytes = free_blocks(demand, room) * demand.layout.block_bytes
    return kv_bytes if kv_bytes < CPU_KV_BYTES else None
