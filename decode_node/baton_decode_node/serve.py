"""One decode node in this process.

In: NodeSettings. Out: a served node until SIGTERM or SIGINT. Raises SetupError.
"""

from __future__ import annotations

from baton_decode_node.admission import DecodeRole
from baton_node.server.app import run_node
from baton_node.settings import NodeSettings
from baton_protocol.traces import Sink


async def serve(settings: NodeSettings, engine_module: str, spans: Sink | None = None) -> None:
    """Serve until a signal; the second one ends at once. `engine_module` is the main of the engine
    process (`python -m`); `spans` gets what is traced."""
    await run_node(settings, DecodeRole(), engine_module, spans)
