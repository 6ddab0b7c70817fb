"""Work that takes long for many tokens, and would keep the event loop from the other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Hashing a block takes 2 us, so more tokens are processed in a thread.
LONG_PROMPT = 8192


async def in_thread_if_long(tokens: int, work: Callable[[], T]) -> T:
    """Do work on this many tokens."""
    return await asyncio.to_thread(work) if tokens > LONG_PROMPT else work()
