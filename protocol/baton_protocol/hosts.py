"""Which `Host` headers a server accepts: protection against DNS rebinding.

A page from evil.example can make that name resolve to 127.0.0.1. The browser then treats this
server and the page as one origin, and only the `Host` header shows the difference. So a server that
listens on a loopback address accepts only the names of this machine. A server that listens
elsewhere cannot know its names: they belong to services, gateways and ingresses.
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
    """The `Host` headers that one server accepts.

    `listens` is the host that the server's socket is bound to. `allowed` adds names: a name without
    a port matches every port, and ANY matches every host. A server that listens on a loopback
    address accepts the names of this machine and those in `allowed`. Any other server accepts every
    host if `allowed` is empty; otherwise it accepts `allowed` and all IP addresses, since DNS
    rebinding needs a name.
    """

    def __init__(self, listens: str, allowed: Iterable[str] = ()) -> None:
        local = is_loopback(listens)
        names = [_bracketed(host.lower()) for host in allowed]
        self._any = ANY in names or not (local or names)
        self._addresses = not local
        self._known = frozenset([*_THIS_MACHINE, _bracketed(listens.lower()), *names])

    def allows(self, host: str) -> bool:
        """Return whether the server accepts a request with this `Host` header.

        "" (no header) is accepted: such a client is not a browser.
        """
        return self._any or host in self._known or self._knows(host)

    def _knows(self, host: str) -> bool:
        lower = host.lower()
        name = _PORT.sub("", lower)
        known = not lower or lower in self._known or name in self._known
        return known or (self._addresses and _ADDRESS.fullmatch(name) is not None)


def _bracketed(host: str) -> str:
    """Put an IPv6 address in brackets, as in a URL."""
    return f"[{host}]" if host.count(":") > 1 and host[0] != "[" else host


def is_host(text: str) -> bool:
    """Return whether `Hosts` takes this as an allowed host: ANY, or a host with or without port."""
    return text == ANY or _HOST.fullmatch(text) is not None
