"""Flags of `baton model`: the model to fetch, and its target folder."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.options.flag import flag
from baton_cli.options.records import CommonOptions, StoreLoginOptions
from baton_engine.config.engine_config import ByteSize


@dataclass(frozen=True, kw_only=True)
class FetchOptions(StoreLoginOptions):
    TITLE = "fetch"

    source: str = flag("", "hf://ORG/NAME[@REVISION]", metavar="SOURCE", positional=True)
    to: str = flag("", "the folder that gets the model's folder", metavar="DIR")
    node: str = flag(
        "", "the node that it is for, told to the pool (default: the host's name)", metavar="NAME"
    )
    room: ByteSize | None = flag(
        None,
        "what the folder may take: a larger model is refused before it is fetched (default: what"
        " the disk has free)",
        least=0,
    )
    weights: bool = flag(True, "fetch the weights too; the sim engine needs none")
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    redis_index: str = flag(
        "", "Redis that hears of the progress (default: none does)", metavar="URL", secret=True
    )


@dataclass(frozen=True, kw_only=True)
class FetchDemoOptions(CommonOptions):
    TITLE = "demo model"

    cache: str = flag(
        "", "where the converted model is kept (default: the user's cache folder)", metavar="DIR"
    )
