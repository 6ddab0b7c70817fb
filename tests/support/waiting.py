"""Waits for a condition, with a limit far above the time it usually takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 120.0


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition()` is true; raise TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def until_is(read: Callable[[], Awaitable[object]], expected: object) -> None:
    """Return once `await read()` equals `expected`; raise TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while await read() != expected:
            await asyncio.sleep(0.01)
