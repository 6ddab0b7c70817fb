"""The settings of a node: every option of its engine, store and server, declared once.

    NodeSettings          a node's settings, which its engine process gets as a frame
    |-- ServerSettings    the node's identity, addresses and deadlines
    |-- ModelSettings     a model and, from EngineConfig and SimConfig, an engine
    `-- ExchangeSettings  how the node uses the KV store

The flags of `baton prefill` and `baton decode` follow from the options; `baton up` has those of a
model and of the exchange, too. Names end in the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton_engine.config.engine_config import EngineConfig, LoadFormat, SimConfig
from baton_protocol.model_source import name_of_path
from baton_protocol.options import MAX_PORT, ByteSize, option
from baton_protocol.policies import EngineKind, FetchPolicy, StoreCare
from baton_protocol.store import Role


@dataclass(frozen=True, kw_only=True)
class ModelSettings(EngineConfig):
    TITLE = "model"

    model: str = option(
        "", "Hugging Face folder, GGUF file, or hub id (HF_ENDPOINT selects the hub)"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "model names for clients; answers show the first (default: the folder's last component)",
        metavar="NAME",
        several=True,
    )
    engine: EngineKind = option(
        "torch", "torch: the real engine; sim: a timing model without torch"
    )
    chat_template: str = option(
        "", "Jinja file that replaces the model's own template", metavar="FILE"
    )
    tool_parser: str = option(
        "",
        "parser of tool calls, or none (default: by the chat template)",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "",
        "parser of reasoning, or none (default: by the chat template)",
        metavar="NAME",
    )
    sim: SimConfig = SimConfig()


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    TITLE: ClassVar[str] = "KV exchange"

    fetch: FetchPolicy = option(
        "auto", "whether to fetch stored KV; auto: if fetching is faster than computing"
    )
    write_behind_bandwidth: ByteSize | None = option(
        None,
        "bytes per second for storing KV that no request waits for, such as that of answers;"
        " 0: store none (default: a tenth of the measured link)",
        least=0,
    )
    store_settings: StoreCare = option(
        "apply",
        "apply: correct the Redis servers' persistence and eviction settings if they allow it;"
        " check: only warn",
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    TITLE: ClassVar[str] = "node"

    node: str = option(
        "",
        "unique name of the node in its pool (default: host, role and random digits)",
        metavar="NAME",
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "port to listen on; 0: a free one", least=0, most=MAX_PORT)
    address: str = option(
        "", "URL under which routers reach the node (default: http://HOST:PORT)", metavar="URL"
    )
    pool: str = option("default", "name of the pool, part of its keys in the index", metavar="NAME")
    revision: str = option("", "name of the revision, shown in /pool", metavar="NAME")
    index_url: str = option(
        "",
        "Redis for markers and registry (default: no store)",
        metavar="URL",
        secret=True,
        flag="--redis-index",
    )
    data_urls: tuple[str, ...] = option(
        (), "Redis instances for KV bytes", metavar="URL,...", secret=True, flag="--redis-data"
    )
    link_token: str = option(
        "",
        "token that routers must send (use the variable; default: none is required)",
        metavar="WORD",
        secret=True,
    )
    start_timeout_s: float = option(
        600.0,
        "seconds that the engine may take to load the model",
        metavar="SECONDS",
        least=1,
        flag="--start-timeout",
    )
    link_grace_s: float = option(
        5.0,
        "seconds that requests continue after their router's link broke",
        metavar="SECONDS",
        least=0,
        flag="--link-grace",
    )
    drain_timeout_s: float = option(
        10.0,
        "seconds that running requests may take after SIGTERM",
        least=0,
        flag="--drain-timeout",
    )


@dataclass(frozen=True, kw_only=True)
class NodeSettings(ServerSettings, ModelSettings, ExchangeSettings):
    """Without an `index_url` there is no store: the node computes each request itself."""

    role: Role
    tokenizer: str = ""  # the folder of another tokenizer than the model's; only AsyncLLM has one
    load_format: LoadFormat = "auto"  # only AsyncLLM has another
    log_level: str = "WARNING"  # of the engine process only; the caller configures the server's log
    json_logs: bool = False  # of the engine process only

    def model_name(self) -> str:
        """Return the model's name in the client API, which a node has only one of."""
        if self.served_model_name:
            return self.served_model_name[0]
        return name_of_path(self.model) or self.engine
