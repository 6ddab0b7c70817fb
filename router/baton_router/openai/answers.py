"""The JSON of OpenAI's answers as records. The endpoints encode them, `http/openapi` documents
them, and tests decode answers with them.

A field that may be absent is UNSET; one that may be null is None. A field without a default is in
every answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton_protocol.errors import DOCS, SECTIONS, ErrorRecord
from baton_protocol.sampling import FinishReason

DONE = b"data: [DONE]\n\n"
# A chat answer that calls functions finishes with `tool_calls`.
ChatFinish = FinishReason | Literal["tool_calls"]
StopReason = str | int | None  # the stop string or id that ended the choice, as in vLLM
TokenIds = Sequence[int]
_ENCODER = msgspec.json.Encoder()  # 0.1 us faster per event than msgspec.json.encode
# Characters that end a line for `str.splitlines`, and so for httpx's `iter_lines`, but not in
# server-sent events. The encoder escapes all others of this kind, as JSON demands it.
LINE_BREAKS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


class Closed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A record that has these fields and no others. It can be in no cycle, so collections pass over
    it."""


class ErrorDetails(Closed):
    """`doc` names a section of the documents, where the client can do something about the error."""

    message: str
    type: str
    param: str | None
    code: str | None
    doc: str | UnsetType = UNSET


class ErrorAnswer(Closed):
    error: ErrorDetails

    @classmethod
    def of(cls, error: ErrorRecord) -> ErrorAnswer:
        section = SECTIONS.get(error.code)
        return cls(
            error=ErrorDetails(
                message=error.message,
                type=error.type,
                param=error.param,
                code=error.code,
                doc=UNSET if section is None else DOCS + section,
            )
        )


class PromptTokensDetails(Closed):
    cached_tokens: int


class CompletionTokensDetails(Closed):
    reasoning_tokens: int


class Usage(Closed):
    """Tokens, summed over the prompts of one call. Before the end of a stream, cached tokens and
    reasoning tokens are missing. Only models whose reasoning is separated have reasoning tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int | None = None) -> Usage:
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=(
                UNSET if cached is None else PromptTokensDetails(cached_tokens=cached)
            ),
        )

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is UNSET else details.cached_tokens


class RankedToken(Closed):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class CommonFields(Closed):
    """What all of an answer's objects repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def shared(self) -> dict[str, Any]:
        """These fields, as keyword arguments of one of the answer's objects."""
        return msgspec.structs.asdict(self)


class ChatToken(Closed):
    token: str
    logprob: float
    bytes: list[int]


class ChatPosition(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Closed):
    content: list[ChatPosition]
    refusal: None


class CalledFunction(Closed):
    """`arguments` is the text of a JSON object, where the answer was not cut."""

    name: str
    arguments: str


class ToolCall(Closed):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Closed):
    """Content is null if there are only calls or reasoning. Only models with separated reasoning
    have it, under two names as in vLLM. Only an answer with calls has `tool_calls`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Closed):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: StopReason
    token_ids: TokenIds | None


class ChatCompletion(CommonFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds | None
    prompt_logprobs: PromptLogprobs | None


class FunctionDelta(Closed):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Closed):
    """The first of a call has its id, its type and its function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Closed):
    """An event of an answer that is parsed into parts has only the parts to which it adds."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Closed):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: TokenIds | None
    stop_reason: StopReason | UnsetType = UNSET


class ChatCompletionChunk(CommonFields):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds | UnsetType | None = UNSET


class CompletionLogprobs(Closed):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Sequence[int]


class CompletionChoice(Closed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: TokenIds | None
    token_ids: TokenIds | None


class Completion(CommonFields):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Closed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: TokenIds | None
    token_ids: TokenIds | None
    stop_reason: StopReason | UnsetType = UNSET


class CompletionChunk(CommonFields):
    """An event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Closed):
    """`task` is what its nodes do, or did when the router last knew any."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    task: Literal["generate", "embed", "classify"]


class ModelList(Closed):
    object: Literal["list"]
    data: list[Model]


def event(answer: Closed) -> bytes:
    """The answer as a server-sent event."""
    return b"data: %b\n\n" % one_line(answer)


def one_line(record: msgspec.Struct) -> bytes:
    """The record's JSON in one line for every client, however it splits lines."""
    data = _ENCODER.encode(record)
    if not data.isascii():
        for char, escape in LINE_BREAKS:
            if char[-1] in data:  # at 50 ns; a search for two or three bytes takes 700 ns
                data = data.replace(char, escape)
    return data
