"""A prefill node in its own process, for tests that kill it while it publishes.

In (argv): WriterSettings as JSON. Out: the node's chunks, markers and announcements, deadline it is
killed or its parent has ended. Run as `python -m tests.faults.kv.writer_process`.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings
from baton_node.store.address import StoreAddress
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import PrefillJob
from baton_protocol.request import Request
from tests.support.nodes.step_loops import LoopNode

MAX_S = 120.0


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    index_url: str
    data_urls: tuple[str, ...]
    engine: SimSettings
    request: Request
    inbox: tuple[NodeId, Epoch]


def main(settings_json: str) -> None:
    settings = msgspec.json.decode(settings_json, type=WriterSettings)

    def connect(engine: EngineCore) -> StoreConnector:
        connector = StoreConnector(
            StoreAddress(
                index_url=settings.index_url,
                data_urls=settings.data_urls,
                pool="default",
                node=NodeId("w0"),
                epoch=Epoch(f"epoch-{os.getpid()}"),
                fingerprint=engine.info.fingerprint,
                write_behind_bandwidth=0,
            ),
            engine.memory,
        )
        connector.start()
        return connector

    node, parent = LoopNode("w0", settings.engine, connect=connect), os.getppid()
    node.take(PrefillJob(settings.request, *settings.inbox))
    deadline = time.monotonic() + MAX_S
    while time.monotonic() < deadline and os.getppid() == parent:
        node.loop.turn()
        time.sleep(0.0005)


if __name__ == "__main__":
    main(sys.argv[1])
