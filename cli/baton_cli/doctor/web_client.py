"""Asks a router or a node over HTTP, with the standard library alone."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import msgspec

from baton_cli.doctor.host import Host

ANSWER_S = 2.0
# No answer, or one that cannot be read.
FAILURES = (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class WebClient:
    """Asks one server; `key` "" sends none."""

    url: str
    key: str = field(repr=False)
    timeout_s: float

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raise OSError, HTTPException, or ValueError for a URL that is none."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url.rstrip("/") + path, headers=headers)
        # Routers and nodes are no hosts for a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read()


class Version(msgspec.Struct):
    """The answer of /version, whatever else it has."""

    version: str


def is_router(url: str, host: Host) -> bool:
    """Whether a router of Baton answers at this URL."""
    try:
        _, body = WebClient(url, "", ANSWER_S * host.patience).get("/version")
        msgspec.json.decode(body, type=Version)
    except FAILURES:
        return False
    return True
