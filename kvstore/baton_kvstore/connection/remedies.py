"""What a user does about a Redis server that cannot be used.

In: the error of an attempt, the server's address. Out: words and commands. `baton up` and
`baton doctor` say the same.
"""

from __future__ import annotations

import shlex
import socket
import ssl

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.resp_connection import LOGIN, OLD
from baton_kvstore.connection.server_settings import INDEX_MEMORY, REPLIES_BYTES, StoreRole
from baton_kvstore.errors import LinkBroken, LinkTimeout, ProtocolBroken, ServerRefused, StoreError

# maxmemory, maxmemory-policy, and other settings
_STARTED_WITH: dict[StoreRole, tuple[int, str, str]] = {
    "index": (INDEX_MEMORY, "noeviction", ""),
    "data": (1 << 30, "volatile-ttl", f" --client-output-buffer-limit normal {REPLIES_BYTES} 0 0"),
}
_REFUSED = {
    "NOPERM": "allow the user all commands and keys: ACL SETUSER NAME ~* &* +@all",
    "LOADING": "wait until the server has loaded its data",
    "READONLY": "name the primary, not its replica",
    "MOVED": "name a server that is no part of a Redis Cluster",
    "OOM": "raise its maxmemory",
    OLD: "start a newer Redis, or Valkey",
}


def remedy_of(error: StoreError, endpoint: Endpoint, role: StoreRole) -> str:
    """What to do about this error of this server; "" if the error says it."""
    cause = error.__cause__
    if isinstance(error, ServerRefused):
        login = "AUTH" in error.code or "WRONGPASS" in str(error) or "password" in str(error)
        return LOGIN if login else _REFUSED.get(error.code, "see the server's log")
    if isinstance(error, LinkTimeout):
        return "see whether the server is frozen or busy (its log, SLOWLOG GET), or the URL wrong"
    if isinstance(cause, ssl.SSLError):
        return "check ssl_ca_certs in the URL, the certificate's names, and whether it uses TLS"
    if isinstance(error, ProtocolBroken):
        return "name a Redis server; one with TLS needs rediss://"
    if isinstance(cause, socket.gaierror):
        return "correct the host name in the URL"
    if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
        return f"start it there: {start_command(endpoint, role)}"
    if isinstance(error, LinkBroken):
        return "see whether it is a Redis server, with or without TLS (rediss://), and its log"
    return ""


def start_command(endpoint: Endpoint, role: StoreRole) -> str:
    """A command that starts a server with the settings of this role at this address."""
    if endpoint.kind == "unix":
        place = f"--port 0 --unixsocket {shlex.quote(endpoint.path)}"
    else:
        place = f"--{'tls-' if endpoint.kind == 'tls' else ''}port {endpoint.port}"
    memory, policy, more = _STARTED_WITH[role]
    return (
        f"redis-server {place} --maxmemory {memory} --maxmemory-policy {policy} "
        f"--save '' --appendonly no{more}"
    )


def client_command(endpoint: Endpoint, line: str) -> str:
    """A shell command that sends `line` to the server. The password comes from the variable
    REDISCLI_AUTH, not from the command."""
    words = ["redis-cli"]
    if endpoint.kind == "unix":
        words += ["-s", shlex.quote(endpoint.path)]
    else:
        words += ["-h", shlex.quote(endpoint.host), "-p", str(endpoint.port)]
        words += ["--tls"] if endpoint.kind == "tls" else []
    if endpoint.username:
        words += ["--user", shlex.quote(endpoint.username)]
    return " ".join([*words, line])
