"""Progress of a long operation: one changing line on a terminal, log lines elsewhere.

In: texts. Out: on a terminal, the newest text in one line, which is erased at the end; elsewhere,
one log line every few seconds. A short operation shows nothing.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 0.3
TERMINAL_EVERY_S = 0.1
LOG_EVERY_S = 5.0
ERASE = "\r\x1b[K"


class ProgressLine:
    """A context manager that writes to `out`. `clock` is in seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._drawn = False
        self._began = clock()
        first_s = FIRST_AFTER_S if self._live else LOG_EVERY_S
        self._due = self._began + first_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._out.write(ERASE)
            self._out.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def show(self, text: str) -> None:
        """Show `text` with the elapsed seconds, if the last text was shown long enough ago."""
        now = self._clock()
        if now < self._due:
            return
        text = f"{text}, {self.seconds:.1f} s"
        if not self._live:
            self._due = now + LOG_EVERY_S
            logger.info("%s", text)
            return
        self._due = now + TERMINAL_EVERY_S
        width = shutil.get_terminal_size().columns
        self._out.write(ERASE + text[: width - 1])
        self._out.flush()
        self._drawn = True
