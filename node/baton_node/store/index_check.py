"""Watches whether the store's index answers and accepts writes.

In: this node's commands to the index, and a probe. Out: the commands' results, or StoreUnavailable
at once while the index cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton_kvstore.errors import ServerRefused, StoreUnavailable

T = TypeVar("T")
logger = logging.getLogger(__name__)
EVERY_S = 1.0  # interval of probes
QUICK_CHECK_S = 0.25  # interval of probes while there is trouble


class IndexCheck:
    """Watches whether the store's index can be used: whether it answers and accepts writes.

    In: this node's commands to the index, and a probe (a small write). The probe runs each second,
    more often while there is trouble, and at once after a failed command. Out: the commands'
    results, or StoreUnavailable; `trouble` and `away`.

    While the index does not answer, all commands are refused at once, so a frozen index costs one
    deadline, not one per command. While it is full, only commands that need room are refused. One
    log line reports the failure, and one the recovery.

    Any thread may read the properties; all else belongs to one event loop.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._trouble = ""
        self._succeeded_at = float("-inf")
        self._now = asyncio.Event()  # set: run the next probe now
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def trouble(self) -> str:
        """Why the index accepts no writes now, "" if it does."""
        return self._trouble

    @property
    def away(self) -> bool:
        """True while the index does not answer at all."""
        return not self._answers.is_set()

    async def wait_for_answers(self) -> None:
        """Wait until the index answers again, if it is away."""
        await self._answers.wait()

    async def ask(self, question: Callable[[], Awaitable[T]], *, adds: bool = True) -> T:
        """Run a command and return its result. `adds` says that it needs room on the index. Raise
        StoreUnavailable if the command fails, or at once if the index is away, or in trouble and
        `adds` is set."""
        if self.away or (adds and self._trouble):
            raise StoreUnavailable(self._trouble)
        began = self._clock()
        try:
            return await question()
        except ServerRefused:
            self._now.set()  # the index may be full; probe to find out
            raise
        except StoreUnavailable as error:
            self._note_failure(error, began)
            raise

    async def probe_forever(self) -> None:
        """Probe until cancelled."""
        while True:
            self._now.clear()
            began = self._clock()
            try:
                await self._probe()
            except StoreUnavailable as error:
                self._note_failure(error, began)
            except Exception as error:  # a task's outer edge: without it, `trouble` never changes
                logger.exception("the probe of the store's index failed")
                self._note_failure(StoreUnavailable(repr(error)), began)
            else:
                self._note_answer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUICK_CHECK_S if self._trouble else EVERY_S):
                    await self._now.wait()

    def _note_failure(self, error: StoreUnavailable, began: float) -> None:
        """A command or probe that began at `began` has failed. Ignore it if a probe has succeeded
        since then."""
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

    def _note_answer(self) -> None:
        self._succeeded_at = self._clock()
        self._answers.set()
        if self._trouble:
            self._trouble = ""
            logger.warning("the store's index can be used again")
