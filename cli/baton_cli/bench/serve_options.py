"""Flags of `baton bench serve`, with vLLM's names and defaults where its bench has the same flag.

CommonOptions
`-- TargetOptions             the server and its endpoint
    `-- PromptOptions         the requests
        `-- ArrivalOptions    their times
            `-- ServeOptions  the figures that are reported
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.bench.goodput_option import goodput_option
from baton_cli.logs import LogLevel
from baton_cli.options.records import CommonOptions
from baton_protocol.options import MAX_PORT, option

Dataset = Literal["random", "sharegpt", "trace"]

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class TargetOptions(CommonOptions):
    TITLE = "server"

    log_level: LogLevel = option("warning", "log level on stderr")
    base_url: str = option("", "URL of the server without /v1 (default: HOST and PORT)")
    host: str = option("127.0.0.1", "address of the server")
    port: int = option(8000, "port of the server", least=1, most=MAX_PORT)
    endpoint: str = option(
        COMPLETIONS, "path of the requests; one that ends with chat/completions receives messages"
    )
    model: str = option("", "model name in the requests (default: the first of /v1/models)")
    header: tuple[str, ...] = option(
        (), "additional headers of each request", metavar="KEY=VALUE", several=True
    )
    request_timeout: float = option(
        3600.0, "seconds after which a request counts as failed", least=0.001
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TargetOptions):
    TITLE = "prompts"

    dataset_name: Dataset = option(
        "random", "source of the prompts; trace: Mooncake's JSONL of timestamps and block hashes"
    )
    dataset_path: str = option("", "file for sharegpt or trace", metavar="FILE")
    tokenizer: str = option(
        "",
        "model folder, hub id, demo, or bytes (that of a simulated pool). Required by sharegpt and"
        " chat; without it, prompts are sent as token ids",
    )
    num_prompts: int = option(1000, "number of requests; a file may hold fewer", least=1)
    random_input_len: int = option(1024, "tokens of a random prompt, without the prefix", least=1)
    random_output_len: int = option(128, "new tokens of a random prompt", least=1)
    random_range_ratio: float = option(
        0.0,
        "share by which random lengths vary up and down; 0.5: from half to one and a half",
        least=0,
        most=1,
    )
    random_prefix_len: int = option(
        0, "number of leading tokens that all random prompts share", least=0
    )
    output_len: int | None = option(
        None, "new tokens of each request (default: as in the dataset)", least=1
    )
    vocab_size: int = option(
        256, "upper bound of the ids in random and trace prompts; every tokenizer has 256", least=2
    )
    temperature: float | None = option(
        None, "sampling temperature; 0: greedy (default: the server's)", least=0
    )
    ignore_eos: bool = option(
        False, "continue after the end-of-text token, so all answers have full length"
    )
    return_token_ids: bool = option(
        False, "request token ids beside the text, to time tokens that add no text too"
    )
    seed: int = option(0, "seed of the prompts and of the arrivals")


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions(PromptOptions):
    TITLE = "arrivals"

    request_rate: str = option("inf", "requests per second; inf: all at once", metavar="RATE")
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of the gaps at a finite rate; 1: Poisson, less: bursts,"
        " more: steadier",
        least=0.001,
    )
    self_timed: bool = option(
        True, "send a trace's requests at its own times; off: at --request-rate"
    )
    max_concurrency: int | None = option(
        None,
        "maximum number of concurrent requests; others wait in the client, unmeasured",
        least=1,
    )
    num_warmups: int = option(
        0, "number of unmeasured requests at the start, equal to the first measured one", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ArrivalOptions):
    TITLE = "figures"

    percentile_metrics: tuple[str, ...] = option(
        ("ttft", "tpot", "itl"),
        "figures with percentiles: ttft, tpot, itl, e2el",
        metavar="NAME,...",
    )
    metric_percentiles: tuple[str, ...] = option(("99",), "the percentiles", metavar="N,...")
    goodput: tuple[str, ...] = goodput_option()
    save_result: bool = option(
        False, "write the figures to a file in this folder, named by model and time"
    )
    output_json: str = option("", "file to which the figures are written", metavar="FILE")
    save_detailed: bool = option(False, "write each request's times too")
    disable_tqdm: bool = option(False, "show no progress line")
    allow_failures: bool = option(False, "exit with 0 even if requests failed")
