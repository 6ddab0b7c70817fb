"""One frozen record per command: its flags, their defaults, units and reasons.

CommonOptions
|-- EngineOptions         a model and, from baton_engine's EngineConfig and SimConfig, an engine
|   |-- NodeOptions       `baton prefill`, `baton decode`
|   |-- UpOptions         `baton up`
|   `-- BenchOptions      `baton bench` (see bench.options)
|-- GenerateOptions       `baton generate`, on EngineConfig too (see commands.generate_options)
|-- ExchangeOptions       how a node uses the KV store
|   |-- NodeOptions
|   `-- UpOptions
|-- ServingOptions        how a router handles requests
|   |-- RouterOptions     `baton router`
|   `-- UpOptions
|-- TenantOptions         API keys, and what tenants share
|   |-- RouterOptions, UpOptions
|-- TraceOptions          the collector of spans
|   |-- NodeOptions, RouterOptions, UpOptions
|-- StoreLoginOptions     the login to the user's Redis
|   |-- NodeOptions, RouterOptions, UpOptions
|   `-- FetchOptions      `baton model fetch` (see commands.fetch_options)
|-- ChildOptions          the supervisor of a process that another Baton process started
|   |-- NodeOptions, RouterOptions, UpOptions
|-- ServeOptions          `baton bench serve` (see bench.serve_options)
|-- FetchDemoOptions      `baton model fetch-demo` (see commands.fetch_options)
|-- ExplainOptions        `baton explain` (see commands.explain_options)
|-- OperatorOptions       `baton operator` (see commands.operator_options)
`-- VersionOptions        `baton version`

AdmissionOptions, a base of RouterOptions and UpOptions, limits tenants and queues (see admission).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton_cli.logs import LogLevel
from baton_cli.options.admission import AdmissionOptions
from baton_cli.options.flag import flag
from baton_engine.config.engine_config import ByteSize, EngineConfig, EngineKind, SimConfig

Handoff = Literal["auto", "always", "never"]
MissingRole = Literal["aggregate", "queue", "fail"]
Ranking = Literal["cost", "random", "round-robin", "least-request", "prefix"]
Sharing = Literal["pool", "tenant"]
Fetch = Literal["auto", "always", "never"]
StoreCare = Literal["apply", "check"]

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    # The heading in --help above the flags that this class adds.
    TITLE: ClassVar[str] = "logging"

    log_level: LogLevel = flag("info", "log level on stderr")
    json_logs: bool = flag(False, "one JSON object per log line")


@dataclass(frozen=True, kw_only=True)
class ChildOptions(CommonOptions):
    TITLE = "supervised"

    # The child checks that its parent still has this pid: the parent may die before prctl().
    supervisor_pid: int = flag(0, "pid of the process to end with", hidden=True)


@dataclass(frozen=True, kw_only=True)
class StoreLoginOptions(CommonOptions):
    TITLE = "login to Redis for URLs without one (use the variables: a command line is public)"

    redis_username: str = flag("", "user name", metavar="NAME", secret=True)
    redis_password: str = flag("", "password; any characters", metavar="WORD", secret=True)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(CommonOptions):
    TITLE = "traces"

    otlp_endpoint: str = flag(
        "",
        "OpenTelemetry collector for spans (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
        metavar="URL",
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CommonOptions, EngineConfig):
    TITLE = "model"

    model: str = flag("", "Hugging Face folder, or hub id (HF_ENDPOINT selects the hub)")
    served_model_name: str = flag(
        "", "model name for clients (default: the folder's last component)", metavar="NAME"
    )
    engine: EngineKind = flag("torch", "torch: the real engine; sim: a timing model without torch")
    chat_template: str = flag(
        "", "Jinja file that replaces the model's own template", metavar="FILE"
    )
    tool_parser: str = flag(
        "",
        "parser of tool calls, or none (default: by the chat template)",
        metavar="NAME",
    )
    reasoning_parser: str = flag(
        "",
        "parser of reasoning, or none (default: by the chat template)",
        metavar="NAME",
    )
    sim: SimConfig = SimConfig()


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(CommonOptions):
    TITLE = "KV exchange"

    fetch: Fetch = flag(
        "auto", "whether to fetch stored KV; auto: if fetching is faster than computing"
    )
    write_behind_bandwidth: ByteSize | None = flag(
        None,
        "bytes per second for storing KV that no request waits for, such as that of answers;"
        " 0: store none (default: a tenth of the measured link)",
        least=0,
    )
    store_settings: StoreCare = flag(
        "apply",
        "apply: correct the Redis servers' persistence and eviction settings if they allow it;"
        " check: only warn",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(EngineOptions, ExchangeOptions, StoreLoginOptions, TraceOptions, ChildOptions):
    TITLE = "node"

    node: str = flag(
        "",
        "unique name of the node in its pool (default: host, role and random digits)",
        metavar="NAME",
    )
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(0, "port to listen on; 0: a free one", least=0, most=MAX_PORT)
    address: str = flag(
        "", "URL under which routers reach the node (default: http://HOST:PORT)", metavar="URL"
    )
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    revision: str = flag("", "name of the revision, shown in /pool", metavar="NAME")
    redis_index: str = flag(
        "", "Redis for markers and registry (default: no store)", metavar="URL", secret=True
    )
    redis_data: tuple[str, ...] = flag(
        (), "Redis instances for KV bytes", metavar="URL,...", secret=True
    )
    link_token: str = flag(
        "",
        "token that routers must send (use the variable; default: none is required)",
        metavar="WORD",
        secret=True,
    )
    start_timeout: float = flag(
        600.0, "seconds that the engine may take to load the model", metavar="SECONDS", least=1
    )
    link_grace: float = flag(
        5.0,
        "seconds that requests continue after their router's link broke",
        metavar="SECONDS",
        least=0,
    )
    drain_timeout: float = flag(
        10.0, "seconds that running requests may take after SIGTERM", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(CommonOptions):
    TITLE = "requests"

    handoff: Handoff = flag(
        "auto", "when a prefill node computes the prompt; auto: if the hand-off costs little time"
    )
    handoff_min_tokens: int = flag(
        128, "auto: prompts with fewer uncached tokens stay on the decode node", least=0
    )
    placement: Ranking = flag(
        "cost", "how nodes are ranked: by predicted milliseconds, or by another policy to compare"
    )
    allow_policy_header: bool = flag(
        False, "let a request choose its --placement by the header x-baton-policy"
    )
    missing_role: MissingRole = flag(
        "aggregate",
        "if a role has no ready node: the other role does its work, requests wait, or they fail",
    )
    unready_wait: float = flag(
        30.0, "seconds that a new request waits for a node", metavar="SECONDS", least=0
    )
    request_timeout: float = flag(
        600.0, "seconds from a request's arrival to its last token", metavar="SECONDS", least=0.1
    )
    stall_timeout: float = flag(
        20.0,
        "seconds without a step after which an engine counts as lost",
        metavar="SECONDS",
        least=0.1,
    )
    link_patience: float = flag(
        1.0,
        "seconds that a broken link may take to return before the node is lost",
        metavar="SECONDS",
        least=0,
    )
    max_body: ByteSize = flag(16 << 20, "maximum size of a request's body", least=1)
    max_bodies: ByteSize = flag(
        48 << 20,
        "maximum bytes of large bodies that are read, parsed or tokenized at a time; one tenant"
        " may use half of it",
        least=1,
    )
    header_timeout: float = flag(
        30.0, "seconds that a request's headers may take to arrive", metavar="SECONDS", least=0.1
    )
    body_timeout: float = flag(
        30.0, "seconds that an arriving body may pause", metavar="SECONDS", least=0.1
    )
    body_rate: ByteSize = flag(
        16 << 10, "minimum average bytes per second of an arriving body", least=1
    )
    idle_timeout: float = flag(
        620.0,
        "seconds after which a connection without a request is closed; use more than the proxy in"
        " front of the router",
        metavar="SECONDS",
        least=0.1,
    )
    keepalive: float = flag(
        15.0, "seconds between comment lines of a waiting stream", metavar="SECONDS", least=0.1
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names under which clients reach the router, with or without a port; * for all."
        " localhost is always allowed (default: on a loopback address no others, else all)",
        metavar="HOST,...",
    )
    cors_origins: tuple[str, ...] = flag(
        (),
        "origins of web pages that may use the router, such as https://chat.example; * for all"
        " (default: none)",
        metavar="ORIGIN,...",
    )
    explain_requests: int = flag(
        1000,
        "number of ended requests that baton explain can show; 0: none",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class TenantOptions(CommonOptions):
    TITLE = "tenants"

    api_keys: str = flag(
        "",
        "file with lines of TENANT KEY or TENANT sha256:HEX (default: no key is required)",
        metavar="FILE",
    )
    sharing: Sharing = flag(
        "pool", "who may use the KV of a tenant's prompts: all tenants, or only this one"
    )
    tenant_secret: str = flag(
        "",
        "secret of the pool for --sharing tenant, from which salts are derived (use the variable)",
        metavar="WORD",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class RouterOptions(
    ServingOptions, AdmissionOptions, TenantOptions, StoreLoginOptions, TraceOptions, ChildOptions
):
    TITLE = "router"

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0: a free one", least=0, most=MAX_PORT)
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    redis_index: str = flag("", "Redis whose registry lists the nodes", metavar="URL", secret=True)
    nodes: tuple[str, ...] = flag(
        (), "addresses of nodes, in addition to the registry", metavar="URL,..."
    )
    link_token: str = flag(
        "", "token that the nodes require (use the variable)", metavar="WORD", secret=True
    )
    served_model_name: str = flag(
        "", "model name for clients (default: as the nodes report it)", metavar="NAME"
    )
    wake_wait: float = flag(
        0.0,
        "seconds that requests are held for the first node, for a pool that may have no nodes;"
        " 0: the pool always has some",
        metavar="SECONDS",
        least=0,
    )
    drain_timeout: float = flag(
        10.0, "seconds that running streams may take after SIGTERM", least=0
    )
    expect_nodes: tuple[str, ...] = flag(
        (), "nodes that /ready?all=1 waits for, in addition to those that are found", hidden=True
    )


@dataclass(frozen=True, kw_only=True)
class UpOptions(
    EngineOptions,
    ExchangeOptions,
    ServingOptions,
    AdmissionOptions,
    TenantOptions,
    StoreLoginOptions,
    TraceOptions,
    ChildOptions,
):
    TITLE = "pool"

    # The live table shows each node's state, so the children's info lines are left out.
    log_level: LogLevel = flag("warning", "log level of the child processes on stderr")
    prefill: int = flag(1, "number of prefill nodes", least=0)
    decode: int = flag(1, "number of decode nodes", least=0)
    host: str = flag("127.0.0.1", "address on which the router listens")
    port: int = flag(
        8000, "port on which the router listens; 0: a free one", least=0, most=MAX_PORT
    )
    store_memory: ByteSize = flag(1 << 30, "memory of the embedded KV store", least=1 << 20)
    store_instances: int = flag(
        1, "number of data servers of the embedded KV store, which share its memory", least=1
    )
    redis_index: str = flag("", "your Redis for markers and registry", metavar="URL", secret=True)
    redis_data: tuple[str, ...] = flag(
        (), "your Redis instances for KV bytes", metavar="URL,...", secret=True
    )
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    ready_timeout: float = flag(
        660.0,
        "seconds to wait until all nodes are ready; after that the pool serves with the ready nodes"
        " if it can",
        metavar="SECONDS",
        least=0.1,
    )
    drain_timeout: float = flag(
        10.0, "seconds that running streams may take after the first Ctrl-C", least=0
    )
    once: str = flag(
        "", "send this prompt, print answer, placement and timings, and exit", metavar="PROMPT"
    )
    ask: str = flag(
        "", "send this prompt when ready, print the same, and stay up", metavar="PROMPT"
    )


@dataclass(frozen=True, kw_only=True)
class VersionOptions(CommonOptions):
    pass
