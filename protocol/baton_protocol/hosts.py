"""Which names a server on this machine's loopback answers to.

A page of evil.example may have that name lead to 127.0.0.1 (DNS rebinding). To the browser, this
server and that page are then of one origin, and only the `Host` header tells that it is not. So a
server that listens on a loopback address answers to the names of this machine alone. One that
listens elsewhere is reached by names that it cannot know: services, gateways, ingresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from baton_protocol.link import is_loopback

ANY = "*"
_HOST = re.compile(r"(?:[\w.-]+|\[[\da-f:.]+\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
_PORT = re.compile(r":\d*$")
_ADDRESS = re.compile(r"[\d.]+|\[.*\]")
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")


class Hosts:
    """`listens` is the host of the server's own socket, `allowed` are more names (of any port) and
    names with a port; ANY allows all. Without `allowed` that is so for a server that does not
    listen on a loopback address; with it, such a server is also reached by addresses: a name can be
    rebound, and an address cannot."""

    def __init__(self, listens: str, allowed: Iterable[str] = ()) -> None:
        local = is_loopback(listens)
        more = [_bracketed(one.lower()) for one in allowed]
        self._any = ANY in more or not (local or more)
        self._addresses = not local
        self._known = frozenset([*_THIS_MACHINE, _bracketed(listens.lower()), *more])

    def allows(self, host: str) -> bool:
        """Whether the server answers to the `Host` of a request. A client that says none ("") is no
        browser."""
        return self._any or host in self._known or self._knows(host)

    def _knows(self, host: str) -> bool:
        whole = host.lower()
        name = _PORT.sub("", whole)
        known = not whole or whole in self._known or name in self._known
        return known or (self._addresses and _ADDRESS.fullmatch(name) is not None)


def _bracketed(host: str) -> str:
    """An IPv6 address as it stands in a URL."""
    return f"[{host}]" if host.count(":") > 1 and host[0] != "[" else host


def is_host(text: str) -> bool:
    """Whether this can be allowed: ANY, or a host with or without a port."""
    return text == ANY or _HOST.fullmatch(text) is not None
