"""A decode node, server and engine process, whose engine is a `busy_engine`.

    python -m benchmarks.support.kv.busy_node < settings.json

The server is `baton_node.server.app` as it is; beside it, in its event loop, a task notes how late
the loop wakes it.

In: NodeSettings. Out: a served node until SIGTERM; lags.notes.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from baton_decode_node.serve import serve
from baton_node.settings import NodeSettings
from benchmarks.support.meter import Notes, folder

TICK_S = 0.002


async def watch(lags: Notes) -> None:
    """Seconds later than it should be."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        now = loop.time()
        lags.add(now, now - due)


async def run(settings: NodeSettings) -> None:
    lags = Notes()
    watching = asyncio.create_task(watch(lags))
    await serve(settings, "benchmarks.support.kv.busy_engine")
    watching.cancel()
    lags.write(folder() / "lags.notes")


if __name__ == "__main__":
    asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=NodeSettings)))
