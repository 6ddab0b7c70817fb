"""The path that a client means.

In: a request as it was sent. Out: the request without the slashes too many of a careless base URL,
and without the path of a proxy.
"""

from __future__ import annotations

import re

from aiohttp.http import RawRequestMessage

_SLASHES = re.compile("/{2,}")
# Requests below this path change what nodes do. A proxy may guard them by this very beginning.
COMMANDS = "/nodes/"


def with_plain_path(message: RawRequestMessage, root: str = "") -> RawRequestMessage:
    """The request with the path that its client means: `//v1/models` and `/v1/models/` come from a
    base URL with a slash too many, `/llm/v1/models` from a proxy that passes the path `root` on.
    The query stays as it is. The path `root` itself stays: it is no folder without a slash at its
    end, which links of a page there need."""
    path = message.path.partition("?")[0]
    if not path.startswith("/") or (root and path == root):
        return message
    plain = path
    if "//" in path or path.endswith("/"):
        plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    if root and f"{plain}/".startswith(f"{root}/"):
        plain = plain[len(root) :] or "/"
    if plain == path:
        return message
    if f"{plain}/".startswith(COMMANDS) and path != root + plain:
        return message
    url = message.url.with_path(plain, encoded=True, keep_query=True)
    return message._replace(path=plain + message.path[len(path) :], url=url)
