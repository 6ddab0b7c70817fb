"""`baton explain ID`: shows how a router served a request, as text or as JSON.

In: the request's id, as in the header x-baton-request-id, and the router's address. Out: text on
stdout.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from baton_cli.commands.explain_options import ExplainOptions
from baton_cli.commands.explain_text import lines_of
from baton_cli.commands.router_page import read_page
from baton_cli.errors import CommandError


def run(options: ExplainOptions) -> int:
    call = ask(options)
    try:
        shown = json.dumps(call, indent=2) if options.json else "\n".join(lines_of(call))
    except (KeyError, TypeError) as error:
        raise CommandError(
            f"{options.url} did not answer with an explanation ({error!r}); check that it is a "
            "router of this version"
        ) from error
    print(shown)
    return 0


def ask(options: ExplainOptions) -> dict[str, Any]:
    """Return the router's JSON. Raise CommandError if the router does not answer, or with its error
    message if it has no explanation."""
    body = read_page(options.url, f"/requests/{quote(options.id, safe='')}", options.api_key)
    try:
        return dict(json.loads(body))
    except (ValueError, TypeError) as error:
        raise CommandError(f"{options.url} is not a Baton router: {error!r}") from error
