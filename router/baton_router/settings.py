"""The settings of a router: every option, declared once, and what tests tune.

    RouterSettings        address, nodes and keys of one router
    |-- RequestSettings   how a router handles requests
    |-- AdmissionSettings limits of tenants, and how calls queue while all nodes are full
    |-- FileSettings      where files and batches are kept, and their limits
    `-- TenantSettings    API keys, and what tenants share

The flags of `baton router` follow from the options; `baton up` has those of the four bases, too.
Names end in the unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.hosts import ANY, is_host
from baton_protocol.options import MAX_PORT, ByteSize, option, option_of
from baton_protocol.policies import Handoff, MissingRole, Ranking, Sharing

USUAL_PORTS = {"http": 80, "https": 443}
_ROOT_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?/?", re.ASCII)


class Tunables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts and sizes that suit every pool. No option sets them; tests pass other ones."""

    # A link pings its node every `ping_s`. If unsent bytes exceed `max_unsent_bytes` and do not
    # shrink within `choked_s`, the link ends. Pauses between attempts to reconnect grow to
    # `reconnect_max_s`.
    ping_s: float = 1.0
    choked_s: float = 1.0
    max_unsent_bytes: int = 64 << 20
    reconnect_max_s: float = 2.0
    # A node that refused a request is not tried again for this time; its load report says why soon.
    refused_s: float = 1.0
    # A drain waits this long for other nodes to become able to serve, and for the node to obey.
    drain_answer_s: float = 2.0
    # All files of one node's tokenizer together. The largest tokenizers have 35 MB.
    max_artifact_bytes: int = 128 << 20
    retry_sleep_s: float = 5.0  # pause after a node has refused to sleep or to wake up
    retry_model_s: float = 1.0  # pause after a failed fetch of a node's files
    report_every_s: float = 1.0  # interval of load reports, which expire after `report_ttl_s`
    report_ttl_s: float = 5.0
    reload_every_s: float = 1.0  # interval of checks of the files of keys and tenants
    cut_off_s: float = 10.0  # from the error that ends an unread stream to closing its connection
    lookup_timeout_ms: float = 50.0  # of a request's look-up in the index
    snapshot_every_s: float = 1.0  # interval of the live page's snapshots, while someone looks


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    # The heading in --help.
    TITLE: ClassVar[str] = "requests"

    handoff: Handoff = option(
        "auto", "when a prefill node computes the prompt; auto: if the hand-off costs little time"
    )
    handoff_min_tokens: int = option(
        128, "auto: prompts with fewer uncached tokens stay on the decode node", least=0
    )
    placement: Ranking = option(
        "cost", "how nodes are ranked: by predicted milliseconds, or by another policy to compare"
    )
    allow_policy_header: bool = option(
        False, "let a request choose its --placement by the header x-baton-policy"
    )
    missing_role: MissingRole = option(
        "aggregate",
        "if a role has no ready node: the other role does its work, requests wait, or they fail",
    )
    unready_wait_s: float = option(
        30.0,
        "seconds that a new request waits for a node",
        metavar="SECONDS",
        least=0,
        flag="--unready-wait",
    )
    sleep_after_s: float = option(
        0.0,
        "seconds without a request after which all nodes sleep, until one comes; 0: never",
        metavar="SECONDS",
        least=0,
        flag="--sleep-after",
    )
    sleep_level: int = option(
        1,
        "what they give back: 1 only KV, and weights go to host memory; 2 also the weights, which"
        " are loaded again",
        least=1,
        most=2,
    )
    request_timeout_s: float = option(
        600.0,
        "seconds from a request's arrival to its last token",
        metavar="SECONDS",
        least=0.1,
        flag="--request-timeout",
    )
    stall_timeout_s: float = option(
        20.0,
        "seconds without a step after which an engine counts as lost",
        metavar="SECONDS",
        least=0.1,
        flag="--stall-timeout",
    )
    link_patience_s: float = option(
        1.0,
        "seconds that a broken link may take to return before the node is lost",
        metavar="SECONDS",
        least=0,
        flag="--link-patience",
    )
    max_body_bytes: ByteSize = option(
        16 << 20, "maximum size of a request's body", least=1, flag="--max-body"
    )
    max_bodies_bytes: ByteSize = option(
        48 << 20,
        "maximum bytes of large bodies that are read, parsed or tokenized at a time; one tenant"
        " may use half of it",
        least=1,
        flag="--max-bodies",
    )
    header_timeout_s: float = option(
        30.0,
        "seconds that a request's headers may take to arrive",
        metavar="SECONDS",
        least=0.1,
        flag="--header-timeout",
    )
    body_timeout_s: float = option(
        30.0,
        "seconds that an arriving body may pause",
        metavar="SECONDS",
        least=0.1,
        flag="--body-timeout",
    )
    body_bytes_per_s: ByteSize = option(
        16 << 10,
        "minimum average bytes per second of an arriving body",
        least=1,
        flag="--body-rate",
    )
    idle_timeout_s: float = option(
        620.0,
        "seconds after which a connection without a request is closed; use more than the proxy in"
        " front of the router",
        metavar="SECONDS",
        least=0.1,
        flag="--idle-timeout",
    )
    keepalive_s: float = option(
        15.0,
        "seconds between comment lines of a waiting stream",
        metavar="SECONDS",
        least=0.1,
        flag="--keepalive",
    )
    max_resume_s: float = option(
        600.0,
        "maximum seconds that a stream with the header x-baton-resume outlives its client; 0:"
        " none does",
        metavar="SECONDS",
        least=0,
        flag="--max-resume",
    )
    enable_force_include_usage: bool = option(
        False, "usage in each event of every stream, whatever its stream_options"
    )
    root_path: str = option(
        "",
        "path under which a proxy passes requests on, such as /llm; routes work with and without"
        " it",
        metavar="PATH",
    )
    page: bool = option(True, "serve the live page of the pool at /")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host names under which clients reach the router, with or without a port; * for all."
        " localhost is always allowed (default: on a loopback address no others, else all)",
        metavar="HOST,...",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may use the router, such as https://chat.example; * for all"
        " (default: none)",
        metavar="ORIGIN,...",
    )
    response_ttl_s: float = option(
        86400.0,
        "seconds that a response with `store` is kept on the index; 0: none is kept",
        metavar="SECONDS",
        least=0,
        flag="--response-ttl",
    )
    response_bytes: ByteSize = option(
        32 << 20,
        "maximum bytes of all kept responses, of which one tenant may use half; the oldest go"
        " first",
        least=1,
        flag="--response-memory",
    )
    explain_requests: int = option(
        1000,
        "number of ended requests that baton explain can show; 0: none",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    TITLE: ClassVar[str] = "admission"

    tenants: str = option(
        "", "TOML file with the limits of each tenant (default: no limits)", metavar="FILE"
    )
    admin_key: str = option(
        "",
        "key for /pool, /load, /metrics and /nodes, in addition to keys marked admin (use the"
        " variable)",
        metavar="WORD",
        secret=True,
    )
    admission_queue_ms: float = option(
        1000.0,
        "milliseconds of queued prompts that fill a node; while all nodes are full, requests wait"
        " in the router; 0: none waits there",
        metavar="MS",
        least=0,
    )
    max_inflight: int = option(
        0, "number of sequences that fill a node; 0: as many as it computes at once", least=0
    )
    max_queued: int = option(
        1000, "maximum number of calls that wait in the router to start", least=0
    )
    queue_timeout_s: float = option(
        30.0,
        "maximum seconds that a call waits to start",
        metavar="SECONDS",
        least=0.1,
        flag="--queue-timeout",
    )
    max_call_sequences: int = option(
        2048, "maximum number of sequences of one call: its prompts times n", least=1
    )


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    TITLE: ClassVar[str] = "tenants"

    api_keys: str = option(
        "",
        "file with lines of TENANT KEY or TENANT sha256:HEX (default: no key is required)",
        metavar="FILE",
    )
    sharing: Sharing = option(
        "pool", "who may use the KV of a tenant's prompts: all tenants, or only this one"
    )
    tenant_secret: str = option(
        "",
        "secret of the pool for --sharing tenant, from which salts are derived (use the variable)",
        metavar="WORD",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    TITLE: ClassVar[str] = "files and batches"

    file_store: str = option(
        "",
        "folder or s3://BUCKET/PREFIX for /v1/files and /v1/batches, the same for all routers of"
        " the pool and of no other (default: no files)",
        metavar="PATH",
    )
    max_file_bytes: ByteSize = option(
        200 << 20, "maximum size of an uploaded file", least=1, flag="--max-file"
    )
    max_tenant_file_bytes: ByteSize = option(
        10 << 30, "maximum bytes of one tenant's files together", least=1, flag="--max-files-size"
    )
    max_tenant_files: int = option(1000, "maximum number of one tenant's files", least=1)
    file_ttl_s: int = option(
        30 * 86_400,
        "seconds that a file lives, unless its upload says otherwise",
        metavar="SECONDS",
        least=60,
        flag="--file-ttl",
    )
    max_batch_lines: int = option(50_000, "maximum number of requests of a batch", least=1)


@dataclass(frozen=True, kw_only=True)
class RouterSettings(RequestSettings, AdmissionSettings, TenantSettings, FileSettings):
    TITLE = "router"

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: a free one", least=0, most=MAX_PORT)
    uds: str = option(
        "",
        "unix socket to listen on instead of host and port; its owner and group may connect",
        metavar="PATH",
    )
    pool: str = option("default", "name of the pool, part of its keys in the index", metavar="NAME")
    index_url: str = option(
        "", "Redis whose registry lists the nodes", metavar="URL", secret=True, flag="--redis-index"
    )
    nodes: tuple[str, ...] = option(
        (), "addresses of nodes, in addition to the registry", metavar="URL,..."
    )
    link_token: str = option(
        "", "token that the nodes require (use the variable)", metavar="WORD", secret=True
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "model names for clients; answers show the first (default: as the nodes report it)",
        metavar="NAME",
        several=True,
    )
    wake_wait_s: float = option(
        0.0,
        "seconds that requests are held for the first node, for a pool that may have no nodes;"
        " 0: the pool always has some",
        metavar="SECONDS",
        least=0,
        flag="--wake-wait",
    )
    drain_timeout_s: float = option(
        10.0, "seconds that running streams may take after SIGTERM", least=0, flag="--drain-timeout"
    )
    expect_nodes: tuple[str, ...] = option(
        (), "nodes that /ready?all=1 waits for, in addition to those that are found", hidden=True
    )
    tunables: Tunables = Tunables()

    @property
    def listens(self) -> str:
        """Where the router is to listen, for logs and errors."""
        return f"unix:{self.uds}" if self.uds else f"{self.host}:{self.port}"

    @property
    def hold_s(self) -> float:
        """Seconds for which a request is held while no node is ready; 0: it is not."""
        return self.wake_wait_s or (self.unready_wait_s if self.sleep_after_s else 0.0)

    def check(self) -> None:
        """Raise InvalidRequest with the setting, its value and the allowed values."""
        if not self.index_url and not self.nodes:
            raise InvalidRequest(
                "the router knows no nodes: give an index URL or a list of nodes", param="nodes"
            )
        for address in self.nodes:
            if not address.startswith(("http://", "https://")):
                raise InvalidRequest(
                    f"node address {address!r} is not a URL; use http://host:port", param="nodes"
                )
        if len(set(self.served_model_name)) < len(self.served_model_name):
            raise InvalidRequest(
                f"served_model_name is {', '.join(self.served_model_name)}; give each name once",
                param="served_model_name",
            )
        self._check_numbers()
        if not (self.admin_key.isascii() and self.admin_key.isprintable()):
            raise InvalidRequest(
                "admin_key contains characters that no HTTP header can carry; use "
                "printable ASCII characters",
                param="admin_key",
            )
        self._check_pages()
        self._check_sharing()

    def _check_numbers(self) -> None:
        """Check the sign of each number. Flags have the options' own bounds; these here also hold
        for settings with times that are too short for users."""
        for setting in fields(self):
            declared, value = option_of(setting), getattr(self, setting.name)
            if declared is None or declared.least is None:
                continue
            wrong = f"{setting.name} is {value}; "
            if declared.most is not None and not declared.least <= value <= declared.most:
                allowed = f"use {declared.least} to {declared.most}"
                raise InvalidRequest(wrong + allowed, param=setting.name)
            if declared.least > 0 and not value > 0:
                raise InvalidRequest(wrong + "it must be above 0", param=setting.name)
            if not value >= 0:
                raise InvalidRequest(wrong + "it must be 0 or more", param=setting.name)

    def _check_pages(self) -> None:
        if _ROOT_PATH.fullmatch(self.root_path) is None:
            raise InvalidRequest(
                f"root_path is {self.root_path!r}; use a path such as /llm, without a slash at its "
                "end",
                param="root_path",
            )
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
