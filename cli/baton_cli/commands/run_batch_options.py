"""Flags of `baton run-batch`: two files, and a server or the pool that is started for them."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.options.records import PoolOptions
from baton_protocol.options import MAX_PORT, option


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions(PoolOptions):
    TITLE = "batch"

    input_file: str = option(
        "",
        "requests, as OpenAI's batches have them: a JSON object a line",
        short="-i",
        metavar="FILE",
    )
    output_file: str = option(
        "",
        "where to write a line per request, in the order of the answers",
        short="-o",
        metavar="FILE",
    )
    url: str = option(
        "",
        "URL of a running server, without /v1 (default: a pool on this machine, which ends with the"
        " batch)",
        metavar="URL",
        excludes="model",
    )
    api_key: str = option(
        "", "API key to send (use the variable; default: none)", metavar="KEY", secret=True
    )
    max_concurrency: int = option(64, "most requests in flight", least=1, most=4096)
    # No other process needs to know the pool's port.
    port: int = option(
        0, "port on which the pool's router listens; 0: a free one", least=0, most=MAX_PORT
    )
