"""`baton bench sweep`: finds the largest step limits that meet goals of latency.

In: SweepOptions. Out: a table, the best limits, a chart if a file is named; exit code 1 if no
limits meet the goals. One engine in this process, built for the largest limits, runs all points:
with smaller ones its steps are smaller, while its KV cache stays as large.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_cli.bench.closed_loop import drive_closed
from baton_cli.bench.engine import build, find_folder
from baton_cli.bench.metrics import setting_of
from baton_cli.bench.options import SweepOptions
from baton_cli.bench.serve_metrics import MetricChoice
from baton_cli.bench.sweep import (
    Point,
    Results,
    chart,
    doubling,
    halving,
    largest,
    limits,
    point_of,
    search,
    table,
    verdict,
)
from baton_cli.bench.workload import (
    NANO_PROMPTS,
    Workload,
    check_flags,
    random_prompts,
    synthetic,
)
from baton_cli.commands.bench import WARM_UP, check_folder, check_room, write_text
from baton_cli.errors import CommandError, UsageError
from baton_cli.logs import configure
from baton_protocol.errors import BatonError

if TYPE_CHECKING:
    from baton_engine.core.engine_core import EngineCore

# Requests of a point by default: the rounds of all sequences, and the least number.
ROUNDS, LEAST_REQUESTS = 3, 8


def run(options: SweepOptions) -> int:
    configure(options.log_level, options.json_logs)
    goals = MetricChoice.read((), (), options.goodput).goals
    if not goals:
        raise UsageError("--goodput is missing: give NAME:MS, as ttft:500 itl:50")
    check_flags(options)
    if options.dataset_name != "random":
        raise UsageError("baton bench sweep sends random prompts; leave out --dataset-name")
    if options.kv_plot:
        raise UsageError("--kv-plot is for baton bench throughput")
    check_folder("--results", options.results)
    check_folder("--plot", options.plot)
    engine = build(options, find_folder(options))
    seqs = limits(options.try_seqs, "--try-seqs", engine.info.max_num_seqs)
    tokens = limits(options.try_tokens, "--try-tokens", engine.info.max_batched_tokens)
    seqs = seqs or doubling(engine.info.max_num_seqs)
    tokens = tokens or halving(engine.info.max_batched_tokens)
    check_room(engine, _workload(engine, options, 1))
    results = Results(
        Path(options.results).expanduser() if options.results else None,
        _setting(engine, options, dict(goals)),
    )
    if results:
        print(f"{len(results)} points are in {options.results} already", file=sys.stderr)
    _warm_up(engine, options)

    def measure(most_seqs: int, most_tokens: int) -> Point:
        point = _measure(engine, options, goals, most_seqs, most_tokens)
        state = "meets" if point.meets(options.good_share) else "misses"
        line = f"{most_seqs} sequences, {most_tokens} tokens: {state} the goals"
        print(line, file=sys.stderr, flush=True)
        return point

    points = search(seqs, tokens, results.measured(measure), options.good_share)
    print(table(points, options.good_share))
    print(verdict(points, options.good_share), flush=True)
    if options.plot:
        title = f"{engine.info.model}: {' '.join(options.goodput)}"
        write_text("--plot", options.plot, chart(points, options.good_share, title))
    return 0 if largest(points, options.good_share) else 1


def _measure(
    engine: EngineCore, options: SweepOptions, goals: Any, seqs: int, tokens: int
) -> Point:
    engine.limit_steps(tokens, seqs)
    before = engine.load().preemptions_total
    workload = _workload(engine, options, seqs)
    # A salt per point, or later points would find their prompts in the prefix cache.
    requests = workload.requests(options.seed, f"{seqs}-{tokens}-")
    try:
        outcomes, seconds = drive_closed(engine, requests, seqs, time.perf_counter)
    except BatonError as error:
        raise CommandError(str(error)) from error
    preemptions = engine.load().preemptions_total - before
    return point_of(seqs, tokens, outcomes, seconds, goals=goals, preemptions=preemptions)


def _workload(engine: EngineCore, options: SweepOptions, seqs: int) -> Workload:
    count = options.num_prompts or max(LEAST_REQUESTS, ROUNDS * seqs)
    if options.preset:
        count = min(count, NANO_PROMPTS)
    return synthetic(replace(options, num_prompts=count), engine.info.vocab_size)


def _warm_up(engine: EngineCore, options: SweepOptions) -> None:
    prompt, new = WARM_UP
    vocab = engine.info.vocab_size
    workload = random_prompts(vocab, count=1, input_len=prompt, output_len=new, seed=options.seed)
    drive_closed(engine, workload.requests(options.seed, "warm-up-"), 1, time.perf_counter)


def _setting(engine: EngineCore, options: SweepOptions, goals: dict[str, float]) -> dict[str, Any]:
    """What must be equal for points to be comparable."""
    found = setting_of(engine, _workload(engine, options, 1), options)
    return {
        **{name: getattr(found, name) for name in found.__struct_fields__},
        "goals": goals,
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "random_range_ratio": options.random_range_ratio,
        "random_prefix_len": options.random_prefix_len,
    }
