"""The format of log lines, the same in all processes so that a request can be traced across them.

Loggers pass context in `extra`, under the same names everywhere: `request` and `attempt` (always
together), `node`, `cause`, `endpoint`, `status`. The only text from a client is its own
request id, `client_request`. The output is one line of text, or one JSON object on one line.
"""

from __future__ import annotations

import json
import logging

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Attributes that every record has. All others came from `extra`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object: time (Unix seconds), level, logger, message, the fields of `extra`, and the
    traceback if there is an exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """Time of day, level, logger and message, then those of request, attempt and the
    client's request id (in quotes) that the record has."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        names = [name for name in ("request", "attempt") if hasattr(record, name)]
        parts = [super().formatMessage(record)]
        parts += [f"{name}={getattr(record, name)}" for name in names]
        if client := getattr(record, "client_request", None):
            parts.append(f"client_request={client!r}")
        return " ".join(parts)


def formatter(json_logs: bool) -> logging.Formatter:
    return JsonFormatter() if json_logs else TextFormatter()
