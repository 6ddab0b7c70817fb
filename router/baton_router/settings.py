"""The settings of a router. The command line builds them; tests build them by hand.

Nodes come from the registry behind `index_url`, from the static list `nodes`, or from both. `check`
refuses settings with neither, since such a router could never serve.
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
    """Timeouts and sizes that suit every pool. No option sets them; tests pass smaller ones."""

    # A link pings its node every `ping_s`. If unsent bytes exceed `max_unsent_bytes` and do not
    # shrink within `choked_s`, the link ends.
    ping_s: float = 1.0
    choked_s: float = 1.0
    max_unsent_bytes: int = 64 << 20
    # A node that refused a request is not tried again for this time; its load report says why soon.
    refused_s: float = 1.0
    # A drain waits this long for other nodes to become able to serve, and for the node to obey.
    drain_answer_s: float = 2.0
    # All files of one node's tokenizer together. The largest tokenizers have 35 MB.
    max_artifact_bytes: int = 128 << 20
    retry_model_s: float = 1.0  # pause after a failed fetch of a node's files
    report_every_s: float = 1.0  # interval of load reports, which expire after `report_ttl_s`
    report_ttl_s: float = 5.0
    reload_every_s: float = 1.0  # interval of checks of the files of keys and tenants
    cut_off_s: float = 10.0  # from the error that ends an unread stream to closing its connection


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names end in the unit (`_ms`, `_s`, `_bytes`).

    `nodes` holds base URLs (`http://host:port`). `link_token` is the token that the nodes require
    ("": none). `port` 0 takes a free port. Splitting a request may cost at most `handoff_slack_ms`
    plus `handoff_slack_share` of the decode node's own prediction (DESIGN 6). `placement` is the
    ranking of nodes; with `allow_policy_header` a request may choose it (`x-baton-policy`).

    A node whose link broke has `link_patience_s` to come back with its requests. A node whose
    engine makes no step for `stall_timeout_s` is lost. `missing_role` decides about a request whose
    role has no ready node: the other role runs it, it waits, or it is refused. A request waits for
    its first place for `unready_wait_s`; its stream gets a keep-alive every `keepalive_s`. With
    `wake_wait_s` above 0 the pool may have no node at all: the router is ready even so, and holds
    requests for up to that time.

    The router keeps the explanations of the last `explain_requests` ended calls.

    A call may ask for `max_call_sequences`: its prompts times its choices. A call that finds every
    node full waits in the router for at most `queue_timeout_s` until it begins, and at most
    `max_queued` calls wait. A node is full with `max_inflight` sequences (0: the number it
    reports), or with queued prompts that take `admission_queue_ms` to compute (0: no call ever
    waits here).

    A body has at most `max_body_bytes`. Large bodies in progress have at most `max_bodies_bytes`
    together, and those of one tenant half of that (see `http.body_limits`). Headers must arrive
    within `header_timeout_s` of the connection or of their first byte. A body may pause for
    `body_timeout_s` and must arrive with at least `body_bytes_per_s`. A connection without a
    request is closed after `idle_timeout_s`. That must be longer than a proxy before the router
    keeps connections; otherwise the proxy may send a request into a connection that is being
    closed.

    `api_keys` is a file of keys (see `auth`; "": no key is needed). `tenants` is a file of limits
    (see `tenant_limits`). Both are reloaded when they change. `admin_key` opens /pool, /metrics and
    the routes that drain nodes, like the admins' keys of the file. With `sharing` "tenant", tenants
    do not share KV: the router derives a salt per tenant from `tenant_secret`, which must be the
    same for all routers of a pool.

    `expect_nodes` are names of nodes that `/ready?all=1` waits for, beside those that are found.

    `allowed_hosts` are host names that the router answers to, beside those of this machine if it
    listens on a loopback address. Pages of `cors_origins` may use it (see `http.cors`).

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
    bounds: Bounds = Bounds()

    def __repr__(self) -> str:
        """Omits URLs, tokens and secrets, so that they do not reach a log."""
        return f"RouterSettings(pool={self.pool!r}, port={self.port})"

    def check(self) -> None:
        """Raise InvalidRequest with the setting, its value and the allowed values."""
        if self.index_url is None and not self.nodes:
            raise InvalidRequest(
                "the router knows no nodes: give an index URL or a list of nodes", param="nodes"
            )
        if not 0 <= self.port <= MAX_PORT:
            raise InvalidRequest(f"port is {self.port}; use 0 to {MAX_PORT}", param="port")
        for address in self.nodes:
            if not address.startswith(("http://", "https://")):
                raise InvalidRequest(
                    f"node address {address!r} is not a URL; use http://host:port", param="nodes"
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
                "admin_key contains characters that no HTTP header can carry; use "
                "printable ASCII characters",
                param="admin_key",
            )
        self._check_pages()
        self._check_sharing()

    def _check_pages(self) -> None:
        for host in self.allowed_hosts:
            if not is_host(host):
                raise InvalidRequest(
                    f"allowed host {host!r} is invalid; use a name or an address, with or "
                    f"without a port, or {ANY} for all",
                    param="allowed_hosts",
                )
        for origin in self.cors_origins:
            if origin != ANY and plain_origin(origin) is None:
                raise InvalidRequest(
                    f"origin {origin!r} is invalid; use https://host or http://host:port, "
                    f"without a path, or {ANY} for all",
                    param="cors_origins",
                )

    def _check_sharing(self) -> None:
        if self.sharing == "pool":
            return
        if not self.api_keys:
            raise InvalidRequest(
                "sharing is 'tenant', but the router cannot tell tenants apart; give a file of "
                "API keys (--api-keys), or share in the pool (--sharing pool)",
                param="sharing",
            )
        if not self.tenant_secret:
            raise InvalidRequest(
                "sharing is 'tenant', but there is no tenant_secret to derive salts from; give "
                "all routers of the pool the same secret (BATON_TENANT_SECRET), or share in "
                "the pool (--sharing pool)",
                param="tenant_secret",
            )


def plain_origin(text: str) -> str | None:
    """An origin as browsers send it: lower case, without the scheme's default port. None if the
    text is not an origin, such as the "null" of sandboxed pages."""
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
