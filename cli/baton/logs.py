"""Logging of one process: plain lines or JSON objects on stderr."""

from __future__ import annotations

import json
import logging
import sys

from baton.options import LogLevel


class JsonFormatter(logging.Formatter):
    """One object per record: time (Unix seconds), level, logger, message, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(level: LogLevel, json_logs: bool) -> None:
    """Set up the root logger; call it once, first thing in a process."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if json_logs else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # One line per request is the router's own business.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
