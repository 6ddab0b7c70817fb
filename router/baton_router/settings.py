"""What a router is told at start; the command line builds it, tests build it by hand.

Nodes come from the registry behind `index_url`, from the static list `nodes`, or from both. With
neither a router starts and answers 503 until it is told of nodes, which is never: `check` refuses.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.hosts import ANY, is_host

Handoff = Literal["auto", "always", "never"]
MissingRole = Literal["aggregate", "queue", "fail"]
Ranking = Literal["cost", "random", "round-robin", "least-request", "prefix"]
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
Sharing = Literal["pool", "tenant"]
MAX_PORT = 65535
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?/?", re.ASCII)
USUAL_PORTS = {"http": 80, "https": 443}


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waits and sizes that suit every pool: no option sets them, and tests pass smaller ones."""

    # A link pings its node so often; unread bytes that become no fewer for so long end it.
    ping_s: float = 1.0
    choked_s: float = 1.0
    max_unsent_bytes: int = 64 << 20
    # A node that refused a request is not asked again for so long: it says soon why not to.
    refused_s: float = 1.0
    # A drain waits so long until others can serve, and the node says that it drains.
    drain_answer_s: float = 2.0
    # Of all files of one node that its tokenizer is made of. The largest tokenizers have 35 MB.
    max_artifact_bytes: int = 128 << 20
    retry_model_s: float = 1.0  # after a node's files could not be fetched
    report_every_s: float = 1.0  # to the index, which forgets a report after `report_ttl_s`
    report_ttl_s: float = 5.0
    reload_every_s: float = 1.0  # looks at the files of keys and tenants
    cut_off_s: float = (
        10.0  # from the error that ends an unread stream to the end of its connection
    )


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds and seconds are in the names; sizes are bytes.

    `nodes` holds base URLs (`http://host:port`); `link_token` is what they ask for, "" nothing.
    `port` 0 takes a free one. Splitting costs at most
    `handoff_slack_ms` + `handoff_slack_share` of the decode node's own prediction (DESIGN 6).
    `placement` says which node is best; with `allow_policy_header` a request may say it for itself
    (`x-baton-policy`).

    A node whose link broke has `link_patience_s` to come back with what it runs; one whose engine
    makes no step for `stall_timeout_s` is lost. `missing_role` says what becomes of a request whose
    role has no ready node: the other role does it, it waits, or it is refused. A request that waits
    for its first place does so for `unready_wait_s`; its client gets a sign of life each
    `keepalive_s`. With `wake_wait_s` above 0 the pool may have no node at all: the router is ready
    even so, and holds requests that long for one.

    Of the last `explain_requests` that ended it can be told how they were served.

    A call may ask for `max_call_sequences`: its prompts times its choices. A call that finds every
    node full waits in the router for at most `queue_timeout_s` until it begins, and at most
    `max_queued` do. A node is full with `max_inflight` sequences (0: as many as it says that
    it computes at once), or with prompts for `admission_queue_ms` before it (0: nobody waits here).

    A body has at most `max_body_bytes`, and large ones that are read, parsed or tokenized at a time
    have `max_bodies_bytes` together, of one tenant half of that (`http.connections`). Headers have
    `header_timeout_s` to come, from the connection or their first byte on; a body may pause for
    `body_timeout_s`, and has to come with `body_bytes_per_s` at least. A connection without a
    request is closed after `idle_timeout_s`: longer than what is before a router keeps it, or that
    may send a request into a connection that is just being closed.

    `api_keys` is a file (see `auth`), "" asks nobody for a key; `tenants` is one of what each
    tenant may (see `tenant_limits`); both are read again when they change. `admin_key` opens /pool,
    /metrics and the routes that drain nodes, beside the admins' keys of the file. With `sharing`
    "tenant" no tenant's KV serves another; their names' salts are derived from `tenant_secret`,
    which all routers of a pool share.

    `expect_nodes` are names of nodes that `/ready?all=1` waits for, beside those that are found.

    `allowed_hosts` are names that it answers to, beside those of this machine where it listens on
    a loopback address, and pages of `cors_origins` may use it (see `http.app`).

    `worker_socket` is the unix socket of one worker among several on the same port, beside those of
    its siblings (see `workers`); "" listens alone.

    `bounds` has no option on the command line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    pool: str = "default"
    index_url: str | None = None
    nodes: tuple[str, ...] = ()
    link_token: str = ""
    served_model_name: str | None = None
    api_keys: str = ""
    tenants: str = ""
    admin_key: str = ""
    sharing: Sharing = "pool"
    tenant_secret: str = ""
    handoff: Handoff = "auto"
    handoff_min_tokens: int = 128
    handoff_slack_ms: float = 20.0
    handoff_slack_share: float = 0.1
    placement: Ranking = "cost"
    allow_policy_header: bool = False
    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 48 << 20
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    body_bytes_per_s: int = 16 << 10
    idle_timeout_s: float = 620.0
    max_view_chunks: int = 1_000_000
    lookup_timeout_ms: float = 50.0
    discovery_interval_s: float = 1.0
    reconnect_max_s: float = 2.0
    missing_role: MissingRole = "aggregate"
    stall_timeout_s: float = 20.0
    link_patience_s: float = 1.0
    unready_wait_s: float = 30.0
    wake_wait_s: float = 0.0
    explain_requests: int = 1000
    keepalive_s: float = 15.0
    request_timeout_s: float = 600.0
    admission_queue_ms: float = 1000.0
    max_inflight: int = 0
    max_queued: int = 1000
    max_call_sequences: int = 2048
    queue_timeout_s: float = 30.0
    shutdown_deadline_s: float = 10.0
    expect_nodes: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    worker_socket: str = ""
    bounds: Bounds = Bounds()

    def __repr__(self) -> str:
        """Without URL, token and secret: what is secret must not reach a log."""
        return f"RouterSettings(pool={self.pool!r}, port={self.port})"

    def check(self) -> None:
        """Raise InvalidRequest naming the setting, its value and what is allowed."""
        if self.index_url is None and not self.nodes:
            raise InvalidRequest(
                "the router knows no nodes: give an index URL or a list of nodes", param="nodes"
            )
        if not 0 <= self.port <= MAX_PORT:
            raise InvalidRequest(f"port is {self.port}; use 0 to {MAX_PORT}", param="port")
        for address in self.nodes:
            if not address.startswith(("http://", "https://")):
                raise InvalidRequest(
                    f"node address {address!r} is no URL; use http://host:port", param="nodes"
                )
        for name in _POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise InvalidRequest(f"{name} is {value}; it must be above 0", param=name)
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not value >= 0:
                raise InvalidRequest(f"{name} is {value}; it must be 0 or more", param=name)
        if not (self.admin_key.isascii() and self.admin_key.isprintable()):
            raise InvalidRequest(
                "admin_key holds what no header can carry; use letters, digits and signs",
                param="admin_key",
            )
        self._check_pages()
        self._check_sharing()

    def _check_pages(self) -> None:
        for host in self.allowed_hosts:
            if not is_host(host):
                raise InvalidRequest(
                    f"allowed host {host!r} is none; use a name or an address, with or without a"
                    f" port, or {ANY} for all",
                    param="allowed_hosts",
                )
        for origin in self.cors_origins:
            if origin != ANY and plain_origin(origin) is None:
                raise InvalidRequest(
                    f"origin {origin!r} is none; use https://host or http://host:port, without a"
                    f" path, or {ANY} for all",
                    param="cors_origins",
                )

    def _check_sharing(self) -> None:
        if self.sharing == "pool":
            return
        if not self.api_keys:
            raise InvalidRequest(
                "sharing is 'tenant', and nothing tells tenants apart: give a file of API keys"
                " (--api-keys), or share in the pool (--sharing pool)",
                param="sharing",
            )
        if not self.tenant_secret:
            raise InvalidRequest(
                "sharing is 'tenant', and no tenant_secret is there to derive salts from: give"
                " all routers of the pool the same (BATON_TENANT_SECRET), or share in the pool"
                " (--sharing pool)",
                param="tenant_secret",
            )


def plain_origin(text: str) -> str | None:
    """An origin as browsers say it: in lower case, without its scheme's own port. None for what is
    no origin; "null" is that of anybody's sandboxed page."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        return None
    scheme, host, port = found.groups(default="")
    return f"{scheme}://{host}" + ("" if port == f":{USUAL_PORTS.get(scheme)}" else port)


_POSITIVE = (
    "max_body_bytes",
    "max_bodies_bytes",
    "header_timeout_s",
    "body_timeout_s",
    "body_bytes_per_s",
    "idle_timeout_s",
    "max_view_chunks",
    "lookup_timeout_ms",
    "discovery_interval_s",
    "reconnect_max_s",
    "stall_timeout_s",
    "keepalive_s",
    "request_timeout_s",
    "queue_timeout_s",
    "max_call_sequences",
)
_NOT_NEGATIVE = (
    "handoff_min_tokens",
    "handoff_slack_ms",
    "handoff_slack_share",
    "link_patience_s",
    "unready_wait_s",
    "wake_wait_s",
    "explain_requests",
    "admission_queue_ms",
    "max_inflight",
    "max_queued",
    "shutdown_deadline_s",
)
