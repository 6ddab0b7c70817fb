"""`baton explain ID`: shows how a router served a request, as text or as JSON.

In: the request's id, as in the header x-baton-request-id, and the router's address. Out: text on
stdout.
"""

from __future__ import annotations

import json
from typing import Any

from baton_cli.commands.explain_options import ExplainOptions
from baton_cli.terminal.explain_text import explanation_lines, find_explanation
from baton_cli.terminal.remote_router import RemoteRouter


def run(options: ExplainOptions) -> int:
    call = ask(options)
    print(json.dumps(call, indent=2) if options.json else "\n".join(explanation_lines(call)))
    return 0


def ask(options: ExplainOptions) -> dict[str, Any]:
    """Return the router's JSON. Raise CommandError if the router does not answer, or with its error
    message if it has no explanation."""
    return find_explanation(RemoteRouter(options.url, options.api_key), options.id)
