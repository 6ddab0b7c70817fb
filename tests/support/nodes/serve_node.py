"""One node of either role, as the cli runs it.

Usage: python -m tests.support.nodes.serve_node SETTINGS_JSON
"""

from __future__ import annotations

import asyncio
import sys

import baton_decode_node
import baton_prefill_node
from baton_node.settings import NodeSettings, SetupError


def main() -> int:
    settings = NodeSettings.from_json(sys.argv[1].encode())
    serve = baton_prefill_node.serve if settings.role == "prefill" else baton_decode_node.serve
    try:
        asyncio.run(serve(settings))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
