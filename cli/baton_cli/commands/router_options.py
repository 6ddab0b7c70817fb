"""Flags of the commands that ask a running router: its address, and a key.

CommonOptions
`-- ClientOptions         the router
    |-- ExplainOptions    `baton explain` (see explain_options)
    |-- UsageOptions      `baton usage` (see usage_options)
    |-- ChatOptions       `baton chat`
    `-- TopOptions        `baton top`
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.options.records import CommonOptions
from baton_protocol.options import option


@dataclass(frozen=True, kw_only=True)
class ClientOptions(CommonOptions):
    TITLE = "router"

    url: str = option("http://127.0.0.1:8000", "URL of the router", metavar="URL")
    api_key: str = option(
        "",
        "key of a tenant or of the admin (use the variable; default: none)",
        metavar="KEY",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ClientOptions):
    TITLE = "chat"

    system: str = option("", "system prompt (default: the model's own)", metavar="TEXT")
    max_tokens: int | None = option(
        None, "maximum length of an answer in tokens (default: the router's)", least=1
    )


@dataclass(frozen=True, kw_only=True)
class TopOptions(ClientOptions):
    TITLE = "top"

    once: bool = option(False, "show the pool once, as text, and exit")
    json: bool = option(False, "print one JSON object per second instead of tables")
