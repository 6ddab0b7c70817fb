"""Why a server of an external store cannot be used, in words for the pool's status.

In: an error of an attempt to use the server. Out: a `StoreProblem`, or None for an error that is
not the server's. The words come from a fixed list: a server may be anything, and nothing that it
sent may reach the status, nor a login or the address that a name stands for.

    sure        the pool's own pods would fail in the same way
    not sure    perhaps only the operator cannot reach it: a NetworkPolicy, or its own networks
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

import msgspec

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import CONNECT_TIMEOUT_S, OPERATION_TIMEOUT_S
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.errors import (
    LinkBroken,
    ProtocolBroken,
    ServerRefused,
    StoreError,
    StoreMisconfigured,
)
from baton_operator.kube.egress import AddressRefused

MOST_BYTES = 4 << 10  # of the reply to PING
_LOGIN = "it refuses the login; check the username and password in the Secret of secretRef"
_NO_ANSWER = "no answer in time"
_REPLIES = {
    "NOAUTH": "it requires a login; name a Secret with its password in secretRef",
    "WRONGPASS": _LOGIN,
    "NOPERM": "the login lacks rights; allow the user all commands and keys",
    "LOADING": "it is loading its data",
    "MASTERDOWN": "it is a replica without its primary",
    "READONLY": "it is a read-only replica; name the primary",
    "MOVED": "it is a node of a cluster; name a server that is not clustered",
    "OOM": "its memory is full",
    "MISCONF": "it cannot persist its data and refuses writes",
}


class StoreProblem(msgspec.Struct, frozen=True, kw_only=True):
    """`server`: its URL without a login. `role`: "index" or "data"."""

    role: str
    server: str
    cause: str
    sure: bool = True

    @property
    def words(self) -> str:
        return f"{self.role} server {self.server}: {self.cause}"


def problem_with(role: str, url: str, error: Exception) -> StoreProblem:
    """`url` is the server's, with or without a login."""
    endpoint, (cause, sure) = parse_endpoint(url), _cause(error)
    if cause == _NO_ANSWER and endpoint.kind == "tls":
        cause += "; does it use TLS?"  # a server without TLS waits for the rest of a command
    return StoreProblem(role=role, server=endpoint.label, cause=cause, sure=sure)


def _cause(error: BaseException) -> tuple[str, bool]:
    match error:
        case AddressRefused():
            return f"the operator may not connect to it: {error}", not error.configured
        case ServerRefused(code=code):
            return _REPLIES.get(code) or _login_words(str(error)), True
        case ProtocolBroken():
            return "it does not answer as a Redis server", True
        case StoreMisconfigured():
            return (
                "its TLS settings cannot be used; check ca.crt in the Secret of caSecretRef",
                True,
            )
        case ssl.SSLError():
            return "TLS failed; check the scheme, the certificate's names and caSecretRef", True
        case socket.gaierror():
            return "its host name is unknown", True
        case ConnectionRefusedError():
            return "it refuses the connection: nothing listens at this port", True
        case LinkBroken(__cause__=OSError() as below):
            return _cause(below)
        case ConnectionError() | LinkBroken():
            return "it closed the connection; is it a Redis server, with or without TLS?", True
        case TimeoutError() | StoreError():
            return _NO_ANSWER, False
    return "it cannot be reached", False


def _login_words(text: str) -> str:
    """Redis before 6.2 has no word of its own for a wrong password."""
    login = "AUTH" in text or "password" in text
    return _LOGIN if login else "it answers with an error instead of a reply"


async def ping(url: str, addresses: Sequence[str]) -> None:
    """Log in to the server at one of these addresses, and ask it for a sign of life. Raise
    StoreError or OSError."""
    link = AsyncResp(
        parse_endpoint(url),
        timeout_s=OPERATION_TIMEOUT_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        addresses=addresses,
        most_bytes=MOST_BYTES,
    )
    try:
        if await link.command(b"PING") != b"PONG":
            raise ProtocolBroken("not the reply to PING")
    finally:
        link.close()
