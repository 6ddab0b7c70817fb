"""The fields of POST /v1/chat/completions/batch: a chat's, with a list of conversations."""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.completions import MAX_PROMPTS
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.kinds import Json, ValueKind, integer, only
from baton_router.openai.fields.table import Field, optional, refused, required, unsupported
from baton_router.openai.messages import MESSAGES

_ONE_PIECE = "the answers come together"
_NO_TOOLS = "answers of a batch call no functions"
# None, so that the rules of tools are those of a chat without any.
_NO_CHOICE = only(("none",), unsupported(_NO_TOOLS))


def _read_conversations(at: str, value: Any) -> list[list[Json]]:
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a list of conversations with at least one")
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(
            f"{at} holds {len(value)} conversations; at most {MAX_PROMPTS}", param=at
        )
    return [MESSAGES.read(f"{at}[{place}]", messages) for place, messages in enumerate(value)]


CONVERSATIONS = ValueKind(
    _read_conversations,
    {"type": "array", "items": MESSAGES.schema, "minItems": 1, "maxItems": MAX_PROMPTS},
    MESSAGES.members,
    listed=True,
)


def _read_no_choice(at: str, value: Any) -> None:
    _NO_CHOICE.read(at, value)


class BatchChatFields(ChatFields, route="/v1/chat/completions/batch"):
    """The body of several chats with the same parameters."""

    messages: Field[Any] = required(CONVERSATIONS, "the conversations; each is answered separately")
    n = optional(integer(1, 1), "each conversation has one answer", "1")
    best_of = optional(integer(1, 1), "may only repeat `n`", "`n`")
    stream: Field[Any] = refused(_ONE_PIECE, accepts=(False,))
    stream_options: Field[Any] = refused(_ONE_PIECE, accepts=())
    prompt_logprobs: Field[Any] = refused("send one conversation as a chat", accepts=())
    use_beam_search: Field[Any] = refused("send one conversation as a chat", accepts=(False,))
    tools: Field[Any] = refused(_NO_TOOLS, accepts=())
    tool_choice: Field[Any] = Field(
        kind=ValueKind(_read_no_choice, _NO_CHOICE.schema),
        remark=_NO_TOOLS,
        absent=None,
        use="refused",
    )
    parallel_tool_calls: Field[Any] = refused(_NO_TOOLS, accepts=())
