"""Computes the figures of an engine bench from its records.

In: a RunRecord per run. Out: records that become the JSON report. Figures that vLLM's bench also
has use its names. Times are in milliseconds if the name says so, else in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from baton_cli.bench.options import BenchOptions
from baton_cli.bench.roofline import DecodeFloor
from baton_cli.bench.run import CacheUse, RunRecord
from baton_cli.bench.static_batches import static_batches, useful_share
from baton_cli.bench.workload import Workload
from baton_engine.core.engine_core import EngineCore
from baton_protocol.layout import CODES

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles, keyed by the numbers of PERCENTILES as strings."""

    mean: float
    percentiles: dict[str, float]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The engine and workload that were measured."""

    model: str
    engine: str
    dtype: str
    device: str
    load_format: str
    workload: str
    kv_blocks: int
    block_size: int
    max_batched_tokens: int
    max_num_seqs: int
    seed: int
    overlap: bool  # a step is launched before the previous step's results are read
    enforce_eager: bool  # CUDA graphs are disabled


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """The unused share of allocated KV, (allocated - used) / allocated tokens: `steady` over the
    sampled steps without prompt tokens, `run` over all sampled steps. None without such a step."""

    steady: float | None
    run: float | None


class StaticBatching(msgspec.Struct, frozen=True, kw_only=True):
    """What static batches of `size` requests would need for the same answers: sampling steps, and
    the share of their slots that computes a token."""

    size: int
    sampling_steps: int
    useful_share: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of `baton bench throughput`. `steps` counts the steps that computed tokens,
    `sampling_steps` those that also sampled new ones. `tokens_per_drafted_row` is how many tokens a
    sequence got from a step with drafts, None if there was none."""

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    prompt_tokens: int
    cached_prompt_tokens: int
    host_prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    steps: int
    sampling_steps: int
    preemptions: int
    drafted_tokens: int
    accepted_drafts: int
    tokens_per_drafted_row: float | None
    kv_waste: Waste
    ttft_ms: Spread
    itl_ms: Spread
    latency_ms: Spread
    prompt_step_ms: Spread
    decode_step_ms: Spread
    static: StaticBatching
    floor: DecodeFloor | None
    setting: Setting


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of `baton bench latency`: seconds per batch, from submission to last token."""

    avg_latency: float
    latencies: tuple[float, ...]
    percentiles: dict[str, float]
    batch_size: int
    output_tokens_per_second: float
    ttft_ms: Spread
    itl_ms: Spread
    floor: DecodeFloor | None
    setting: Setting


def setting_of(engine: EngineCore, workload: Workload, options: BenchOptions) -> Setting:
    info = engine.info
    return Setting(
        model=info.model,
        engine=info.kind,
        dtype=_dtype(info.layout.dtype, options),
        device=options.device if info.kind == "torch" else "sim",
        load_format=options.load_format,
        workload=workload.name,
        kv_blocks=info.num_blocks,
        block_size=info.layout.block_size,
        max_batched_tokens=info.max_batched_tokens,
        max_num_seqs=info.max_num_seqs,
        seed=options.seed,
        overlap=engine.overlap,
        enforce_eager=options.enforce_eager,
    )


def _dtype(kept: str, options: BenchOptions) -> str:
    """The dtype of computation, and that of KV if it is another one."""
    return f"{options.dtype}, KV in {kept}" if kept in CODES else kept


def throughput_of(
    record: RunRecord, workload: Workload, setting: Setting, floor: DecodeFloor | None = None
) -> Throughput:
    seconds, requests = record.elapsed, len(workload.items)
    prompt, output = workload.prompt_tokens, record.output_tokens
    ends = [0.0, *(step.end for step in record.steps)]
    step_ms = [1e3 * (end - begin) for begin, end in pairwise(ends)]
    kinds = list(zip(step_ms, record.steps, strict=True))
    return Throughput(
        elapsed_time=seconds,
        num_requests=requests,
        total_num_tokens=prompt + output,
        requests_per_second=requests / seconds,
        tokens_per_second=(prompt + output) / seconds,
        prompt_tokens=prompt,
        cached_prompt_tokens=record.cached_tokens,
        host_prompt_tokens=record.host_tokens,
        output_tokens=output,
        prompt_tokens_per_second=prompt / seconds,
        output_tokens_per_second=output / seconds,
        steps=len(record.steps),
        sampling_steps=sum(1 for step in record.steps if step.new_tokens),
        preemptions=record.preemptions,
        drafted_tokens=record.drafted_tokens,
        accepted_drafts=record.accepted_drafts,
        tokens_per_drafted_row=1 + record.accepted_drafts / record.drafted_rows
        if record.drafted_rows
        else None,
        kv_waste=Waste(
            steady=waste_of([look for look in record.looks if look.steady]),
            run=waste_of(record.looks),
        ),
        ttft_ms=spread(_firsts([record])),
        itl_ms=spread(_gaps([record])),
        latency_ms=spread([1e3 * live.times[-1] for live in record.lives.values()]),
        prompt_step_ms=spread([ms for ms, step in kinds if step.prompt_tokens]),
        decode_step_ms=spread([ms for ms, step in kinds if not step.prompt_tokens]),
        static=_static(workload, setting.max_num_seqs),
        floor=floor,
        setting=setting,
    )


def _static(workload: Workload, size: int) -> StaticBatching:
    batches = static_batches([item.new_tokens for item in workload.items], size)
    return StaticBatching(
        size=size, sampling_steps=batches[-1].end, useful_share=useful_share(batches)
    )


def latency_of(
    records: Sequence[RunRecord],
    workload: Workload,
    setting: Setting,
    floor: DecodeFloor | None = None,
) -> Latency:
    seconds = tuple(record.elapsed for record in records)
    whole = spread(seconds)
    return Latency(
        avg_latency=whole.mean,
        latencies=seconds,
        percentiles=whole.percentiles,
        batch_size=len(workload.items),
        output_tokens_per_second=workload.output_tokens * len(seconds) / sum(seconds),
        ttft_ms=spread(_firsts(records)),
        itl_ms=spread(_gaps(records)),
        floor=floor,
        setting=setting,
    )


def waste_of(looks: Sequence[CacheUse]) -> float | None:
    """The wasted share of KV, weighted by allocation, so that an almost empty cache counts little.
    None if nothing was allocated."""
    allocated = sum(look.allocated for look in looks)
    return sum(look.empty for look in looks) / allocated if allocated else None


def spread(values: Iterable[float]) -> Spread:
    """Mean and interpolated percentiles; all are 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, {str(percent): 0.0 for percent in PERCENTILES})
    percentiles = {str(percent): percentile(ordered, percent) for percent in PERCENTILES}
    return Spread(statistics.fmean(ordered), percentiles)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest values; `ordered` is ascending and not empty."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _firsts(records: Iterable[RunRecord]) -> list[float]:
    return [1e3 * live.times[0] for record in records for live in record.lives.values()]


def _gaps(records: Iterable[RunRecord]) -> list[float]:
    return [
        1e3 * (after - before)
        for record in records
        for live in record.lives.values()
        for before, after in pairwise(live.times)
    ]
