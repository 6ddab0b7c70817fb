"""What one node is told at its start: by the cli's flags, or by a test.

In: nothing. Out: `NodeSettings`, which travels as JSON to the engine process, so it holds plain
values only.

    SetupError       a start that cannot go on; its message is one line for the user, exit code 1
    `-- EngineLost   the engine process ended while the node served; the node ends with it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_engine.config.engine_config import EngineConfig, EngineKind, SimConfig
from baton_protocol.store import Role

FetchPolicy = Literal["auto", "always", "never"]

StoreCare = Literal["apply", "check"]


class SetupError(Exception):
    """The node cannot start; the message names the offending value and what to do."""


class EngineLost(SetupError):
    """The engine process is gone; the message says how it ended."""


@dataclass(frozen=True, kw_only=True, repr=False)
class NodeSettings(EngineConfig):
    """One node: who it is, where it listens, which store it uses, which engine it runs and, in
    EngineConfig's fields, how.

    `port` 0 takes a free one (the registry and /health say which). `address` is what others dial,
    by default http://host:port. An empty `index_url` means no store: every request is computed
    here. With a `link_token` only who says it gets a link or an artifact. `store_settings` says
    whether the store's servers are set as they should be, or only looked at;
    `write_behind_bandwidth` is in bytes per second, None a tenth of the measured link, 0 off.
    Durations are in seconds.
    """

    node: str
    role: Role
    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    pool: str = "default"
    revision: str = ""

    index_url: str = ""
    data_urls: tuple[str, ...] = ()
    store_settings: StoreCare = "apply"
    fetch: FetchPolicy = (
        "auto"  # what the store holds, where computing it is predicted to be faster
    )
    write_behind_bandwidth: int | None = None
    link_token: str = ""

    engine: EngineKind = "torch"
    model: str = ""
    served_name: str = ""  # default: the folder's last component, or "sim"
    chat_template: str | None = None  # a file, or the template itself
    tool_parser: str = ""  # a name of baton_text's registry, or "none"; "": by the template
    reasoning_parser: str = ""  # likewise
    sim: SimConfig = SimConfig()

    lookup_wait_s: float = 0.1  # how long a request waits for the index before it computes
    first_wait_s: float = 2.0  # how long chunks may still come once the first token is known
    blocks_wait_s: float = 30.0  # how long a fetch waits for free blocks before computing instead
    drain_s: float = 10.0  # how long running requests may go on after SIGTERM
    link_grace_s: float = 5.0  # a router away for so long has its requests aborted
    start_wait_s: float = 600.0  # building the engine: loading weights, compiling
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    log_level: str = "WARNING"  # of the engine process; the server's is the caller's business
    json_logs: bool = False  # likewise

    def __repr__(self) -> str:
        """Without URLs and token: what is secret must not reach a log."""
        return f"NodeSettings(node={self.node!r}, role={self.role!r})"

    def name(self) -> str:
        """The model's name for clients."""
        if self.served_name:
            return self.served_name
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        return last or self.engine

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> NodeSettings:
        return msgspec.json.decode(data, type=cls)
