"""Flags of `baton usage`: a router, days, and the form of the table."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.commands.router_options import ClientOptions
from baton_protocol.options import option


@dataclass(frozen=True, kw_only=True)
class UsageOptions(ClientOptions):
    TITLE = "usage"

    since: str = option(
        "", "first day, as 2026-01-31 (default: 29 days before the last)", metavar="DAY"
    )
    until: str = option("", "last day (default: today, in UTC)", metavar="DAY")
    by: tuple[str, ...] = option(
        ("tenant",), "what rows are grouped by: day, tenant, model, node, cause", metavar="NAME,..."
    )
    csv: bool = option(False, "print the table as CSV", excludes="json")
    json: bool = option(False, "print the router's complete answer as JSON")
