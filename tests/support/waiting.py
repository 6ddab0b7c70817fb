"""Waiting for something to become true, for far longer than it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 120.0


async def until(done: Callable[[], object]) -> None:
    """Return once `done()` is true; TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)
