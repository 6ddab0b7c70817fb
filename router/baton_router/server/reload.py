"""Reloads files when they change: keys and limits, also if a Kubernetes Secret swaps them.

In: paths, and a function that reads them. Out: a call of the function after each change. A file
that is invalid or missing causes one log line and no other change.
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
    """Checks the files every `every_s` seconds. `read` raises StartError for an unusable file, and
    must then have changed nothing."""

    def __init__(self, paths: Sequence[str], read: Callable[[], None], every_s: float) -> None:
        self._paths = tuple(path for path in paths if path)
        self._read = read
        self._every_s = every_s
        self._stamps = self._current_stamps()
        self._last_error = ""

    async def watch_files(self) -> None:
        while self._paths:
            await asyncio.sleep(self._every_s)
            self.reload_changed()

    def reload_changed(self) -> None:
        """Reload if a file changed, or if the last reload failed: a file that is written in place
        may have been read half-written."""
        stamps = self._current_stamps()
        if stamps == self._stamps and not self._last_error:
            return
        self._stamps = stamps
        try:
            self._read()
        except StartError as error:
            if str(error) != self._last_error:
                logger.error("cannot reload; the old configuration stays in force: %s", error)
            self._last_error = str(error)
        else:
            self._last_error = ""
            logger.info("reloaded %s", ", ".join(self._paths))

    def _current_stamps(self) -> tuple[Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> Stamp:
    """Identity and times of the file behind symbolic links, which a Secret switches to a new
    folder."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
