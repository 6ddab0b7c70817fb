"""A prefill node in a process of its own, for tests that kill it in the middle of its work.

In (argv): a `Writing` as JSON. Out: what the node puts, marks and announces, until it is killed or
its parent is gone. Run as `python -m tests.faults.kv.writer_process`.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings
from baton_node.store.redis_connector import StoreAddress, StoreConnector
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import PrefillJob
from baton_protocol.request import Request
from tests.support.nodes.step_loops import LoopNode

LONGEST_S = 120.0


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    index_url: str
    data_urls: tuple[str, ...]
    settings: SimSettings
    request: Request
    inbox: tuple[NodeId, Epoch]


def main(text: str) -> None:
    writing = msgspec.json.decode(text, type=Writing)

    def connect(engine: EngineCore) -> StoreConnector:
        connector = StoreConnector(
            StoreAddress(
                index_url=writing.index_url,
                data_urls=writing.data_urls,
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

    node, parent = LoopNode("w0", connect, writing.settings), os.getppid()
    node.take(PrefillJob(writing.request, *writing.inbox))
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and os.getppid() == parent:
        node.loop.turn()
        time.sleep(0.0005)


if __name__ == "__main__":
    main(sys.argv[1])
