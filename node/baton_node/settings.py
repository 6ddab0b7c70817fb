"""Settings of one node, from the command line's flags or from a test.

`NodeSettings` is sent as a frame to the engine process, so it holds only plain values.

    SetupError       the node cannot start; the message is one line for the user, exit code 1
    `-- EngineLost   the engine process has ended; the node ends too
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton_engine.config.engine_config import EngineConfig, EngineKind, SimConfig
from baton_protocol.policies import FetchPolicy, StoreCare
from baton_protocol.store import Role


class SetupError(Exception):
    """The node cannot start. The message names the wrong value and how to correct it."""


class EngineLost(SetupError):
    """The engine process has ended. The message says how."""


@dataclass(frozen=True, kw_only=True, repr=False)
class NodeSettings(EngineConfig):
    """Settings of one node: its identity, addresses, store and engine. EngineConfig's fields
    configure the engine. Durations are in seconds.

    With `port` 0 the system chooses a free port; the log and the registry show it. `address` is the
    URL at which routers reach the node; the default is http://host:port. With an empty
    `index_url` there is no store: this node computes each request itself. If `link_token` is set,
    clients must send it to open a link or to read an artifact. `store_settings` is "apply" to set
    the store servers' options and "check" to only verify them. `write_behind_bandwidth` is in bytes
    per second: None is a tenth of the measured link, 0 turns write-behind off.
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
        "auto"  # chunks found in the store: "auto" fetches those that it predicts to be faster
    )
    write_behind_bandwidth: int | None = None
    link_token: str = ""

    engine: EngineKind = "torch"
    model: str = ""
    served_name: str = ""  # default: the last component of `model`, or else the engine's kind
    chat_template: str | None = None  # a file, or the template itself
    tool_parser: str = ""  # a name in baton_text's registry, or "none"; "": chosen by the template
    reasoning_parser: str = ""  # as tool_parser
    sim: SimConfig = SimConfig()

    lookup_wait_s: float = 0.1  # longest wait for a lookup's answer before computing instead
    # Longest wait for a request's chunks, plus time for their bytes; with a hand-off, counted from
    # its first token.
    first_wait_s: float = 2.0
    blocks_wait_s: float = 30.0  # longest wait of a fetch for free blocks before computing instead
    drain_s: float = 10.0  # how long running requests may continue here after SIGTERM
    link_grace_s: float = 5.0  # after a router's link breaks, until its requests are aborted
    start_wait_s: float = 600.0  # longest time to build the engine: load weights, compile
    load_every_s: float = 0.2  # period of load reports
    events_every_s: float = 0.1  # period of cache events
    log_level: str = "WARNING"  # of the engine process only; the caller configures the server's log
    json_logs: bool = False  # of the engine process only

    def __repr__(self) -> str:
        """Leave out URLs and the token: secrets must not reach a log."""
        return f"NodeSettings(node={self.node!r}, role={self.role!r})"

    def name(self) -> str:
        """Return the model's name in the client API."""
        if self.served_name:
            return self.served_name
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        return last or self.engine

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> NodeSettings:
        return msgspec.json.decode(data, type=cls)
