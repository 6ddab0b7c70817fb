"""Compares the decode steps of a bench with the least time that this machine needs for them.

In: records of runs, a DecodeRoofline and a Machine. Out: DecodeFloor for the report. Steps with
prompt tokens are left out: products bound them, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton_cli.bench.options import BenchOptions
from baton_cli.bench.run import RunRecord

if TYPE_CHECKING:
    from baton_engine.core.engine_core import EngineCore
    from baton_engine.memory.roofline import DecodeRoofline, Machine


class DecodeFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the decode steps: their rows, the bytes of weights and KV that they must read, the
    time of that read (`floor_ms`) and their own time. `share` is the first time as a part of the
    second. `balance_rows` is the number of rows from which products take longer than the weights'
    read."""

    read_bytes_per_s: float
    operations_per_s: float | None
    balance_rows: float | None
    steps: int
    rows: float
    weight_bytes: float
    kv_bytes: float
    floor_ms: float
    step_ms: float
    share: float


def measured_floor(
    options: BenchOptions, folder: Path | None, engine: EngineCore
) -> tuple[DecodeRoofline, Machine] | None:
    """The model's roofline and this machine's speeds; None for a simulated engine, and on a device
    without memory for the measurement."""
    if engine.info.kind == "sim":
        return None
    import torch

    from baton_engine.config.families import read_config
    from baton_engine.config.model_config import compute_dtype
    from baton_engine.kv.kv_pool import TORCH_DTYPES
    from baton_engine.memory.roofline import DecodeRoofline
    from baton_engine.runner.machine_speeds import measure_machine
    from baton_protocol.layout import ITEM_BYTES

    assert folder is not None, "only the sim engine needs no model"
    config = read_config(folder, options.model_impl, options.quantization, options.runner)
    dtype = compute_dtype(config, options.dtype)
    machine = measure_machine(torch.device(options.device), TORCH_DTYPES[dtype])
    if machine is None:
        return None
    return DecodeRoofline.of(config, engine.info.layout, ITEM_BYTES[dtype]), machine


def decode_floor(
    records: Iterable[RunRecord], model: DecodeRoofline, machine: Machine
) -> DecodeFloor | None:
    """None if no step computed only decodes."""
    steps, seconds = [], 0.0
    for record in records:
        ends = [0.0, *(step.end for step in record.steps)]
        for step, (begin, end) in zip(record.steps, pairwise(ends), strict=True):
            if step.rows and not step.prompt_tokens:
                steps.append(step)
                seconds += end - begin
    if not steps or not seconds:
        return None
    count = len(steps)
    floor = sum(model.byte_seconds(machine, step.rows, step.kv_bytes) for step in steps)
    return DecodeFloor(
        read_bytes_per_s=machine.bytes_per_s,
        operations_per_s=machine.operations_per_s,
        balance_rows=model.balance_rows(machine),
        steps=count,
        rows=sum(step.rows for step in steps) / count,
        weight_bytes=sum(model.weights_read(step.rows) for step in steps) / count,
        kv_bytes=sum(step.kv_bytes for step in steps) / count,
        floor_ms=1e3 * floor / count,
        step_ms=1e3 * seconds / count,
        share=floor / seconds,
    )
