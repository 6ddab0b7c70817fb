"""`baton explain ID`: shows how a router served a request, as text or as JSON.

In: the request's id, as in the header x-baton-request-id, and the router's address. Out: text on
stdout. Uses the standard library's HTTP client, which imports fast.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from baton_cli.commands.explain_options import ExplainOptions
from baton_cli.commands.explain_text import lines_of
from baton_cli.errors import CommandError

TIMEOUT_S = 10.0


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
    base = urlsplit(options.url)
    if base.scheme not in ("http", "https") or not base.hostname:
        raise CommandError(f"--url {options.url} is not a URL; write http://HOST:PORT")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    path = f"{base.path.rstrip('/')}/requests/{quote(options.id, safe='')}"
    link = _connection(base)
    try:
        link.request("GET", path, headers=headers)
        response = link.getresponse()
        body = json.loads(response.read())
        if response.status != 200:
            raise CommandError(f"{body['error']['message']} (HTTP {response.status})")
        return dict(body)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"no router answers at {options.url}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{options.url} is not a Baton router: {error!r}") from error
    finally:
        link.close()


def _connection(base: SplitResult) -> http.client.HTTPConnection:
    secure = base.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    assert base.hostname is not None
    try:
        return kind(base.hostname, base.port, timeout=TIMEOUT_S)
    except ValueError as error:
        raise CommandError(f"--url {base.geturl()}: {error}") from error
