"""Logging of one process: plain lines or JSON objects on stderr."""

from __future__ import annotations

import logging
import sys

from baton.options import LogLevel
from baton_protocol.logs import formatter


def configure(level: LogLevel, json_logs: bool) -> None:
    """Set up the root logger; call it once, first thing in a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(json_logs))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # One line per request is the router's own business.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
