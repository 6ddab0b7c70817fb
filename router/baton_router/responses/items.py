"""The items of a response's input, and the conversation that they are.

In: `input` of a body, or items that were kept. Out: items in one form, with the members that Baton
uses, and the messages that the model's template gets. An assistant's reasoning, text and calls that
follow each other are one message. What a client got as output, from this server or another, it may
send as input: other members of an item or a part are left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, show, wrong
from baton_router.openai.fields.kinds import (
    ANYTHING,
    Json,
    Schema,
    ValueKind,
    choice,
    nullable,
    object_at,
    text,
)
from baton_router.openai.fields.table import FieldTable, ignored, optional, schema_of
from baton_router.openai.messages import TEXTS

MAX_ITEMS = 16_384
MAX_ID = 256
ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "function_call", "function_call_output", "reasoning")
PLAIN = "baton1:"  # begins `encrypted_content` of Baton
_ROLE, _TEXT, _ID = choice(*ROLES), text(), text(MAX_ID)
_STRING: Json = {"type": "string"}
_PARTS: Json = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, name: _STRING},
                "required": ["type", name],
            }
            for kind, name in TEXTS.items()
        ]
    },
}
_CONTENT: Json = {"anyOf": [_STRING, _PARTS]}
_ID_SCHEMA = nullable(_ID.schema)


class ItemFields(FieldTable, open=True):
    """The members of each of `input`. The functions below check their values."""

    type = optional(
        ANYTHING, "`message`, `function_call`, `function_call_output` or `reasoning`", "`message`"
    )
    id = optional(ANYTHING, "repeated in the list of a kept response's input")
    role = optional(ANYTHING, "of a message: `user`, `assistant`, `system` or `developer`")
    content = optional(
        ANYTHING,
        "of a message: a text, or parts of type `input_text`, `output_text` or `refusal`, whose"
        " texts are joined by newlines; of reasoning: parts with its text",
    )
    call_id = optional(ANYTHING, "of a call and of its output: the call's id")
    name = optional(ANYTHING, "of a call: the function")
    arguments = optional(ANYTHING, "of a call: the text of a JSON object")
    output = optional(ANYTHING, "of a call's output: a text, or parts")
    summary = optional(ANYTHING, "of reasoning without content: parts with its text")
    encrypted_content = optional(
        ANYTHING, "of reasoning without texts: what this server gave; another server's is left out"
    )
    status = ignored(ANYTHING, "an item of an answer has it")
    phase = ignored(ANYTHING, "an item of an answer has it")


def _item_schema(kind: str, needed: Mapping[str, Schema]) -> Json:
    properties = {"type": {"const": kind}, "id": _ID_SCHEMA, **needed}
    return {"type": "object", "properties": properties, "required": ["type", *needed]}


_MESSAGE = _item_schema("message", {"role": _ROLE.schema, "content": _CONTENT})
_ITEM: Json = {
    **schema_of(ItemFields),
    "anyOf": [
        _MESSAGE
        | {
            "properties": _MESSAGE["properties"] | {"type": {"enum": ["message", None]}},
            "required": ["role", "content"],
        },
        _item_schema("function_call", {"call_id": _STRING, "name": _STRING, "arguments": _STRING}),
        _item_schema("function_call_output", {"call_id": _STRING, "output": _CONTENT}),
        _item_schema("reasoning", {}),
    ],
}


def _read_input(at: str, value: Any) -> list[Json]:
    if isinstance(value, str):
        return [_message("user", [value])]
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a text, or a list of at least one item")
    if len(value) > MAX_ITEMS:
        raise InvalidRequest(f"{at} holds {len(value)} items; at most {MAX_ITEMS}", param=at)
    return [_read_item(f"{at}[{position}]", item) for position, item in enumerate(value)]


INPUT = ValueKind(
    _read_input,
    {
        "anyOf": [
            _STRING,
            {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": _ITEM},
        ]
    },
    ItemFields,
    listed=True,
)


def _read_item(at: str, value: Any) -> Json:
    given = object_at(at, value)
    kind = given.get("type")
    kind = "message" if kind is None else kind
    if kind == "item_reference" or kind not in KINDS:
        raise wrong(
            f"{at}.type",
            kind,
            "send the item itself instead of a reference"
            if kind == "item_reference"
            else f"this server knows items of type {', '.join(KINDS)}; leave others out",
        )
    match kind:
        case "message":
            role = _ROLE.read(f"{at}.role", given.get("role", MISSING))
            item = _message(role, _texts(f"{at}.content", given.get("content", MISSING)))
        case "function_call":
            members = ("call_id", "name", "arguments")
            item = {"type": kind} | {
                name: _TEXT.read(f"{at}.{name}", given.get(name, MISSING)) for name in members
            }
        case "function_call_output":
            call = _TEXT.read(f"{at}.call_id", given.get("call_id", MISSING))
            texts = _texts(f"{at}.output", given.get("output", MISSING))
            item = {"type": kind, "call_id": call, "output": "\n".join(texts)}
        case _:
            thoughts = _thoughts(given)
            parts = [{"type": "reasoning_text", "text": thoughts}] if thoughts else []
            item = {"type": kind, "summary": [], "content": parts}
    if given.get("id") is not None:
        item["id"] = _ID.read(f"{at}.id", given["id"])
    return item


def _message(role: str, texts: Sequence[str]) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "role": role,
        "content": [{"type": kind, "text": each} for each in texts],
    }


def _texts(at: str, value: Any) -> list[str]:
    """The texts of a content: a text, or text parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a text or a list of text parts")
    texts = []
    for position, given in enumerate(value):
        path = f"{at}[{position}]"
        part = object_at(path, given)
        kind = part.get("type", MISSING)
        if not isinstance(kind, str) or kind not in TEXTS:
            raise wrong(path, part, f"the model reads text only, not parts of type {show(kind)}")
        texts.append(_TEXT.read(f"{path}.{TEXTS[kind]}", part.get(TEXTS[kind], MISSING)))
    return texts


