"""Flags of `baton explain`: a request, and the router that served it."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.commands.router_options import ClientOptions
from baton_protocol.options import option


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ClientOptions):
    TITLE = "explain"

    id: str = option("", "the request's x-baton-request-id", metavar="ID", positional=True)
    url: str = option("http://127.0.0.1:8000", "URL of the router that served it", metavar="URL")
    api_key: str = option(
        "",
        "key of the request's tenant or of the admin (use the variable; default: none)",
        metavar="KEY",
        secret=True,
    )
    json: bool = option(False, "print the router's complete answer as JSON")
