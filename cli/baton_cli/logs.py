"""Logging of one process: plain lines or JSON objects on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from baton_protocol.logs import formatter

LogLevel = Literal["debug", "info", "warning", "error"]


def configure(level: LogLevel, json_logs: bool, worker: str = "") -> None:
    """Set up the root logger; call it once, at the start of a process. If `worker` is given, each
    line names it: the process is one of several router workers."""
    handler = logging.StreamHandler(sys.stderr)
    if worker:
        handler.addFilter(WorkerName(worker))
    handler.setFormatter(formatter(json_logs))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The router writes its own line for each request.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class WorkerName(logging.Filter):
    """Adds `worker` to each record."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker = self._worker
        return True