def _thoughts(item: Json) -> str:
    """The text of a reasoning item; empty if it is another server's or in an unknown form."""
    for name in ("content", "summary"):
        value = item.get(name)
        parts = value if isinstance(value, list) else []
        given = [part.get("text") for part in parts if isinstance(part, dict)]
        if texts := [each for each in given if isinstance(each, str) and each]:
            return "\n".join(texts)
    encrypted = item.get("encrypted_content")
    return decoded_reasoning(encrypted) if isinstance(encrypted, str) else ""


def encoded_reasoning(thoughts: str) -> str:
    """`encrypted_content` of reasoning that is not secret: its client gets the text, too."""
    return PLAIN + base64.urlsafe_b64encode(thoughts.encode()).decode()


def decoded_reasoning(encrypted: str) -> str:
    """The text; empty if `encoded_reasoning` has not made it."""
    if not encrypted.startswith(PLAIN):
        return ""
    try:
        return base64.urlsafe_b64decode(encrypted.removeprefix(PLAIN).encode()).decode()
    except (binascii.Error, UnicodeError):
        return ""


def messages_of(items: Sequence[Json]) -> list[Json]:
    """The messages that a template takes."""
    messages: list[Json] = []
    last: Json | None = None  # the assistant's message that the next items may extend

    def extend(*taken: str) -> Json:
        """The assistant's message to extend: a new one if it has one of these members already."""
        nonlocal last
        if last is None or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        return last

    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            if thoughts := "\n".join(part["text"] for part in item["content"]):
                message = extend("content", "tool_calls")
                earlier = message.get("reasoning_content")
                message["reasoning_content"] = f"{earlier}\n{thoughts}" if earlier else thoughts
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            extend().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            last = None
            messages.append(
                {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            )
        else:
            content = "\n".join(part["text"] for part in item["content"])
            if item["role"] == "assistant":
                extend("content", "tool_calls")["content"] = content
            else:
                last = None
                messages.append({"role": item["role"], "content": content})
    return messages
