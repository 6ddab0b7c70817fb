"""Flags of `baton explain`: a request, and the router that served it."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.options.flag import flag
from baton_cli.options.records import CommonOptions


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(CommonOptions):
    TITLE = "explain"

    id: str = flag("", "a request's x-baton-request-id", metavar="ID", positional=True)
    url: str = flag("http://127.0.0.1:8000", "the router that served it", metavar="URL")
    api_key: str = flag(
        "",
        "the request's tenant's, or the admin's (better by the variable; default: none)",
        metavar="KEY",
        secret=True,
    )
    json: bool = flag(False, "all of it, as the router says it")
