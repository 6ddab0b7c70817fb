"""Waits for a condition, with a limit far above the time it usually takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 120.0


async def until(done: Callable[[], object]) -> None:
    """Return once `done()` is true; raise TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)


async def until_is(look: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Return once `await look()` equals `wanted`; raise TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while await look() != wanted:
            await asyncio.sleep(0.01)
