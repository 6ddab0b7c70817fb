"""Functions that a client offers to the model, and the calls in its messages.

In: the values of a chat's fields. Out: the tools that the model may call, and calls that a template
takes. This module checks only the form, as the API document has it. Whether a function's schema can
be enforced depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, wrong
from baton_router.openai.fields.kinds import (
    ANYTHING,
    Json,
    Schema,
    ValueKind,
    mapping,
    object_at,
    only,
    text,
)
from baton_router.openai.fields.table import (
    FieldTable,
    flag,
    ignored,
    optional,
    read_fields,
    refused,
    required,
    schema_of,
)
from baton_router.openai.fields.unserved import CACHED
from baton_router.openai.structured_output import encode_bounded
from baton_text.grammars.limits import MAX_GRAMMAR_BYTES
from baton_text.parsers.parser import Tools

Choice = Literal["none", "auto", "required"]
CHOICES: tuple[Choice, ...] = ("none", "auto", "required")
MAX_TOOLS = 128
MAX_NAME = 64
MAX_DESCRIPTION = 64 << 10  # characters
TOOLS_AGREE = (
    "names in tools differ, all parameters together are bounded, and tool_choice and"
    " parallel_tool_calls come with tools and ask for what those have"
)
NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_FUNCTION = only(("function",), "the only supported type is function")
CALLS_SCHEMA: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": ["string", "null"]},
            "type": {"enum": ["function", None]},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": ["string", "object", "null"]},
                },
                "required": ["name"],
            },
        },
        "required": ["function"],
    },
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `field` is the path of its parameters' schema in the
    client's body."""

    field: str
    name: str
    description: str | None
    parameters: Json
    strict: bool

    def template_form(self) -> Json:
        """The function as chat templates expect it."""
        function: Json = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTools:
    """The tools of a chat. `functions` maps names, in the client's order; `size` is their length as
    JSON, in characters. `named` is the function that must be called. Without `parallel`, at most
    one call is allowed."""

    functions: Mapping[str, Function]
    choice: Choice
    named: str | None
    parallel: bool
    size: int

    @property
    def required(self) -> bool:
        return self.choice == "required"

    @property
    def most_calls(self) -> int | None:
        return None if self.parallel and self.named is None else 1

    @property
    def callable(self) -> Tools:
        """The functions that may be called, with their schemas."""
        return {
            name: function.parameters
            for name, function in self.functions.items()
            if self.named in (None, name)
        }

    @property
    def strict(self) -> frozenset[str]:
        return frozenset(name for name, function in self.functions.items() if function.strict)

    def template_forms(self) -> list[Json]:
        """The functions as chat templates expect them."""
        return [function.template_form() for function in self.functions.values()]


def function_name(allowed: str, most: int = MAX_NAME) -> ValueKind[str]:
    """A name of 1 to `most` characters. `allowed` is the error for any other value."""
    pattern = rf"[a-zA-Z0-9_.-]{{1,{most}}}"
    name = re.compile(pattern)

    def read(at: str, value: Any) -> str:
        if not isinstance(value, str) or name.fullmatch(value) is None:
            raise wrong(at, value, allowed)
        return value

    lengths = {"minLength": 1, "maxLength": most}
    return ValueKind(read, {"type": "string", "pattern": f"^{pattern}$"} | lengths)


class FunctionFields(FieldTable, open=True):
    """The members of a tool's `function`."""

    cache_control = ignored(ANYTHING, CACHED)
    input_schema = refused("use `function.parameters`")
    name = required(
        function_name(f"it must have 1 to {MAX_NAME} characters: letters, digits, _ . -"),
        f"up to {MAX_NAME} letters, digits, `_`, `.`, `-`",
    )
    description = optional(text(MAX_DESCRIPTION), "passed to the model's template")
    parameters = optional(mapping(), "the JSON schema of its arguments", "none")
    strict = flag(
        False, "true: its arguments match `parameters` in each call ([more](tools.md#strict))"
    )


def _read_function(at: str, value: Any) -> FunctionFields:
    return read_fields(FunctionFields, object_at(at, value), at)


