"""What each engine of a pool takes of this machine's memory, known before any is started.

In: flags, the model's config. Out: a Demand (see baton_engine.sizing), and where engines share the
memory of one machine, how much KV each may have. Engines that start together each find all of it
free, so it is divided here. Imports no torch.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.devices import on_cuda
from baton.errors import CommandError
from baton.options import EngineOptions
from baton.sizes import ByteSize

if TYPE_CHECKING:
    from baton_engine.sizing import Demand


def demand_of(options: EngineOptions) -> Demand:
    """Of one engine with these flags, whose dtype is decided. Raise CommandError."""
    from baton_engine import demand
    from baton_engine.config import read_config
    from baton_engine.errors import EngineError
    from baton_engine.torch_settings import TorchSettings

    names = {each.name for each in fields(TorchSettings)} & {each.name for each in fields(options)}
    given: dict[str, Any] = {name: getattr(options, name) for name in names - {"model"}}
    device = "cuda" if on_cuda(options.device) else "cpu"
    kernels = options.kernels
    if kernels == "auto":
        kernels = "triton" if device == "cuda" else "torch"
    try:
        settings = TorchSettings(model=Path(options.model), **given)
        settings.check()
        config = read_config(settings.model)
        layout = demand.layout_of(settings, config)
        return demand.demand_of(settings, config, layout, device, kernels)
    except EngineError as error:
        raise CommandError(str(error)) from error


def fixed_bytes(options: EngineOptions) -> int:
    """Of everything but KV, in one engine."""
    from baton_engine import fit, sizing

    demand = demand_of(options)
    return sizing.fixed_bytes(demand, fit.least_length(demand))


def share_memory(options: EngineOptions, engines: int, others: int) -> ByteSize | None:
    """KV memory of each of several engines on this machine's CPU; None where there is enough for
    the default of each, or nobody says what there is. `others` is what the pool takes beside them.
    Raise CommandError where they do not fit."""
    from baton_engine.demand import CPU_KV_BYTES, CPU_SHARE
    from baton_engine.errors import SettingsError
    from baton_engine.fit import check_fit, free_blocks
    from baton_engine.machine_memory import free_memory
    from baton_engine.sizing import Room

    free = free_memory()
    if free is None:
        return None
    demand = demand_of(options)
    room = Room(
        total=free // engines,
        others=others // engines + options.host_kv_memory,
        share=CPU_SHARE,
    )
    try:
        check_fit(demand, room)
    except SettingsError as error:
        raise CommandError(f"each of {engines} engines: {error}") from error
    kv_bytes = free_blocks(demand, room) * demand.layout.block_bytes
    return ByteSize(kv_bytes) if kv_bytes < CPU_KV_BYTES else None
