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

from baton_cli.logs import LogLevel
from baton_cli.options.flag import flag
from baton_cli.options.records import MAX_PORT, CommonOptions

Dataset = Literal["random", "sharegpt", "trace"]

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class TargetOptions(CommonOptions):
    TITLE = "server"

    log_level: LogLevel = flag("warning", "how much to log on stderr")
    base_url: str = flag("", "where the server is, without /v1 (default: HOST and PORT)")
    host: str = flag("127.0.0.1", "where the server listens")
    port: int = flag(8000, "where the server listens", least=1, most=MAX_PORT)
    endpoint: str = flag(
        COMPLETIONS, "the path asked; one that ends with chat/completions gets messages"
    )
    model: str = flag("", "the name to ask for (default: the first of /v1/models)")
    header: tuple[str, ...] = flag(
        (), "more headers of each request", metavar="KEY=VALUE", several=True
    )
    request_timeout: float = flag(
        3600.0, "seconds after which a request counts as failed", least=0.001
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TargetOptions):
    TITLE = "prompts"

    dataset_name: Dataset = flag(
        "random", "where prompts come from; trace: Mooncake's JSONL of timestamps and block hashes"
    )
    dataset_path: str = flag("", "the file of sharegpt or trace", metavar="FILE")
    tokenizer: str = flag(
        "",
        "a model folder, a hub id, demo, or bytes (a sim pool's): sharegpt needs it, and chat;"
        " without one, prompts go out as token ids",
    )
    num_prompts: int = flag(1000, "requests; a file may hold fewer", least=1)
    random_input_len: int = flag(1024, "tokens of a random prompt, without the prefix", least=1)
    random_output_len: int = flag(128, "new tokens of a random prompt", least=1)
    random_range_ratio: float = flag(
        0.0,
        "random lengths vary by so much, up and down: 0.5 is from half to one and a half",
        least=0,
        most=1,
    )
    random_prefix_len: int = flag(0, "tokens that all random prompts begin with", least=0)
    output_len: int | None = flag(
        None, "new tokens of each request (default: as the dataset says)", least=1
    )
    vocab_size: int = flag(
        256, "random and trace prompts hold ids below it; every tokenizer has 256", least=2
    )
    temperature: float | None = flag(None, "0 is greedy (default: as the server has it)", least=0)
    ignore_eos: bool = flag(False, "go on past the end-of-text token: all answers have full length")
    return_token_ids: bool = flag(
        False, "ask for ids beside the text, so that tokens without text of their own are timed too"
    )
    seed: int = flag(0, "the same seed gives the same prompts and the same arrivals")


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions(PromptOptions):
    TITLE = "arrivals"

    request_rate: str = flag("inf", "requests a second; inf sends all at once", metavar="RATE")
    burstiness: float = flag(
        1.0,
        "shape of the gamma distribution of the gaps at a finite rate: 1 is Poisson, less comes in"
        " bursts, more is steadier",
        least=0.001,
    )
    self_timed: bool = flag(
        True, "send a trace's requests at its own times; off: at --request-rate's"
    )
    max_concurrency: int | None = flag(
        None, "requests under way at once; later ones wait here, unmeasured", least=1
    )
    num_warmups: int = flag(0, "requests before those that count, like the first of them", least=0)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ArrivalOptions):
    TITLE = "figures"

    percentile_metrics: tuple[str, ...] = flag(
        ("ttft", "tpot", "itl"), "whose percentiles: ttft, tpot, itl, e2el", metavar="NAME,..."
    )
    metric_percentiles: tuple[str, ...] = flag(("99",), "which", metavar="N,...")
    goodput: tuple[str, ...] = flag(
        (),
        "what a good request holds, in ms: ttft, tpot (mean of its tokens), itl (each of its gaps),"
        " e2el",
        metavar="NAME:MS",
        several=True,
    )
    save_result: bool = flag(False, "write the figures to a file here, named by model and time")
    output_json: str = flag("", "write the figures there", metavar="FILE")
    save_detailed: bool = flag(False, "add each request's times to what is written")
    disable_tqdm: bool = flag(False, "no progress line")
    allow_failures: bool = flag(False, "exit with 0 though requests failed")
