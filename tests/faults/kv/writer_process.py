"""A prefill node in its own process, for tests that kill it while it publishes.

In (argv): WriterSettings as JSON. Out: the node's chunks, markers and announcements, deadline it is
killed or its parent has ended. Run as `python -m tests.faults.kv.writer_process`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Self

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings
from baton_node.store.address import StoreAddress
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import PrefillJob
from baton_protocol.request import Request
from tests.support.kv_faults.kinds import EngineSettings, TinyEngine, build_engine
from tests.support.nodes.step_loops import LoopNode

MAX_S = 120.0


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of both: two dataclasses cannot share a field."""

    sim: SimSettings | None = None
    tiny: TinyEngine | None = None

    @classmethod
    def of(cls, settings: EngineSettings) -> Self:
        if isinstance(settings, SimSettings):
            return cls(sim=settings)
        return cls(tiny=settings)

    @property
    def settings(self) -> EngineSettings:
        settings = self.sim or self.tiny
        assert settings is not None
        return settings


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    index_url: str
    data_urls: tuple[str, ...]
    engine: EngineChoice
    request: Request
    inbox: tuple[NodeId, Epoch]


def main(settings_json: str) -> None:
    settings = msgspec.json.decode(settings_json, type=WriterSettings)

    engine = build_engine(settings.engine.settings)

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
            engine.stored,
        )
        connector.start()
        return connector

    node, parent = LoopNode("w0", engine=engine, connect=connect), os.getppid()
    node.take(PrefillJob(settings.request, *settings.inbox))
    deadline = time.monotonic() + MAX_S
    while time.monotonic() < deadline and os.getppid() == parent:
        node.loop.turn()
        time.sleep(0.0005)


if __name__ == "__main__":
    main(sys.argv[1])
