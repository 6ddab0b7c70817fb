"""Reads the messages of a chat.

In: `messages` of a body. Out: each message with its content as one text, and only the members that
the model's template may see. What a client got back, from this server or another, it may send
again: other members of a message, a part or a call are left out.
"""

from __future__ import annotations

from typing import Any

from baton_router.openai.body_reader import MEMBERS, MISSING, Schema, members_schema, show, wrong
from baton_router.openai.tools import CALLS_SCHEMA, check_calls, known_call

Json = dict[str, Any]
MESSAGE, PART = MEMBERS["chat", "messages[]"], MEMBERS["chat", "messages[].content[]"]
# Type of a part -> its member with the text.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts of an assistant's reasoning; clients and servers name their text differently.
REASONING = ("thinking", "reasoning", "redacted_thinking")
_THOUGHTS = ("thinking", "reasoning", "text", "summary", "content")
_REASONING_MEMBERS = ("reasoning_content", "reasoning", "thinking")

_PART = {
    **members_schema(PART),
    "anyOf": [
        *(
            {
                "properties": {"type": {"const": kind}, name: {"type": "string"}},
                "required": ["type", name],
            }
            for kind, name in TEXTS.items()
        ),
        {"properties": {"type": {"enum": list(REASONING)}}, "required": ["type"]},
    ],
}
_CONTENT: list[Schema] = [{"type": "string"}, {"type": "array", "items": _PART}]
_MESSAGE = {
    **members_schema(MESSAGE, tool_calls=CALLS_SCHEMA),
    "anyOf": [
        {
            "properties": {"role": {"type": "string"}, "content": {"anyOf": _CONTENT}},
            "required": ["role", "content"],
        },
        {
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
            },
            "required": ["role"],
        },
    ],
}
MESSAGES: Schema = {"type": "array", "minItems": 1, "items": _MESSAGE}


def read_messages(value: Any) -> list[Json]:
    """The messages for the template. Raise InvalidRequest that names the first wrong member."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "it must be a list of at least one message")
    return [_message(f"messages[{position}]", one) for position, one in enumerate(value)]


def _message(name: str, message: Any) -> Json:
    if not isinstance(message, dict):
        raise wrong(name, message, "it must be an object with role and content")
    MESSAGE.check(message, name)
    if not isinstance(message.get("role"), str):
        raise wrong(f"{name}.role", message.get("role", MISSING), "it must be a string")
    known = MESSAGE.obeyed(message)
    for member in _REASONING_MEMBERS:  # other servers' may be objects, which no template takes
        if not isinstance(known.get(member), str):
            known.pop(member, None)
    calls = known.pop("tool_calls", None)
    check_calls(f"{name}.tool_calls", calls)
    if calls:  # templates take an empty list for calls
        known["tool_calls"] = [known_call(call) for call in calls]
    return known | _content(f"{name}.content", known)


def _content(at: str, message: Json) -> Json:
    """The members that a message's content gives: its text, and an assistant's reasoning."""
    value, by_assistant = message.get("content"), message["role"] == "assistant"
    thoughts: list[str] = []
    if isinstance(value, str):
        text = value
    elif value is None and by_assistant:
        text = ""
    elif isinstance(value, list):
        texts, thoughts = _parts(at, value)
        text = "\n".join(texts)
    else:
        given = message.get("content", MISSING)
        raise wrong(at, given, "it must be a string or a list of text parts")
    refusal = message.get("refusal")
    if by_assistant and not text and isinstance(refusal, str):
        text = refusal  # what the assistant answered
    found: Json = {"content": text}
    if thoughts and by_assistant and not any(map(message.get, _REASONING_MEMBERS)):
        found["reasoning_content"] = "\n".join(thoughts)
    return found


def _parts(at: str, parts: list[Any]) -> tuple[list[str], list[str]]:
    """The texts of text parts, and those of reasoning parts."""
    texts, thoughts = [], []
    for position, part in enumerate(parts):
        one = f"{at}[{position}]"
        if not isinstance(part, dict):
            raise wrong(one, part, "it must be an object with type and text")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in (*TEXTS, *REASONING):
            raise wrong(one, part, f"the model reads text only, not parts of type {show(kind)}")
        if kind in REASONING:
            thoughts += _thoughts(part)
            continue
        text = part.get(TEXTS[kind], MISSING)
        if not isinstance(text, str):
            raise wrong(f"{one}.{TEXTS[kind]}", text, "it must be a string")
        texts.append(text)
    return texts, thoughts


def _thoughts(part: Json) -> list[str]:
    """The texts of a reasoning part; none if they are encrypted or in an unknown form."""
    for name in _THOUGHTS:
        value = part.get(name)
        pieces = value if isinstance(value, list) else [{"text": value}]
        found = [piece.get("text") for piece in pieces if isinstance(piece, dict)]
        texts = [text for text in found if isinstance(text, str) and text]
        if texts:
            return texts
    return []
