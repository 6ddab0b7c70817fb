"""Whether the store's index can be used now: it answers, and it takes writes.

In: the commands this node has for it, and a probe (a small write): each second, oftener while there
is trouble, at once when a command failed. Out: answers, or StoreUnavailable; `trouble` and `away`,
which any thread may read. While the index is away whoever asks is refused at once, so that a frozen
one costs its deadline once; while it is full, only who would add to it. Its loss is one line in the
log, its return another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton_kvstore.errors import ServerRefused, StoreUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

EVERY_S = 1.0
RETRY_S = 0.25


class IndexCheck:
    """Everything but the properties belongs to one event loop."""

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._trouble = ""
        self._succeeded_at = float("-inf")
        self._now = asyncio.Event()  # probe without waiting
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def trouble(self) -> str:
        """Why nothing is added to the index; "" while it can be."""
        return self._trouble

    @property
    def away(self) -> bool:
        """True while the index does not answer at all."""
        return not self._answers.is_set()

    async def answers(self) -> None:
        """Wait until the index is not away."""
        await self._answers.wait()

    async def ask(self, question: Callable[[], Awaitable[T]], *, adds: bool = True) -> T:
        """The answer, or StoreUnavailable. `adds`: it needs room on the index."""
        if self.away or (adds and self._trouble):
            raise StoreUnavailable(self._trouble)
        began = self._clock()
        try:
            return await question()
        except ServerRefused:
            self._now.set()  # full, perhaps: the probe will say
            raise
        except StoreUnavailable as error:
            self._lost(error, began)
            raise

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            self._now.clear()
            began = self._clock()
            try:
                await self._probe()
            except StoreUnavailable as error:
                self._lost(error, began)
            except Exception as error:  # a task's outer edge, and nothing works without it
                logger.exception("the probe of the store's index failed")
                self._lost(StoreUnavailable(repr(error)), began)
            else:
                self._found()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._trouble else EVERY_S):
                    await self._now.wait()

    def _lost(self, error: StoreUnavailable, began: float) -> None:
        """What began before the index was last seen at work says nothing about now."""
        if began < self._succeeded_at:
            return
        if isinstance(error, ServerRefused):
            self._answers.set()
        else:
            self._answers.clear()
        if not self._trouble:
            self._now.set()
            logger.warning("the store's index cannot be used: %s", error)
        self._trouble = str(error)

    def _found(self) -> None:
        self._succeeded_at = self._clock()
        self._answers.set()
        if self._trouble:
            self._trouble = ""
            logger.warning("the store's index can be used again")
