"""The tools of a Messages body, and which of them the model may or must call.

In: the values of `tools` and `tool_choice`. Out: the same records as for a chat's tools.
"""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, wrong
from baton_router.openai.fields.kinds import (
    ANYTHING,
    Json,
    Schema,
    ValueKind,
    boolean,
    choice,
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
from baton_router.openai.tools import (
    MAX_DESCRIPTION,
    MAX_TOOLS,
    Choice,
    Function,
    OfferedTools,
    RequestedTools,
    function_name,
    offered_tools,
)

MAX_NAME = 128
NAMED = "tool"
# The types of `tool_choice`, as a chat names them.
CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "none": "none", NAMED: "required"}
_CUSTOM = "this server has no tools of its own; describe yours with `input_schema`, without a type"


class ToolFields(FieldTable, open=True):
    """The members of each of `tools`."""

    type = optional(
        only(("custom",), _CUSTOM), "tools of the server, such as web search, are refused", "custom"
    )
    name = required(
        function_name(f"it must have 1 to {MAX_NAME} characters: letters, digits, _ . -", MAX_NAME),
        f"up to {MAX_NAME} letters, digits, `_`, `.`, `-`",
    )
    description = optional(text(MAX_DESCRIPTION), "passed to the model's template")
    input_schema = required(mapping(), "the JSON schema of its input")
    strict = flag(
        False,
        "true: its input matches `input_schema` in each call ([more](tools.md#strict))",
    )
    cache_control = ignored(ANYTHING, CACHED)
    eager_input_streaming = ignored(boolean(), "input is always streamed as it is generated")
    input_examples = ignored(ANYTHING, "templates do not show them")
    allowed_callers = ignored(ANYTHING, "the model is the only caller")
    defer_loading = refused("every tool is in the prompt")


def _read_tools(at: str, value: Any) -> OfferedTools | None:
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a list of tools")
    return offered_tools(at, value, _read_tool) if value else None


def _read_tool(at: str, value: Any) -> Function:
    tool = read_fields(ToolFields, object_at(at, value), at)
    return Function(
        field=f"{at}.input_schema",
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


TOOLS = ValueKind(
    _read_tools,
    {"type": "array", "maxItems": MAX_TOOLS, "uniqueItems": True, "items": schema_of(ToolFields)},
    ToolFields,
    listed=True,
)


class ToolChoiceFields(FieldTable, open=True):
    """The members of `tool_choice`."""

    type = required(choice(*CHOICES), "`auto`, `any`: at least one call, `none`, `tool`: `name`")
    name = optional(
        function_name("it must be the name of one of tools", MAX_NAME),
        "with `tool`: which",
    )
    disable_parallel_tool_use = flag(False, "true: at most one call")


def _read_choice(at: str, value: Any) -> ToolChoiceFields:
    fields = read_fields(ToolChoiceFields, object_at(at, value), at)
    if fields.type == NAMED and fields.name is None:
        raise wrong(f"{at}.name", value.get("name", MISSING), f"type {NAMED} needs a tool's name")
    return fields


def _choice_schema(types: list[str], *needed: str) -> Json:
    rows = schema_of(ToolChoiceFields)
    kinds = {name: ToolChoiceFields.FIELDS[name].kind.schema for name in needed}
    members: dict[str, Schema] = {**rows["properties"], **kinds, "type": {"enum": types}}
    return {"type": "object", "properties": members, "required": ["type", *needed]}


TOOL_CHOICE = ValueKind(
    _read_choice,
    {
        "anyOf": [
            _choice_schema([name for name in CHOICES if name != NAMED]),
            _choice_schema([NAMED], "name"),
        ]
    },
    ToolChoiceFields,
)


def check_choice(offered: OfferedTools | None, chosen: ToolChoiceFields | None) -> None:
    """Raise InvalidRequest if the choice asks for a tool that is not there."""
    if chosen is None or CHOICES[chosen.type] != "required":
        return
    if offered is None:
        raise InvalidRequest(
            f"tool_choice is {chosen.type!r} and there are no tools; send some, or leave it out",
            param="tool_choice",
        )
    if chosen.name is not None and chosen.type == NAMED and chosen.name not in offered.functions:
        names = ", ".join(offered.functions)
        raise wrong("tool_choice.name", chosen.name, f"tools has no such tool; it has {names}")


def requested_tools(
    offered: OfferedTools | None, chosen: ToolChoiceFields | None
) -> RequestedTools | None:
    """None if the model may call nothing."""
    kind = "auto" if chosen is None else CHOICES[chosen.type]
    if offered is None or kind == "none":
        return None
    return RequestedTools(
        functions=offered.functions,
        choice=kind,
        named=chosen.name if chosen is not None and chosen.type == NAMED else None,
        parallel=chosen is None or not chosen.disable_parallel_tool_use,
        size=offered.size,
    )
