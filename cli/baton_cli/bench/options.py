"""Flags of `baton bench`, with vLLM's names and defaults where its bench has the same flag.

CommonOptions, ModelSettings
`-- BenchOptions            flags of both benches
    |-- ThroughputOptions   `baton bench throughput`
    |   `-- SweepOptions    `baton bench sweep`
    `-- LatencyOptions      `baton bench latency`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.bench.goodput_option import goodput_option
from baton_cli.logs import LogLevel
from baton_cli.options.records import CommonOptions
from baton_engine.config.engine_config import LoadFormat
from baton_node.settings import ModelSettings
from baton_protocol.options import option

Preset = Literal["nano-vllm"]
Dataset = Literal["random", "sharegpt"]

DEFAULT_PROMPTS = 1000
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommonOptions, ModelSettings):
    TITLE = "bench"

    # Only the result is printed, not the engine's info lines.
    log_level: LogLevel = option("warning", "log level on stderr")
    model: str = option(
        "",
        "Hugging Face folder, GGUF file, hub id (HF_ENDPOINT selects the hub), or demo",
        metavar="MODEL",
    )
    load_format: LoadFormat = option(
        "auto",
        "dummy: random weights, from the folder's config.json alone, to time a model's shape",
    )
    seed: int = option(0, "seed of the prompts and of the sampling")
    output_json: str = option("", "file that also receives the figures", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    TITLE = "throughput"

    preset: Preset | None = option(
        None,
        "workload with figures published by other projects: 256 prompts of 100 to 1024 random ids,"
        " 100 to 1024 new tokens each, temperature 0.6",
    )
    dataset_name: Dataset = option("random", "source of the prompts")
    dataset_path: str = option(
        "", "file in ShareGPT's format: a JSON list of conversations", metavar="FILE"
    )
    num_prompts: int | None = option(
        None, "number of requests, all sent at once (default: 1000, or all of the preset)", least=1
    )
    input_len: int | None = option(
        None, "tokens of a random prompt, without the prefix (default: 1024)", least=1
    )
    output_len: int | None = option(
        None, "new tokens (default: 128, or the length of the dataset's answer)", least=1
    )
    random_range_ratio: float = option(
        0.0,
        "share by which random lengths vary up and down; 0.5: from half to one and a half",
        least=0,
        most=1,
    )
    random_prefix_len: int = option(
        0, "number of leading tokens that all random prompts share", least=0
    )
    kv_plot: str = option(
        "",
        "SVG file for a chart of the KV cache over time: token slots that requests hold, and those"
        " of them that are filled",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    TITLE = "latency"

    input_len: int = option(32, "tokens of a prompt", least=1)
    output_len: int = option(128, "new tokens per prompt", least=1)
    batch_size: int = option(8, "prompts sent together", least=1)
    num_iters_warmup: int = option(10, "number of unmeasured batches at the start", least=0)
    num_iters: int = option(30, "number of measured batches", least=1)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ThroughputOptions):
    TITLE = "sweep"

    num_prompts: int | None = option(
        None, "number of requests of each point (default: 3 per sequence, at least 8)", least=1
    )
    goodput: tuple[str, ...] = goodput_option()
    good_share: float = option(
        0.99, "share of the requests that must be good", metavar="SHARE", least=0, most=1
    )
    try_seqs: tuple[str, ...] = option(
        (), "values of --max-num-seqs to try (default: 1, 2, 4, ... up to it)", metavar="N,..."
    )
    try_tokens: tuple[str, ...] = option(
        (),
        "values of --max-batched-tokens to try (default: it, and three times half of that)",
        metavar="N,...",
    )
    results: str = option(
        "", "file of finished points, one JSON line each; a sweep goes on from it", metavar="FILE"
    )
    plot: str = option("", "SVG file for a chart of the points", metavar="FILE")
