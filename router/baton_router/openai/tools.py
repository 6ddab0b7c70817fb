"""Reads the functions that a client offers to the model, and the reasoning effort it asks for.

In: a chat's fields. Out: RequestedTools and RequestedReasoning. This module checks only the form,
as the API document has it. Whether a function's schema can be enforced depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.openai.body_reader import (
    ANY,
    MEMBERS,
    MISSING,
    Fields,
    Members,
    Schema,
    members_schema,
    wrong,
)
from baton_router.openai.structured_output import encoded, object_at
from baton_text.grammars.limits import MAX_GRAMMAR_BYTES
from baton_text.parsers.parser import Tools

Json = dict[str, Any]
Choice = Literal["none", "auto", "required"]
CHOICES: tuple[Choice, ...] = ("none", "auto", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_TOOLS = 128
MAX_NAME = 64
MAX_DESCRIPTION = 64 << 10  # characters
MAX_BUDGET = (1 << 31) - 1
NO_BUDGET = -1
NAME = rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}"
TOOLS_AGREE = (
    "names in tools differ, all parameters together are bounded, and tool_choice and"
    " parallel_tool_calls come with tools and ask for what those have"
)
FIELDS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("reasoning_effort", "include_reasoning", "thinking_token_budget"),
)
_WITH_TOOLS = ("tool_choice", "parallel_tool_calls")  # without `tools` they are errors
_NAME = re.compile(NAME)
_NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_TOOL, _FUNCTION = MEMBERS["chat", "tools[]"], MEMBERS["chat", "tools[].function"]
_CHOICE = MEMBERS["chat", "tool_choice"]
_CHOSEN = MEMBERS["chat", "tool_choice.function"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `position` is its index in the client's `tools`."""

    position: int
    name: str
    description: str | None
    parameters: Json
    strict: bool

    @property
    def field(self) -> str:
        return f"tools[{self.position}].function"

    def shown(self) -> Json:
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
            name: one.parameters
            for name, one in self.functions.items()
            if self.named in (None, name)
        }

    @property
    def strict(self) -> frozenset[str]:
        return frozenset(name for name, one in self.functions.items() if one.strict)

    def shown(self) -> list[Json]:
        return [one.shown() for one in self.functions.values()]


@dataclass(frozen=True, slots=True)
class RequestedReasoning:
    """What the client wants of reasoning. `included`: the answer shows it. `budget`: the most
    reasoning tokens (None: no limit). `kwargs` are values for the chat template."""

    included: bool = True
    budget: int | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


PLAIN = RequestedReasoning()


def requested_tools(fields: Fields) -> RequestedTools | None:
    """None if the model may call nothing. Raise InvalidRequest for the first wrong field."""
    fields.rule({"description": TOOLS_AGREE})
    functions, size = _functions(fields.raw("tools", _TOOLS_SCHEMA))
    choice, named = _choice(fields.raw("tool_choice", _CHOICE_SCHEMA))
    parallel = fields.boolean("parallel_tool_calls", True)
    if not functions:
        for name in _WITH_TOOLS:
            given = fields.raw(name, ANY)
            if given is not None:
                raise wrong(name, given, "it needs tools: send some, or leave this field out")
        return None
    if named is not None and named not in functions:
        known = ", ".join(functions)
        raise wrong("tool_choice", named, f"tools has no such function; its functions are {known}")
    if choice == "none":
        return None
    return RequestedTools(
        functions=functions,
        choice=choice or "auto",
        named=named,
        parallel=parallel,
        size=size,
    )


def requested_reasoning(fields: Fields) -> RequestedReasoning:
    """Read the reasoning fields. Raise InvalidRequest for the first wrong field."""
    effort = fields.raw("reasoning_effort", {"enum": [None, *EFFORTS]})
    included = fields.boolean("include_reasoning", True)
    budget = fields.integer("thinking_token_budget", NO_BUDGET, MAX_BUDGET)
    if budget == NO_BUDGET:
        budget = None
    if effort is None:
        return RequestedReasoning(included, budget)
    if effort not in EFFORTS:
        raise wrong("reasoning_effort", effort, f"use one of {', '.join(EFFORTS)}")
    kwargs: Json = {"reasoning_effort": effort}
    if effort == "none":
        kwargs["enable_thinking"] = False
    return RequestedReasoning(included, budget, kwargs)


def _functions(value: Any) -> tuple[dict[str, Function], int]:
    """The functions by name, and their total size in characters."""
    if value is None:
        return {}, 0
    if not isinstance(value, list):
        raise wrong("tools", value, "it must be a list of functions")
    if not value:
        raise wrong("tools", value, "name at least one function, or leave this field out")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(value)} functions; at most {MAX_TOOLS}", param="tools"
        )
    found: dict[str, Function] = {}
    size = 0
    for position, tool in enumerate(value):
        one = _function(position, tool)
        if one.name in found:
            message = f"tools holds two functions named {one.name!r}; each needs a name of its own"
            raise InvalidRequest(message, param="tools")
        found[one.name] = one
        size += len(encoded(f"{one.field}.parameters", one.parameters))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the parameters of all tools have {size} characters; at most {MAX_GRAMMAR_BYTES}",
            param="tools",
        )
    return found, size + sum(len(one.description or "") for one in found.values())


