"""Lets pytest find all log records at the root, where it looks for them before each part of a test.

Before and after each of a test's three parts, it also goes through the loggers of all libraries,
twice, for those that do not propagate their records, and adds a handler to each. torch has fifty.
This takes a quarter of the time of a small test.
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest.logging import catching_logs

_look_through_all = catching_logs.__enter__


def catch_logs_at_the_root() -> None:
    """Let each logger propagate, and pytest's handlers listen at the root alone."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    if hasattr(catching_logs, "attached_loggers"):
        catching_logs.__enter__ = _listen  # type: ignore[method-assign]


def _listen(self: catching_logs[Any]) -> Any:
    if self.level is not None:
        return _look_through_all(self)
    logging.root.addHandler(self.handler)
    self.attached_loggers.append(logging.root)
    return self.handler
