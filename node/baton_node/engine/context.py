"""What all parts of one step loop share: each part is given this one record.

In: the engine, the connector, the server's socket, options. Out: LoopContext.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_engine.interface import Engine
from baton_node.engine.measurements import Counters, SpeedMeter
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.settings import FetchPolicy
from baton_node.store.base import KVConnector
from baton_protocol.ids import Epoch
from baton_protocol.layout import KVLayout
from baton_protocol.store import Speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Waits and periods in seconds."""

    epoch: Epoch
    lookup_wait_s: float = 0.1  # for a lookup's answer, and for chunks of a store in trouble
    first_wait_s: float = 2.0  # for announced chunks, and besides for their bytes
    blocks_wait_s: float = 30.0  # for blocks of the paged cache
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    fetch: FetchPolicy = "auto"  # of what a lookup found
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(slots=True)
class LoopContext:
    """`speeds` starts with those of the options, `counters` at zero."""

    engine: Engine
    connector: KVConnector
    socket: EngineSocket
    options: LoopOptions
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    speeds: SpeedMeter = field(init=False)

    def __post_init__(self) -> None:
        self.speeds = SpeedMeter(self.options.speeds)

    @property
    def layout(self) -> KVLayout:
        return self.engine.info.layout

    @property
    def has_store(self) -> bool:
        """False where nothing can ever be published."""
        return self.connector.store_health() != "none"
