"""What all parts of one step loop share: its engine, connector, socket, options, jobs, figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_engine.core.engine_core import EngineCore
from baton_node.engine.counters import Counters
from baton_node.engine.job_table import JobTable
from baton_node.engine.speed_meter import SpeedMeter
from baton_node.engine.time_ledger import TimeLedger
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.store.base import KVConnector
from baton_protocol.ids import Epoch
from baton_protocol.layout import KVLayout
from baton_protocol.policies import FetchPolicy
from baton_protocol.store import Speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the step loop. Waits and periods are in seconds."""

    epoch: Epoch
    lookup_wait_s: float = 0.1  # longest wait for a lookup, and for chunks in an unhealthy store
    first_wait_s: float = 2.0  # longest wait for chunks, plus time for their bytes
    blocks_wait_s: float = 30.0  # longest wait for free blocks of the paged cache
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    fetch: FetchPolicy = "auto"  # whether to fetch chunks that a lookup found
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(slots=True)
class LoopContext:
    """The objects that all parts of one step loop share.

    `speeds` starts with the speeds in `options`, `counters` and `ledger` with zeros.
    """

    engine: EngineCore
    connector: KVConnector
    socket: EngineSocket
    options: LoopOptions
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    speeds: SpeedMeter = field(init=False)
    ledger: TimeLedger = field(init=False)
    jobs: JobTable = field(default_factory=JobTable)

    def __post_init__(self) -> None:
        self.speeds = SpeedMeter(self.options.speeds)
        self.ledger = TimeLedger(self.clock)

    @property
    def layout(self) -> KVLayout:
        return self.engine.info.layout

    @property
    def has_store(self) -> bool:
        """False if the node has no store configured."""
        return self.connector.store_health() != "none"
