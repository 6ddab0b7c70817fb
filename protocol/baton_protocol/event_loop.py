"""Runs the main of a process that serves connections on the fastest event loop that is installed.

In: the coroutine of a router or of a node's server. Out: its result. With uvloop, which the extra
`serve` brings on Linux, a token costs a fifth less of router and server than with asyncio's own
loop: what is left of a pass of the loop is in C (`python -m benchmarks.router.overhead`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, as asyncio.run() does."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
