"""Runs one decode node in this process."""

from __future__ import annotations

from baton_decode_node.admission import DecodeRole
from baton_node.server.run_node import run_node
from baton_node.settings import NodeSettings
from baton_protocol.traces import Sink


async def serve(settings: NodeSettings, engine_module: str, spans: Sink | None = None) -> None:
    """Serve until SIGTERM or SIGINT. The first signal drains the node, the second ends it at once.

    `engine_module` is the module that the engine process runs (`python -m`). `spans` receives the
    trace spans. Raise SetupError if the node cannot start.
    """
    await run_node(settings, DecodeRole(), engine_module, spans)
