"""`baton bench throughput` and `baton bench latency`: measure the engine in this process.

In: ThroughputOptions or LatencyOptions. Out: figures on stdout, and in a JSON file if one is named.
The benches drive the engine directly, without router or store. They use a tokenizer only to read a
dataset of texts, and do not detokenize: in a pool, the node's server process does that beside the
engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton_cli.bench.engine import build, find_folder, read_tokenizer
from baton_cli.bench.kv_chart import kv_chart
from baton_cli.bench.metrics import Latency, Throughput, latency_of, setting_of, throughput_of
from baton_cli.bench.options import DEFAULT_PROMPTS, BenchOptions, LatencyOptions, ThroughputOptions
from baton_cli.bench.report import ProgressBar, latency_text, throughput_text
from baton_cli.bench.roofline import decode_floor, measured_floor
from baton_cli.bench.run import RunRecord, drive
from baton_cli.bench.workload import Workload, batch, check_flags, random_prompts, synthetic
from baton_cli.errors import CommandError
from baton_cli.logs import configure
from baton_protocol.errors import BatonError

if TYPE_CHECKING:
    from baton_engine.core.engine_core import EngineCore

# Prompt tokens and new tokens of the warm-up request: the first requests are slow, because they
# allocate buffers and compile kernels.
WARM_UP = (16, 16)


def throughput(options: ThroughputOptions) -> int:
    _begin(options)
    check_folder("--kv-plot", options.kv_plot)
    check_flags(options)
    folder = find_folder(options)
    texts = _read_texts(options, folder) if options.dataset_name == "sharegpt" else None
    engine = build(options, folder)
    workload = texts or synthetic(options, engine.info.vocab_size)
    check_room(engine, workload)
    _warm_up(engine, options)
    known = measured_floor(options, folder, engine)
    with ProgressBar(sys.stderr, workload.output_tokens, time.perf_counter) as bar:
        record = _drive(engine, workload, options, bar)
    if options.kv_plot:
        title = f"{workload.name} on {engine.info.model}"
        write_text("--kv-plot", options.kv_plot, kv_chart(record.looks, title))
    floor = None if known is None else decode_floor([record], *known)
    figures = throughput_of(record, workload, setting_of(engine, workload, options), floor)
    _finish(options, throughput_text(figures), figures)
    return 0


def latency(options: LatencyOptions) -> int:
    _begin(options)
    folder = find_folder(options)
    engine = build(options, folder)
    workload = batch(options, engine.info.vocab_size)
    check_room(engine, workload)
    count = options.num_iters_warmup + options.num_iters
    with ProgressBar(sys.stderr, count * workload.output_tokens, time.perf_counter) as bar:
        # A salt per batch, or later batches would find their prompts in the prefix cache.
        records = [
            _drive(engine, workload, options, bar, salt=f"batch-{number}-")
            for number in range(count)
        ]
    counted = records[options.num_iters_warmup :]
    known = measured_floor(options, folder, engine)
    floor = None if known is None else decode_floor(counted, *known)
    figures = latency_of(counted, workload, setting_of(engine, workload, options), floor)
    _finish(options, latency_text(figures), figures)
    return 0


def check_room(engine: EngineCore, workload: Workload) -> None:
    """Raise CommandError if a request is too long for the engine to generate all its tokens."""
    info = engine.info
    pool = info.layout.tokens_in(info.num_blocks)
    room = min(info.max_model_len, pool)
    longest = max(len(item.prompt) + item.new_tokens for item in workload.items)
    if longest > room:
        raise CommandError(
            f"a request of {workload.name} has {longest} tokens, prompt and answer together, "
            f"but this engine takes at most {room}: see --max-model-len, --kv-memory and "
            "--kv-blocks"
        )


def check_folder(flag: str, file: str) -> None:
    """Raise CommandError if a file cannot be there; "" is no file."""
    if file and not Path(file).expanduser().parent.is_dir():
        raise CommandError(f"{flag} {file}: the folder does not exist")


def write_text(flag: str, file: str, text: str) -> None:
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{flag} {file}: {error}") from error


def _begin(options: BenchOptions) -> None:
    configure(options.log_level, options.json_logs)
    check_folder("--output-json", options.output_json)


def _read_texts(options: ThroughputOptions, folder: Path | None) -> Workload:
    from baton_cli.bench.sharegpt import sharegpt

    return sharegpt(
        Path(options.dataset_path).expanduser(),
        read_tokenizer(folder),
        count=options.num_prompts or DEFAULT_PROMPTS,
        output_len=options.output_len,
        seed=options.seed,
    )


def _warm_up(engine: EngineCore, options: BenchOptions) -> None:
    prompt, new = WARM_UP
    vocab = engine.info.vocab_size
    workload = random_prompts(vocab, count=1, input_len=prompt, output_len=new, seed=options.seed)
    _drive(engine, workload, options, salt="warm-up-")


def _drive(
    engine: EngineCore,
    workload: Workload,
    options: BenchOptions,
    bar: ProgressBar | None = None,
    salt: str = "",
) -> RunRecord:
    """Run a workload to its end; raise CommandError if the engine did not generate all tokens."""
    requests = workload.requests(options.seed, salt)
    progress = bar.add if bar else None
    try:
        record = drive(engine, requests, clock=time.perf_counter, progress=progress)
    except BatonError as error:
        raise CommandError(str(error)) from error
    if record.output_tokens != workload.output_tokens:
        raise CommandError(
            f"{workload.name} produced {record.output_tokens} of {workload.output_tokens} "
            "tokens; the figures would not be comparable"
        )
    return record


def _finish(options: BenchOptions, text: str, figures: Throughput | Latency) -> None:
    print(text, flush=True)
    if not options.output_json:
        return
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"
    write_text("--output-json", options.output_json, text)
