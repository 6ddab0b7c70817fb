"""Reads one page of a router. Uses the standard library's HTTP client, which imports fast.

In: the router's URL, a path, an API key. Out: the page's bytes, or a CommandError with the reason.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import SplitResult, urlsplit

from baton_cli.errors import CommandError

TIMEOUT_S = 10.0


def read_page(url: str, path: str, api_key: str) -> bytes:
    """Raise CommandError if the router does not answer, or with its error message."""
    base = urlsplit(url)
    if base.scheme not in ("http", "https") or not base.hostname:
        raise CommandError(f"--url {url} is not a URL; write http://HOST:PORT")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    link = _connection(base)
    try:
        link.request("GET", f"{base.path.rstrip('/')}{path}", headers=headers)
        response = link.getresponse()
        body = response.read()
        if response.status != 200:
            message = json.loads(body)["error"]["message"]
            raise CommandError(f"{message} (HTTP {response.status})")
        return body
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"no router answers at {url}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{url} is not a Baton router: {error!r}") from error
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