class ToolFields(FieldTable, open=True):
    """The members of each of `tools`."""

    cache_control = ignored(ANYTHING, CACHED)
    input_schema = refused("use `function.parameters`")
    type = required(_FUNCTION, "only `function`")
    function = required(
        ValueKind(_read_function, schema_of(FunctionFields), FunctionFields), "the function"
    )


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions of `tools` by name, in the client's order. `size` is their length as JSON, in
    characters."""

    functions: Mapping[str, Function]
    size: int


def _read_tools(at: str, value: Any) -> OfferedTools:
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a list of functions")
    if not value:
        raise wrong(at, value, "name at least one function, or leave this field out")
    return offered_tools(at, value, _function_of)


def offered_tools(at: str, tools: list[Any], read: Callable[[str, Any], Function]) -> OfferedTools:
    """The functions by name. `read` gets a tool's path in the client's body and the tool. Raise
    InvalidRequest if two have the same name, or if all together are too many or too large."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{at} has {len(tools)} functions; at most {MAX_TOOLS}", param=at)
    functions: dict[str, Function] = {}
    size = 0
    for position, tool in enumerate(tools):
        function = read(f"{at}[{position}]", tool)
        if function.name in functions:
            raise InvalidRequest(
                f"{at} holds two functions named {function.name!r}; each needs a name of its own",
                param=at,
            )
        functions[function.name] = function
        size += len(encode_bounded(function.field, function.parameters))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the parameters of all tools have {size} characters; at most {MAX_GRAMMAR_BYTES}",
            param=at,
        )
    described = sum(len(function.description or "") for function in functions.values())
    return OfferedTools(functions, size + described)


def _function_of(at: str, tool: Any) -> Function:
    function = read_fields(ToolFields, object_at(at, tool), at).function
    return Function(
        field=f"{at}.function.parameters",
        name=function.name,
        description=function.description,
        parameters=NO_PARAMETERS if function.parameters is None else function.parameters,
        strict=function.strict,
    )


TOOLS = ValueKind(
    _read_tools,
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_TOOLS,
        "uniqueItems": True,
        "items": schema_of(ToolFields),
    },
    ToolFields,
    listed=True,
)


class ChosenFunction(FieldTable, open=True):
    """The members of `tool_choice.function`."""

    name = required(function_name("it must be the name of one of tools"), "one of `tools`")
    description = ignored(ANYTHING, "the tool's own counts")
    parameters = ignored(ANYTHING, "the tool's own counts")
    strict = ignored(ANYTHING, "the tool's own counts")


def _read_chosen(at: str, value: Any) -> ChosenFunction:
    return read_fields(ChosenFunction, object_at(at, value), at)


class ToolChoiceFields(FieldTable, open=True):
    """The members of `tool_choice` where it names a function."""

    type = required(_FUNCTION, "only `function`")
    function = required(
        ValueKind(_read_chosen, schema_of(ChosenFunction), ChosenFunction), "the function to call"
    )


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls functions; to name one makes a call required. `given` is the value as
    the client wrote it."""

    choice: Choice
    named: str | None
    given: Any


def _read_choice(at: str, value: Any) -> ToolChoice:
    for choice in CHOICES:
        if value == choice:
            return ToolChoice(choice, None, value)
    if not isinstance(value, dict):
        allowed = f'use {", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise wrong(at, value, allowed)
    return ToolChoice("required", read_fields(ToolChoiceFields, value, at).function.name, value)


TOOL_CHOICE = ValueKind(
    _read_choice,
    {"anyOf": [{"enum": list(CHOICES)}, schema_of(ToolChoiceFields)]},
    ToolChoiceFields,
)


def requested_tools(
    tools: OfferedTools | None, choice: ToolChoice | None, *, parallel: bool
) -> RequestedTools | None:
    """None if the model may call nothing."""
    if tools is None or (choice is not None and choice.choice == "none"):
        return None
    return RequestedTools(
        functions=tools.functions,
        choice="auto" if choice is None else choice.choice,
        named=None if choice is None else choice.named,
        parallel=parallel,
        size=tools.size,
    )


def check_calls(at: str, value: Any) -> None:
    """Raise InvalidRequest if a message's `tool_calls` are malformed."""
    if value is None:
        return
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a list of calls")
    for position, call in enumerate(value):
        path = f"{at}[{position}]"
        given = object_at(path, call)
        if not isinstance(given.get("id"), str | None):
            raise wrong(f"{path}.id", given["id"], "it must be a string")
        if given.get("type") not in ("function", None):
            raise wrong(f"{path}.type", given["type"], "the only supported type is function")
        function = object_at(f"{path}.function", given.get("function", MISSING))
        name = function.get("name", MISSING)
        if not isinstance(name, str):
            raise wrong(f"{path}.function.name", name, "it must be a string")
        if not isinstance(function.get("arguments"), str | dict | None):
            allowed = "it must be a JSON object, or its text"
            raise wrong(f"{path}.function.arguments", function["arguments"], allowed)


def template_call(call: Json) -> Json:
    """A checked call with the members that a template may see, always in the same order: it may
    print the call as it is."""
    function = call["function"]
    identity: Json = {"id": call["id"]} if call.get("id") is not None else {}
    arguments = function.get("arguments")
    return identity | {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def calls_size(at: str, message: Json) -> int:
    """Approximate number of characters of the calls of the message at this path."""
    size = 0
    for position, call in enumerate(message.get("tool_calls") or ()):
        try:
            size += len(msgspec.json.encode(call))
        except RecursionError:
            name = f"{at}.tool_calls[{position}].function.arguments"
            raise InvalidRequest(f"{name} is nested too deep", param=name) from None
    return size
