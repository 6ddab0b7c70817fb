"""The shapes of what the router answers, for its OpenAPI document and for who checks answers by it.

In: nothing. Out: JSON schemas, by name. An answer is written from parts that were encoded before,
not from these records; that both agree is what the tests hold the router to. `/pool` may say more
than stands here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, NodeLoad, Speeds

Json = dict[str, Any]
REF = "#/components/schemas/{name}"


class Closed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing else stands in it."""


class Failure(Closed):
    message: str
    type: str
    param: str | None
    code: str | None
    doc: str | UnsetType = UNSET


class ErrorAnswer(Closed):
    error: Failure


class PromptTokensDetails(Closed):
    cached_tokens: int


class Usage(Closed):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class RankedToken(Closed):
    logprob: float
    rank: int
    decoded_token: str


Finish = Literal["stop", "length"]
Stop = str | int | None
PromptLogprobs = list[dict[str, RankedToken] | None]


class Piece(Closed):
    """What all of an answer's objects repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatToken(Closed):
    token: str
    logprob: float
    bytes: list[int]


class ChatPosition(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Closed):
    content: list[ChatPosition]
    refusal: None


class ChatMessage(Closed):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Closed):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: Stop
    token_ids: list[int] | None


class ChatCompletion(Piece):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class ChatDelta(Closed):
    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatEventChoice(Closed):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None
    stop_reason: Stop | UnsetType = UNSET


class ChatCompletionEvent(Piece):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionLogprobs(Closed):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Closed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    stop_reason: Stop
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class Completion(Piece):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEventChoice(Closed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    stop_reason: Stop | UnsetType = UNSET


class CompletionEvent(Piece):
    """An event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionEventChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Closed):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Closed):
    object: Literal["list"]
    data: list[Model]


class Health(Closed):
    status: Literal["ok"]


class LateNode(Closed):
    """A node that is not ready: without its address where nobody has seen it, without its name
    where nothing but its address is known."""

    node: str | None
    address: str | None
    state: str
    reason: str


class Readiness(Closed):
    """`reason` is empty where it is ready; `not_ready` is told where `all` asks for it."""

    ready: bool
    reason: str
    not_ready: list[LateNode] | msgspec.UnsetType = msgspec.UNSET


class ToldNode(Closed):
    """What a node does once it was told to drain, or to take requests again."""

    node: str
    state: Literal["draining", "ready"]
    requests: int


class PoolNode(msgspec.Struct, kw_only=True):
    id: str
    role: str
    address: str
    state: str
    reason: str
    in_use: bool
    differs: list[str]
    model: str
    engine: str
    fingerprint: str
    max_model_len: int
    layout: KVLayout
    speeds: Speeds
    load: NodeLoad
    instances: list[DataInstance]
    cache: dict[str, int]
    booked: dict[str, int]


class Unreachable(msgspec.Struct):
    address: str
    reason: str


class Conflict(msgspec.Struct):
    """The node at `address` is not used: the one at `held_by` has its name and is newer."""

    node: str
    address: str
    held_by: str


class Pool(msgspec.Struct, kw_only=True):
    """The pool as this router sees it."""

    pool: str
    model: str | None
    fingerprint: str | None
    nodes: list[PoolNode]
    unreachable: list[Unreachable]
    conflicts: list[Conflict]
    store: dict[str, Any]
    totals: dict[str, float]


class Explanation(msgspec.Struct, kw_only=True):
    """How a call was served, request by request: docs/api.md names what is told of each."""

    id: str
    state: str
    requests: list[dict[str, Any]]


ANSWERS = (
    ErrorAnswer,
    ChatCompletion,
    ChatCompletionEvent,
    Completion,
    CompletionEvent,
    ModelList,
    Health,
    Readiness,
    ToldNode,
    Pool,
    Explanation,
)


def ref(answer: type) -> Json:
    return {"$ref": REF.format(name=answer.__name__)}


def schemas(answers: Iterable[type] = ANSWERS) -> dict[str, Json]:
    """Of these and of all they hold, for `components/schemas`."""
    _, components = msgspec.json.schema_components(answers, ref_template=REF)
    for component in components.values():
        for field in component.get("properties", {}).values():
            if "pattern" in field:
                # Python's end of a text; in a schema's regular expressions `$` is that.
                field["pattern"] = field["pattern"].replace(r"\Z", "$")
    return components
