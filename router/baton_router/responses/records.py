"""The JSON of a response and of the items in its output, as records.

An item is a message, the model's reasoning, or a call of a function. Clients send items back as
input (see `items`). Each field is in every answer; one that may be null is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET

from baton_router.openai.answers import ChatPosition, Closed, Usage

ID_PREFIX = "resp_"
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Closed, tag_field="type", tag="output_text"):
    """`logprobs` are empty unless the client asks for them."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChatPosition]


class OutputMessage(Closed, tag_field="type", tag="message"):
    """`content` is empty until its text begins."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(Closed, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Closed, tag_field="type", tag="reasoning"):
    """What the model thinks. `summary` is empty: nothing summarizes it. `encrypted_content` is the
    same text in the form that clients send back."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCall(Closed, tag_field="type", tag="function_call"):
    """`arguments` is the text of a JSON object, where the answer was not cut."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(Closed):
    """`cache_write_tokens` is 0: they are not counted."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Closed):
    reasoning_tokens: int


class ResponseUsage(Closed):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=0 if details is UNSET else details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


class ResponseError(Closed):
    """Why a response failed: a reason code of Baton, and its message."""

    code: str
    message: str


class IncompleteDetails(Closed):
    reason: Literal["max_output_tokens"]


class Response(Closed):
    """An answer. The fields from `background` on repeat what the client asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Mapping[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: list[Mapping[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class DeletedResponse(Closed):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(Closed):
    """A page of a response's input. `has_more`: there are items after `last_id`."""

    object: Literal["list"]
    data: Sequence[Mapping[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Closed):
    object: Literal["response.input_tokens"]
    input_tokens: int