def _function(position: int, tool: Any) -> Function:
    at = f"tools[{position}]"
    given = _members(at, tool, _TOOL)
    if given.get("type") != "function":
        raise wrong(f"{at}.type", given.get("type", MISSING), "the only supported type is function")
    at = f"{at}.function"
    given = _members(at, given.get("function", MISSING), _FUNCTION)
    name = given.get("name", MISSING)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise wrong(
            f"{at}.name", name, f"it must have 1 to {MAX_NAME} characters: letters, digits, _ . -"
        )
    description, strict = given.get("description"), given.get("strict")
    if not isinstance(description, str | None):
        raise wrong(f"{at}.description", description, "it must be a string")
    if description is not None and len(description) > MAX_DESCRIPTION:
        message = f"{at}.description has {len(description)} characters; at most {MAX_DESCRIPTION}"
        raise InvalidRequest(message, param=f"{at}.description")
    if not isinstance(strict, bool | None):
        raise wrong(f"{at}.strict", strict, "it must be true or false")
    parameters = given.get("parameters")
    known = _NO_PARAMETERS if parameters is None else object_at(f"{at}.parameters", parameters)
    return Function(position, name, description, known, bool(strict))


def _choice(value: Any) -> tuple[Choice | None, str | None]:
    """The choice, and the named function, if any; naming a function makes a call required."""
    if value is None:
        return None, None
    for choice in CHOICES:
        if value == choice:
            return choice, None
    if not isinstance(value, dict):
        allowed = f'use {", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise wrong("tool_choice", value, allowed)
    given = _members("tool_choice", value, _CHOICE)
    if given.get("type") != "function":
        kind = given.get("type", MISSING)
        raise wrong("tool_choice.type", kind, "the only supported type is function")
    chosen = _members("tool_choice.function", given.get("function", MISSING), _CHOSEN)
    name = chosen.get("name", MISSING)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise wrong("tool_choice.function.name", name, "it must be the name of one of tools")
    return "required", name


def _members(at: str, value: Any, members: Members) -> Json:
    """The value as an object with no other members than these."""
    given = object_at(at, value)
    members.check(given, at)
    return given


# --- messages with calls --------------------------------------------------------------------------

CALLS_SCHEMA: Schema = {
    "type": ["array", "null"],
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


def check_calls(at: str, value: Any) -> None:
    """Raise InvalidRequest if a message's `tool_calls` are malformed."""
    if value is None:
        return
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a list of calls")
    for position, call in enumerate(value):
        one = f"{at}[{position}]"
        given = object_at(one, call)
        if not isinstance(given.get("id"), str | None):
            raise wrong(f"{one}.id", given["id"], "it must be a string")
        if given.get("type") not in ("function", None):
            raise wrong(f"{one}.type", given["type"], "the only supported type is function")
        function = object_at(f"{one}.function", given.get("function", MISSING))
        name = function.get("name", MISSING)
        if not isinstance(name, str):
            raise wrong(f"{one}.function.name", name, "it must be a string")
        if not isinstance(function.get("arguments"), str | dict | None):
            allowed = "it must be a JSON object, or its text"
            raise wrong(f"{one}.function.arguments", function["arguments"], allowed)


def known_call(call: Json) -> Json:
    """A checked call with its known members only, always in the same order: the template may print
    it as it is."""
    function = call["function"]
    known: Json = {"id": call["id"]} if call.get("id") is not None else {}
    arguments = function.get("arguments")
    return known | {
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


# --- schemas for the API document -----------------------------------------------------------------

_OF_A_FUNCTION: Schema = {"enum": ["function"]}
_NAME_SCHEMA: Schema = {
    "type": "string",
    "pattern": f"^{NAME}$",
    "minLength": 1,
    "maxLength": MAX_NAME,
}
_TOOLS_SCHEMA: Schema = {
    "type": ["array", "null"],
    "minItems": 1,
    "maxItems": MAX_TOOLS,
    "uniqueItems": True,
    "items": {
        **members_schema(
            _TOOL,
            type=_OF_A_FUNCTION,
            function={
                **members_schema(
                    _FUNCTION,
                    name=_NAME_SCHEMA,
                    description={"type": ["string", "null"], "maxLength": MAX_DESCRIPTION},
                    parameters={"type": ["object", "null"]},
                    strict={"type": ["boolean", "null"]},
                ),
                "required": ["name"],
            },
        ),
        "required": ["type", "function"],
    },
}
_CHOICE_SCHEMA: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            **members_schema(
                _CHOICE,
                type=_OF_A_FUNCTION,
                function={**members_schema(_CHOSEN, name=_NAME_SCHEMA), "required": ["name"]},
            ),
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}
