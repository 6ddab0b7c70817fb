"""Runs the main of a process that serves connections on the fastest event loop that is installed.

In: the coroutine of a router or of a node's server. Out: its result. The extra `serve` brings
uvloop on Linux. With it, router and node's server take 6 to 15% less CPU time per request of 64
tokens at one client (`python -m benchmarks.router.overhead`, AMD EPYC with 2 cores beside other
work); at 32 clients the difference was within the noise of 10%.
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
