"""Files that are read again when they change: keys and limits, as a Kubernetes Secret swaps them.

In: paths, and what reads them. Out: it is called after each change. A file that is wrong, or gone,
says so in one log line and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from baton_router.errors import StartError

logger = logging.getLogger(__name__)

Stamp = tuple[int, ...] | None


class FileReloader:
    """Looks each `every_s`. `read` raises StartError for what cannot be used, and then has changed
    nothing."""

    def __init__(self, paths: Sequence[str], read: Callable[[], None], every_s: float) -> None:
        self._paths = tuple(path for path in paths if path)
        self._read = read
        self._every_s = every_s
        self._stamps = self._look()
        self._told = ""

    async def run(self) -> None:
        while self._paths:
            await asyncio.sleep(self._every_s)
            self.look()

    def look(self) -> None:
        """Read again if a file is another one, or was not what it should be: one that is written
        in place is seen half."""
        stamps = self._look()
        if stamps == self._stamps and not self._told:
            return
        self._stamps = stamps
        try:
            self._read()
        except StartError as error:
            if str(error) != self._told:
                logger.error("what was read before stays in force: %s", error)
            self._told = str(error)
        else:
            self._told = ""
            logger.info("read again: %s", ", ".join(self._paths))

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> Stamp:
    """Through symbolic links: a Secret's are turned to another folder."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
