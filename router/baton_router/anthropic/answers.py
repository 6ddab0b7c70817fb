"""The JSON of Anthropic's answers as records. The shape encodes them, `http/openapi` documents
them, and tests decode answers with them. A field without a default is in every answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton_protocol.errors import DOCS, SECTIONS, ErrorRecord
from baton_router.openai.answers import Closed, Model, Usage, one_line

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
# By HTTP status; others are of the client or of the server.
ERROR_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The text of an object is sent as the model wrote it.
Input = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
NO_INPUT = msgspec.Raw(b"{}")


class ThinkingTokensDetails(Closed):
    thinking_tokens: int


class MessageUsage(Closed):
    """Tokens. The prompt has all three of input, read and creation; those read came from a cache.
    The beginning of a stream counts the whole prompt as input, its end tells them apart. Only
    models whose thinking is separated have details."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        reasoning = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens_details=(
                UNSET
                if reasoning is UNSET
                else ThinkingTokensDetails(thinking_tokens=reasoning.reasoning_tokens)
            ),
        )


class TextBlock(Closed, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Closed, tag_field="type", tag="thinking"):
    """`signature` is a digest of the text."""

    thinking: str
    signature: str


class ToolUseBlock(Closed, tag_field="type", tag="tool_use"):
    """`input` holds the text as `raw_arguments` if the answer was cut inside it."""

    id: str
    name: str
    input: Input


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Closed, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Closed, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(Closed, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Closed, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Closed, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Closed, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Closed, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Closed, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Closed, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Closed):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Closed, tag_field="type", tag="message_delta"):
    """The usage is that of the whole answer."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Closed, tag_field="type", tag="message_stop"):
    pass


class Ping(Closed, tag_field="type", tag="ping"):
    """Shows that the connection lives."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


class CountedTokens(Closed):
    """Tokens of a conversation's prompt."""

    input_tokens: int


class ErrorCode(Closed):
    """The error's code, the field that it is about, and a section of the documents."""

    error_code: str
    param: str | None
    doc: str | UnsetType = UNSET


class MessagesErrorDetails(Closed):
    type: ErrorType
    message: str
    details: ErrorCode


class MessagesError(Closed, tag_field="type", tag="error"):
    """An error. The last event of a failed stream lacks the id, which the stream's headers have."""

    error: MessagesErrorDetails
    request_id: str | UnsetType = UNSET

    @classmethod
    def of(cls, error: ErrorRecord, request_id: str | UnsetType = UNSET) -> MessagesError:
        section = SECTIONS.get(error.code)
        other: ErrorType = "invalid_request_error" if error.status < 500 else "api_error"
        return cls(
            error=MessagesErrorDetails(
                type=ERROR_TYPES.get(error.status, other),
                message=error.message,
                details=ErrorCode(
                    error_code=error.code,
                    param=error.param,
                    doc=UNSET if section is None else DOCS + section,
                ),
            ),
            request_id=request_id,
        )


class ModelInfo(Closed, tag_field="type", tag="model"):
    """`created_at` is when the model's files were written. A prompt and its answer together have at
    most the number of tokens that both maxima say; None while no node is known."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None

    @classmethod
    def of(cls, model: Model) -> ModelInfo:
        created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(
            id=model.id,
            display_name=model.id,
            created_at=created,
            lifecycle="active",
            max_input_tokens=model.max_model_len,
            max_tokens=model.max_model_len,
        )


class ModelPage(Closed):
    """All models."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, models: Sequence[Model]) -> ModelPage:
        ids = [model.id for model in models]
        return cls(
            data=[ModelInfo.of(model) for model in models],
            has_more=False,
            first_id=ids[0] if ids else None,
            last_id=ids[-1] if ids else None,
        )


def event(record: msgspec.Struct) -> bytes:
    """A server-sent event, which has the name of its record's type."""
    tag = record.__struct_config__.tag
    assert isinstance(tag, str), "each event has a type"
    return b"event: %b\ndata: %b\n\n" % (tag.encode(), one_line(record))
