"""The path that a client means.

In: a request as it was sent. Out: the request without the slashes too many of a careless base URL.
"""

from __future__ import annotations

import re

from aiohttp.http import RawRequestMessage

_SLASHES = re.compile("/{2,}")
# Requests below this path change what nodes do. A proxy may guard them by this very beginning.
COMMANDS = "/nodes/"


def with_plain_path(message: RawRequestMessage) -> RawRequestMessage:
    """The request with the path that its client means: `//v1/models` and `/v1/models/` come from a
    base URL with a slash too many. The query stays as it is."""
    path = message.path.partition("?")[0]
    if not path.startswith("/") or not ("//" in path or path.endswith("/")):
        return message
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    if plain == path or f"{plain}/".startswith(COMMANDS):
        return message
    url = message.url.with_path(plain, encoded=True, keep_query=True)
    return message._replace(path=plain + message.path[len(path) :], url=url)
