"""Flags of `baton model`: the model to fetch, and its target folder."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.options.records import CommonOptions, StoreLoginOptions
from baton_protocol.options import ByteSize, option


@dataclass(frozen=True, kw_only=True)
class FetchOptions(StoreLoginOptions):
    TITLE = "fetch"

    source: str = option("", "hf://ORG/NAME[@REVISION]", metavar="SOURCE", positional=True)
    to: str = option("", "folder in which the model's folder is created", metavar="DIR")
    node: str = option(
        "",
        "name of the node that needs the model, for progress reports (default: host name)",
        metavar="NAME",
    )
    room: ByteSize | None = option(
        None,
        "maximum size of the model; a larger one is refused before it is fetched (default: the"
        " free disk space)",
        least=0,
    )
    weights: bool = option(True, "fetch the weights too; the simulated engine needs none")
    pool: str = option("default", "name of the pool, part of its keys in the index", metavar="NAME")
    redis_index: str = option(
        "", "Redis to which progress is reported (default: none)", metavar="URL", secret=True
    )


@dataclass(frozen=True, kw_only=True)
class FetchDemoOptions(CommonOptions):
    TITLE = "demo model"

    cache: str = option(
        "", "where the converted model is kept (default: the user's cache folder)", metavar="DIR"
    )
