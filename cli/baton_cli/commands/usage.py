"""`baton usage`: what tenants used, and where the time of nodes went, as a table, CSV or JSON.

In: the address of any router of the pool, days, what rows are grouped by. Out: text on stdout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from baton_cli.commands.usage_options import UsageOptions
from baton_cli.errors import CommandError
from baton_cli.terminal.remote_router import RemoteRouter
from baton_cli.terminal.text import align

Json = dict[str, Any]
# The columns of figures: key in the router's answer, head.
FIGURES = (
    ("busy_ms", "BUSY S"),
    ("idle_ms", "IDLE S"),
    ("calls", "CALLS"),
    ("errors", "ERRORS"),
    ("prompt_tokens", "PROMPT"),
    ("cached_tokens", "CACHED"),
    ("completion_tokens", "COMPLETION"),
    ("cost", "COST"),
)


def run(options: UsageOptions) -> int:
    body = ask(options).decode()
    if options.csv:
        print(body, end="")
        return 0
    try:
        answer = json.loads(body)
        shown = json.dumps(answer, indent=2) if options.json else "\n".join(lines_of(answer))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{options.url} did not answer with its books ({error!r}); check that it is a "
            "router of this version"
        ) from error
    print(shown)
    return 0


def ask(options: UsageOptions) -> bytes:
    """The router's answer. Raise CommandError."""
    query = {"by": ",".join(options.by), "since": options.since, "until": options.until}
    query["format"] = "csv" if options.csv else "json"
    given = {name: value for name, value in query.items() if value}
    return RemoteRouter(options.url, options.api_key).read(f"/usage?{urlencode(given)}")


def lines_of(answer: Json) -> Iterator[str]:
    """The lines of the table. Raise KeyError or TypeError for other JSON."""
    by = answer["by"]
    figures = [one for one in FIGURES if one[0] != "cost" or "currency" in answer]
    heads = [*(name.upper() for name in by), *(head for _, head in figures)]
    rows = [
        [*(row[name] or "-" for name in by), *(_cell(row, name) for name, _ in figures)]
        for row in answer["rows"]
    ]
    yield f"pool {answer['pool']}, {answer['since']} to {answer['until']}"
    yield from align([heads, *rows], len(by))
    if answer.get("currency"):
        yield f"costs are in {answer['currency']}"
    if answer["covers"] == "live":
        yield (
            "this pool has no index: the table has only what the nodes and the router that live now"
            " have counted since they started"
        )


def _cell(row: Json, name: str) -> str:
    value = row.get(name, 0)
    if name == "cost":
        return f"{value:.4f}"
    return f"{value / 1000:.1f}" if name.endswith("_ms") else str(value)
