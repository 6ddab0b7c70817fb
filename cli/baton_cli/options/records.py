"""One frozen record per command: its flags, their defaults, units and reasons.

The options of a router, a node and an engine are declared where they are used, in
`baton_router.settings`, `baton_node.settings` and `baton_engine.config.engine_config`. The records
here inherit those options and add what only the command line knows.

CommonOptions
|-- TraceOptions          the collector of spans
|-- StoreLoginOptions     the login to the user's Redis
|-- ChildOptions          the supervisor of a process that another Baton process started
|-- NodeOptions           `baton prefill`, `baton decode`: all of the above, and a node's settings
|-- RouterOptions         `baton router`: the same with a router's settings
|-- PoolOptions           a pool on this machine: what all its nodes and routers share
|   |-- UpOptions         `baton up`
|   `-- RunBatchOptions   `baton run-batch` (see commands.run_batch_options)
|-- BenchOptions          `baton bench` (see bench.options)
|-- GenerateOptions       `baton generate` (see commands.generate_options)
|-- ServeOptions          `baton bench serve` (see bench.serve_options)
|-- FetchOptions          `baton model fetch` (see commands.fetch_options)
|-- FetchDemoOptions      `baton model fetch-demo` (see commands.fetch_options)
|-- DoctorOptions         `baton doctor` (see doctor.options)
|-- ClientOptions         `baton chat`, `top`, `explain`, `usage` (see commands.router_options)
|-- CompletionOptions     `baton completion` (see commands.completion_options)
|-- OperatorOptions       `baton operator` (see commands.operator_options)
`-- VersionOptions        `baton version`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton_cli.logs import LogLevel
from baton_node.settings import ExchangeSettings, ModelSettings, ServerSettings
from baton_protocol.options import MAX_PORT, ByteSize, option
from baton_router.settings import (
    AdmissionSettings,
    FileSettings,
    RequestSettings,
    RouterSettings,
    TenantSettings,
)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    # The heading in --help above the flags that this class adds.
    TITLE: ClassVar[str] = "logging"

    log_level: LogLevel = option("info", "log level on stderr")
    json_logs: bool = option(False, "one JSON object per log line")


@dataclass(frozen=True, kw_only=True)
class ChildOptions(CommonOptions):
    TITLE = "supervised"

    # The child checks that its parent still has this pid: the parent may die before prctl().
    supervisor_pid: int = option(0, "pid of the process to end with", hidden=True)


@dataclass(frozen=True, kw_only=True)
class StoreLoginOptions(CommonOptions):
    TITLE = "login to Redis for URLs without one (use the variables: a command line is public)"

    redis_username: str = option("", "user name", metavar="NAME", secret=True)
    redis_password: str = option("", "password; any characters", metavar="WORD", secret=True)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(CommonOptions):
    TITLE = "traces"

    otlp_endpoint: str = option(
        "",
        "OpenTelemetry collector for spans (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
        metavar="URL",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(
    ServerSettings,
    ModelSettings,
    ExchangeSettings,
    StoreLoginOptions,
    TraceOptions,
    ChildOptions,
):
    TITLE = "node"


@dataclass(frozen=True, kw_only=True)
class RouterOptions(RouterSettings, StoreLoginOptions, TraceOptions, ChildOptions):
    TITLE = "router"


@dataclass(frozen=True, kw_only=True)
class PoolOptions(
    ModelSettings,
    ExchangeSettings,
    RequestSettings,
    AdmissionSettings,
    TenantSettings,
    FileSettings,
    StoreLoginOptions,
    TraceOptions,
    ChildOptions,
):
    TITLE = "pool"

    # The live table shows each node's state, so the children's info lines are left out.
    log_level: LogLevel = option("warning", "log level of the child processes on stderr")
    prefill: int = option(1, "number of prefill nodes", least=0)
    decode: int = option(1, "number of decode nodes", least=0)
    host: str = option("127.0.0.1", "address on which the router listens")
    port: int = option(
        8000, "port on which the router listens; 0: a free one", least=0, most=MAX_PORT
    )
    uds: str = option(
        "",
        "unix socket on which the router listens instead of host and port; its owner and group may"
        " connect",
        metavar="PATH",
    )
    store_memory: ByteSize = option(1 << 30, "memory of the embedded KV store", least=1 << 20)
    store_instances: int = option(
        1, "number of data servers of the embedded KV store, which share its memory", least=1
    )
    redis_index: str = option("", "your Redis for markers and registry", metavar="URL", secret=True)
    redis_data: tuple[str, ...] = option(
        (), "your Redis instances for KV bytes", metavar="URL,...", secret=True
    )
    pool: str = option("default", "name of the pool, part of its keys in the index", metavar="NAME")
    ready_timeout: float = option(
        660.0,
        "seconds to wait until all nodes are ready; after that the pool serves with the ready nodes"
        " if it can",
        metavar="SECONDS",
        least=0.1,
    )
    drain_timeout: float = option(
        10.0, "seconds that running streams may take after the first Ctrl-C", least=0
    )


@dataclass(frozen=True, kw_only=True)
class UpOptions(PoolOptions):
    TITLE = "question"

    once: str = option(
        "", "send this prompt, print answer, placement and timings, and exit", metavar="PROMPT"
    )
    ask: str = option(
        "", "send this prompt when ready, print the same, and stay up", metavar="PROMPT"
    )


@dataclass(frozen=True, kw_only=True)
class VersionOptions(CommonOptions):
    pass
