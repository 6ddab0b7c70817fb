"""A dialect: one route that generates, in the form that its clients expect.

The routes serve all dialects alike; a dialect brings how its bodies are read and how its errors
look. How its answers look is in the shape of its calls (see `call`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_protocol.errors import ErrorRecord
from baton_router.openai.answers import ErrorAnswer, event
from baton_router.openai.call import Call

WAITING = b": waiting\n\n"  # an SSE comment, which clients ignore
ErrorBody = Callable[[ErrorRecord, str], Any]


def _openai_error(error: ErrorRecord, request_id: str) -> ErrorAnswer:
    return ErrorAnswer.of(error)


def _openai_error_event(error: ErrorRecord) -> bytes:
    return event(ErrorAnswer.of(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`endpoint` names the route in metrics, logs and explanations, `operation` in traces (in
    OpenTelemetry's terms). `prefix` begins the ids of its answers. `parse` raises
    InvalidRequest and MalformedBody. `error_body` makes the record of an error's JSON from the
    error and the request's id; `error_event` is an error of a stream that shows nothing yet.
    `waiting` keeps a stream without tokens alive. `id_header` names the header in which its clients
    look for the request's id, beside `x-request-id`."""

    route: str
    endpoint: str
    operation: str
    prefix: str
    parse: Callable[[bytearray], Call]
    error_body: ErrorBody = _openai_error
    error_event: Callable[[ErrorRecord], bytes] = _openai_error_event
    waiting: bytes = WAITING
    id_header: str = ""
