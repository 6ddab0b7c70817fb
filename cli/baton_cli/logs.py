"""Logging of one process: plain lines or JSON objects on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from baton_protocol.logs import formatter

LogLevel = Literal["debug", "info", "warning", "error"]


def configure(level: LogLevel, json_logs: bool) -> None:
    """Set up the root logger; call it once, at the start of a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(json_logs))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The router writes its own line for each request.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
