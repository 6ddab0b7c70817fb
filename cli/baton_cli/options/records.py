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
MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    # The heading in --help above the flags that this class adds.
    TITLE: ClassVar[str] = "logging"

    log_level: LogLevel = flag("info", "how much to log on stderr")
    json_logs: bool = flag(False, "one JSON object per log line")


@dataclass(frozen=True, kw_only=True)
class ChildOptions(CommonOptions):
    TITLE = "supervised"

    # The child checks that its parent still has this pid: the parent may die before prctl().
    supervisor_pid: int = flag(0, "end when this process does", hidden=True)


@dataclass(frozen=True, kw_only=True)
class StoreLoginOptions(CommonOptions):
    TITLE = "login to Redis, for URLs that hold none (by the variables: a command line is public)"

    redis_username: str = flag("", "user name", metavar="NAME", secret=True)
    redis_password: str = flag("", "password, in any characters", metavar="WORD", secret=True)


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

    model: str = flag("", "a Hugging Face folder, or a hub id (HF_ENDPOINT is honoured)")
    served_model_name: str = flag(
        "", "the model's name for clients (default: the folder's last component)", metavar="NAME"
    )
    engine: EngineKind = flag("torch", "the real engine, or `sim`: a timing model without torch")
    chat_template: str = flag(
        "", "a Jinja file instead of the model's own template", metavar="FILE"
    )
    tool_parser: str = flag(
        "",
        "parser of tool calls, or none (default: the one that fits the chat template)",
        metavar="NAME",
    )
    reasoning_parser: str = flag(
        "",
        "parser of reasoning, or none (default: the one that fits the chat template)",
        metavar="NAME",
    )
    sim: SimConfig = SimConfig()


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(CommonOptions):
    TITLE = "KV exchange"

    fetch: Fetch = flag(
        "auto", "KV that the store holds: auto fetches it where computing it would take longer"
    )
    write_behind_bandwidth: ByteSize | None = flag(
        None,
        "bytes per second for KV that nobody waits for, such as an answer's, so that another node"
        " finds it; 0 writes none (default: a tenth of the measured link)",
        least=0,
    )
    store_settings: StoreCare = flag(
        "apply",
        "Redis servers that persist, or evict wrongly: set them right where they let us, or only"
        " check and warn",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(EngineOptions, ExchangeOptions, StoreLoginOptions, TraceOptions, ChildOptions):
    TITLE = "node"

    node: str = flag(
        "",
        "the node's name in its pool, no other's (default: host, role and random digits)",
        metavar="NAME",
    )
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(0, "port to listen on; 0 takes a free one", least=0, most=MAX_PORT)
    address: str = flag("", "what routers dial (default: http://HOST:PORT)", metavar="URL")
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    revision: str = flag("", "what is rolled out, shown in /pool", metavar="NAME")
    redis_index: str = flag(
        "", "Redis for markers and registry (default: no store)", metavar="URL", secret=True
    )
    redis_data: tuple[str, ...] = flag(
        (), "Redis instances for KV bytes", metavar="URL,...", secret=True
    )
    link_token: str = flag(
        "",
        "routers must say it to get a link (better by the variable; default: all may)",
        metavar="WORD",
        secret=True,
    )
    start_timeout: float = flag(
        600.0, "seconds that the engine gets to load the model", metavar="SECONDS", least=1
    )
    link_grace: float = flag(
        5.0, "how long requests outlive their router's link", metavar="SECONDS", least=0
    )
    drain_timeout: float = flag(10.0, "seconds that running requests get after SIGTERM", least=0)


@dataclass(frozen=True, kw_only=True)
class ServingOptions(CommonOptions):
    TITLE = "requests"

    handoff: Handoff = flag("auto", "when a prefill node computes the prompt")
    handoff_min_tokens: int = flag(
        128, "auto: prompts with fewer uncached tokens stay on the decode node", least=0
    )
    placement: Ranking = flag(
        "cost", "which node is best: predicted milliseconds, or another policy to compare it with"
    )
    allow_policy_header: bool = flag(
        False, "a request may choose its --placement itself (header x-baton-policy)"
    )
    missing_role: MissingRole = flag(
        "aggregate",
        "no node of a role is ready: the other role does its work, or requests wait, or fail",
    )
    unready_wait: float = flag(
        30.0, "how long a new request waits for a node", metavar="SECONDS", least=0
    )
    request_timeout: float = flag(
        600.0, "a request's time from its arrival to its last token", metavar="SECONDS", least=0.1
    )
    stall_timeout: float = flag(
        20.0, "a node whose engine stands still for so long is lost", metavar="SECONDS", least=0.1
    )
    link_patience: float = flag(
        1.0, "how long a node's broken link may take to come back", metavar="SECONDS", least=0
    )
    max_body: ByteSize = flag(16 << 20, "a request's body, at most", least=1)
    max_bodies: ByteSize = flag(
        48 << 20,
        "large bodies that are read, parsed or tokenized at a time: so many bytes together, half of"
        " it of one tenant",
        least=1,
    )
    header_timeout: float = flag(
        30.0, "how long a request's headers may take to come", metavar="SECONDS", least=0.1
    )
    body_timeout: float = flag(
        30.0, "how long a body may pause while it comes", metavar="SECONDS", least=0.1
    )
    body_rate: ByteSize = flag(
        16 << 10, "bytes per second that a body has to come with, on average", least=1
    )
    idle_timeout: float = flag(
        620.0,
        "a connection without a request is closed after so long; longer than what is before the"
        " router keeps one",
        metavar="SECONDS",
        least=0.1,
    )
    keepalive: float = flag(
        15.0, "between comment lines of a stream that waits", metavar="SECONDS", least=0.1
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "names under which the router is reached, with or without a port, or * for all; localhost"
        " is always one (default: on a loopback address no others, else all)",
        metavar="HOST,...",
    )
    cors_origins: tuple[str, ...] = flag(
        (),
        "pages in a browser that may use the router, such as https://chat.example, or * for all"
        " (default: only its own)",
        metavar="ORIGIN,...",
    )
    explain_requests: int = flag(
        1000,
        "requests that ended whose explanation is kept, see baton explain; 0 keeps none",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class TenantOptions(CommonOptions):
    TITLE = "tenants"

    api_keys: str = flag(
        "",
        "lines of TENANT KEY or TENANT sha256:HEX; without it nobody is asked for a key",
        metavar="FILE",
    )
    sharing: Sharing = flag("pool", "who may use the KV of a tenant's prompts: all, or only itself")
    tenant_secret: str = flag(
        "",
        "what --sharing tenant derives salts from, one per pool (by the variable)",
        metavar="WORD",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class RouterOptions(
    ServingOptions, AdmissionOptions, TenantOptions, StoreLoginOptions, TraceOptions, ChildOptions
):
    TITLE = "router"

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 takes a free one", least=0, most=MAX_PORT)
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    redis_index: str = flag("", "Redis whose registry lists the nodes", metavar="URL", secret=True)
    nodes: tuple[str, ...] = flag((), "nodes known beside the registry's", metavar="URL,...")
    link_token: str = flag(
        "", "what the nodes want to hear (better by the variable)", metavar="WORD", secret=True
    )
    served_model_name: str = flag(
        "", "the model's name for clients (default: the nodes' word)", metavar="NAME"
    )
    wake_wait: float = flag(
        0.0,
        "the pool may have no nodes: so long are requests held for the first one; 0: it has some",
        metavar="SECONDS",
        least=0,
    )
    drain_timeout: float = flag(10.0, "seconds that running streams get after SIGTERM", least=0)
    workers: int = flag(
        1, "processes that share the port, each a router of its own", least=1, most=MAX_WORKERS
    )
    expect_nodes: tuple[str, ...] = flag(
        (), "nodes that /ready?all=1 waits for, beside those that are found", hidden=True
    )
    worker_socket: str = flag("", "one of those: where its siblings ask it", hidden=True)


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
    log_level: LogLevel = flag("warning", "how much the children log on stderr")
    prefill: int = flag(1, "prefill nodes", least=0)
    decode: int = flag(1, "decode nodes", least=0)
    routers: int = flag(1, "router processes on the port", least=1, most=MAX_WORKERS)
    host: str = flag("127.0.0.1", "address the router listens on")
    port: int = flag(8000, "port the router listens on; 0 takes a free one", least=0, most=MAX_PORT)
    store_memory: ByteSize = flag(1 << 30, "memory of the embedded KV store", least=1 << 20)
    store_instances: int = flag(
        1, "data servers of the embedded KV store, which share its memory", least=1
    )
    redis_index: str = flag("", "your Redis for markers and registry", metavar="URL", secret=True)
    redis_data: tuple[str, ...] = flag(
        (), "your Redis instances for KV bytes", metavar="URL,...", secret=True
    )
    pool: str = flag("default", "name of the pool, part of its keys in the index", metavar="NAME")
    ready_timeout: float = flag(
        660.0,
        "nodes that are not ready by then are named, and no longer waited for where the others"
        " can serve",
        metavar="SECONDS",
        least=0.1,
    )
    drain_timeout: float = flag(
        10.0, "seconds that running streams get after the first Ctrl-C", least=0
    )
    once: str = flag(
        "", "ask this, print answer, placement and timings, and exit", metavar="PROMPT"
    )
    ask: str = flag("", "ask this when ready, print the same, and stay up", metavar="PROMPT")


@dataclass(frozen=True, kw_only=True)
class VersionOptions(CommonOptions):
    pass
