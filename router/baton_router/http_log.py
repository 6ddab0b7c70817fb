"""What aiohttp's server says of clients, without their words.

In: its log records. Out: those about the router's own failures. What a client sent that is no HTTP
would be told with a traceback that repeats it: a key may stand there, and anybody could fill the
log. It is a line for debugging instead, with the kind of error and nothing else.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

# Its own message holds the line that was wrong.
_CLIENTS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)

logger = logging.getLogger(__name__)


def is_ours(record: logging.LogRecord) -> bool:
    """False for what a client did wrong, which is told here."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, _CLIENTS):
        logger.debug("what a client sent is no HTTP: %s", type(error).__name__)
        return False
    return True


def server_log() -> logging.Logger:
    """The logger to give to aiohttp's server."""
    told = logging.getLogger(f"{__name__}.server")
    told.addFilter(is_ours)  # once, however often it is added
    return told
