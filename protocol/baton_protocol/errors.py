"""The errors that a client can see. Their fields follow OpenAI's error object.

    BatonError                      has HTTP status, `type`, `code`, `param` and `retryable`
    |-- InvalidRequest      400     a field is wrong; `param` names it
    |   |-- PromptTooLong   400     code context_length_exceeded
    |   `-- MalformedBody   400     not JSON, or not an object
    |-- NotFound            404     unknown model or route
    |-- Unauthorized        401
    |-- Forbidden           403     the server's settings allow this to nobody
    |-- BodyTimeout         408     the body arrived too slowly
    |-- TooLarge            413     the body is over the limit
    |-- SlowClient          408     the client does not read its stream; sent only as a stream event
    |-- Saturated           429     has `retry_after` in seconds
    |   |-- RateLimited     429     the tenant's budget is used up
    |   |-- QueueFull       429     too many requests are waiting already
    |   `-- BodiesFull      429     the server is reading too many large bodies
    |-- Unavailable         503     retryable: no node can serve the request now
    |   `-- QueueTimeout    503     every node stayed full
    |-- DeadlineExceeded    504
    |-- RequestKillsNodes   500     final: every node that got the request died without progress
    |-- NotEnoughMemory     500     final: the request does not fit the device's memory even alone
    |-- GrammarDeadEnd      500     final: no token may follow in a choice's grammar, and the text
    |                               does not match it yet
    `-- InternalError       500     a bug in Baton

`ErrorRecord` is the form of an error on the wire between Baton's processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from baton_protocol.figures import Seconds

DOCS = "docs/"  # in the repository
# Error code -> the section of the documentation that tells the client what to do about it. Codes
# that a client cannot act on are missing.
SECTIONS: Mapping[str, str] = {
    "invalid_value": "api.md#request-fields",
    "unknown_parameter": "api.md#request-fields",
    "malformed_body": "api.md#request-fields",
    "context_length_exceeded": "api.md#long-prompts",
    "malformed_request": "reason-codes.md#errors",
    "http_error": "reason-codes.md#errors",
    "too_many_sequences": "operations/limits.md#admission",
    "wrong_task": "embeddings.md#models",
    "over_budget": "operations/limits.md#admission",
    "invalid_api_key": "operations/secure.md#tenants",
    "admin_key_required": "operations/secure.md#tenants",
    "invalid_link_token": "operations/secure.md#logins",
    "forbidden": "api.md#draining-a-node",
    "foreign_origin": "api.md#pages-in-a-browser",
    "foreign_host": "api.md#pages-in-a-browser",
    "unsupported_content_type": "api.md#pages-in-a-browser",
    "not_found": "api.md#http-api",
    "model_not_found": "api.md#http-api",
    "method_not_allowed": "api.md#http-api",
    "response_not_found": "responses.md#kept-responses",
    "stream_not_found": "api.md#resuming-a-stream",
    "request_not_found": "api.md#how-a-request-was-served",
    "body_timeout": "operations/limits.md#slow-and-large-requests",
    "request_too_large": "operations/limits.md#slow-and-large-requests",
    "headers_too_large": "operations/limits.md#slow-and-large-requests",
    "bodies_full": "operations/limits.md#slow-and-large-requests",
    "slow_client": "api.md#streams",
    "rate_limited": "operations/limits.md#admission",
    "queue_full": "operations/limits.md#admission",
    "saturated": "operations/limits.md#admission",
    "no_file_store": "batches.md#where-files-are",
    "too_many_files": "batches.md#where-files-are",
    "too_many_batches": "batches.md#where-files-are",
    "prefix_refused": "api.md#pinning-a-prefix",
    "grammar_dead_end": "structured-output.md#dead-ends",
}


def exact(value: float) -> str:
    """The number in full, for an error: `:g` would round 2147483647 to 2.14748e+09."""
    whole = isinstance(value, int) or value.is_integer()
    return str(int(value)) if whole else repr(value)


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A BatonError on the wire.

    `retryable` False means that no other node may be tried. `retry_after` is in seconds.
    """

    message: str
    code: str
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    type: str = "server_error"
    param: str | None = None
    retryable: bool = False
    retry_after: Seconds | None = None


class BatonError(Exception):
    """Base of every error that a client can see.

    `reason` is the error's code: the class's `code` unless the constructor got another.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = code or self.code
        self.retry_after = retry_after

    def record(self) -> ErrorRecord:
        """The wire form."""
        return ErrorRecord(
            message=self.message,
            code=self.reason,
            status=self.status,
            type=self.type,
            param=self.param,
            retryable=self.retryable,
            retry_after=self.retry_after,
        )


class InvalidRequest(BatonError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class MalformedBody(InvalidRequest):
    code = "malformed_body"


class NotFound(BatonError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Unauthorized(BatonError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BatonError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class BodyTimeout(BatonError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class TooLarge(BatonError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class SlowClient(BatonError):
    status = 408
    type = "invalid_request_error"
    code = "slow_client"


class Saturated(BatonError):
    status = 429
    type = "rate_limit_error"
    code = "saturated"
    retryable = True


class RateLimited(Saturated):
    code = "rate_limited"


class QueueFull(Saturated):
    code = "queue_full"


class BodiesFull(Saturated):
    code = "bodies_full"


class Unavailable(BatonError):
    status = 503
    type = "server_error"
    code = "unavailable"
    retryable = True


class QueueTimeout(Unavailable):
    code = "queue_timeout"


class DeadlineExceeded(BatonError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class RequestKillsNodes(BatonError):
    code = "request_kills_nodes"


class NotEnoughMemory(BatonError):
    code = "out_of_memory"


class GrammarDeadEnd(BatonError):
    code = "grammar_dead_end"


class InternalError(BatonError):
    pass


def error_of(record: ErrorRecord) -> BatonError:
    """The error of a node's record, so that a caller in Python can catch it by its class. One of a
    code without a class is an InvalidRequest or, from status 500 on, an InternalError."""
    kind = next((each for each in _OF_NODES if each.code == record.code), None)
    if kind is None:
        kind = InvalidRequest if record.status < 500 else InternalError
    return kind(
        record.message, param=record.param, code=record.code, retry_after=record.retry_after
    )


_OF_NODES: tuple[type[BatonError], ...] = (
    PromptTooLong,
    DeadlineExceeded,
    Unavailable,
    NotEnoughMemory,
    GrammarDeadEnd,
)
