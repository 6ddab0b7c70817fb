"""Flags of `baton bench`, with vLLM's names and defaults where its bench has the same flag.

EngineOptions
`-- BenchOptions            flags of both benches
    |-- ThroughputOptions   `baton bench throughput`
    `-- LatencyOptions      `baton bench latency`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.logs import LogLevel
from baton_cli.options.flag import flag
from baton_cli.options.records import EngineOptions
from baton_engine.config.engine_config import LoadFormat

Preset = Literal["nano-vllm"]
Dataset = Literal["random", "sharegpt"]

DEFAULT_PROMPTS = 1000
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128


@dataclass(frozen=True, kw_only=True)
class BenchOptions(EngineOptions):
    TITLE = "bench"

    # Only the result is printed, not the engine's info lines.
    log_level: LogLevel = flag("warning", "log level on stderr")
    model: str = flag(
        "", "Hugging Face folder, hub id (HF_ENDPOINT selects the hub), or demo", metavar="MODEL"
    )
    load_format: LoadFormat = flag(
        "auto",
        "dummy: random weights, from the folder's config.json alone, to time a model's shape",
    )
    seed: int = flag(0, "seed of the prompts and of the sampling")
    output_json: str = flag("", "file that also receives the figures", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    TITLE = "throughput"

    preset: Preset | None = flag(
        None,
        "workload with figures published by other projects: 256 prompts of 100 to 1024 random ids,"
        " 100 to 1024 new tokens each, temperature 0.6",
    )
    dataset_name: Dataset = flag("random", "source of the prompts")
    dataset_path: str = flag(
        "", "file in ShareGPT's format: a JSON list of conversations", metavar="FILE"
    )
    num_prompts: int | None = flag(
        None, "number of requests, all sent at once (default: 1000, or all of the preset)", least=1
    )
    input_len: int | None = flag(
        None, "tokens of a random prompt, without the prefix (default: 1024)", least=1
    )
    output_len: int | None = flag(
        None, "new tokens (default: 128, or the length of the dataset's answer)", least=1
    )
    random_range_ratio: float = flag(
        0.0,
        "share by which random lengths vary up and down; 0.5: from half to one and a half",
        least=0,
        most=1,
    )
    random_prefix_len: int = flag(
        0, "number of leading tokens that all random prompts share", least=0
    )


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    TITLE = "latency"

    input_len: int = flag(32, "tokens of a prompt", least=1)
    output_len: int = flag(128, "new tokens per prompt", least=1)
    batch_size: int = flag(8, "prompts sent together", least=1)
    num_iters_warmup: int = flag(10, "number of unmeasured batches at the start", least=0)
    num_iters: int = flag(30, "number of measured batches", least=1)
