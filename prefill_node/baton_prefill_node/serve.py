"""One prefill node in this process.

In: NodeSettings. Out: a served node until SIGTERM or SIGINT. Raises SetupError.
"""

from __future__ import annotations

from baton_node.server import run_node
from baton_node.settings import NodeSettings
from baton_prefill_node.role import PrefillRole


async def serve(settings: NodeSettings) -> None:
    """Serve until a signal; the second one ends at once."""
    await run_node(settings, PrefillRole())
