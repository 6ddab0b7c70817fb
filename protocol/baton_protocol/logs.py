"""One shape of log line in all processes, so that a request can be followed from one to the next.

In: log records. What a line is about comes as `extra`, under the same names everywhere: `request`
and `attempt` (always together), `node`, `cause`, `endpoint`, `status`, `worker`. Of what a
client wrote, only its own id of the request: `client_request`. Out: one line of text, or one JSON
object on one line.
"""

from __future__ import annotations

import json
import logging

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# What every record has; the rest came as `extra`.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """time (Unix seconds), level, logger, message, then what came as `extra`, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """Time of day, level, logger, message; then request and attempt, where a line is about one, the
    worker, where the process is one of several, and the client's id in quotes, where it has one."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        names = [name for name in ("request", "attempt", "worker") if hasattr(record, name)]
        parts = [super().formatMessage(record)]
        parts += [f"{name}={getattr(record, name)}" for name in names]
        if client := getattr(record, "client_request", None):
            parts.append(f"client_request={client!r}")
        return " ".join(parts)


def formatter(json_logs: bool) -> logging.Formatter:
    return JsonFormatter() if json_logs else TextFormatter()
