"""Runs one node of either role as the CLI does.

Usage: python -m tests.support.nodes.serve_node SETTINGS_JSON
"""

from __future__ import annotations

import sys

import msgspec

import baton_decode_node.serve
import baton_prefill_node.serve
from baton_node.errors import SetupError
from baton_node.ipc.engine_process import ENGINE_MODULE
from baton_node.settings import NodeSettings
from baton_protocol.event_loop import run


def main() -> int:
    settings = msgspec.json.decode(sys.argv[1], type=NodeSettings)
    role = baton_prefill_node if settings.role == "prefill" else baton_decode_node
    try:
        run(role.serve.serve(settings, ENGINE_MODULE))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
