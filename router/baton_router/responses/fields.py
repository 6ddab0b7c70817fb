"""The fields of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_LOGPROBS
from baton_router.openai.fields.errors import MISSING, wrong
from baton_router.openai.fields.generation import SamplingFields
from baton_router.openai.fields.kinds import (
    Json,
    ValueKind,
    boolean,
    choice,
    integer,
    mapping,
    object_at,
    only,
    text,
)
from baton_router.openai.fields.table import (
    TRUE,
    FieldTable,
    flag,
    ignored,
    needs,
    optional,
    read_fields,
    refused,
    required,
    rule,
    schema_of,
    stated,
)
from baton_router.openai.fields.unserved import METADATA
from baton_router.openai.reasoning import EFFORTS
from baton_router.openai.structured_output import RequestedGrammar, encode_bounded
from baton_router.openai.tools import (
    CHOICES,
    MAX_DESCRIPTION,
    MAX_NAME,
    MAX_TOOLS,
    NO_PARAMETERS,
    Function,
    OfferedTools,
    ToolChoice,
    function_name,
    offered_tools,
)
from baton_router.responses.items import INPUT, MAX_ID

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED)
MAX_INCLUDED = 16
TOOLS_AGREE = (
    "names in tools differ, all parameters together are bounded, and tool_choice asks for what"
    " tools has"
)
ONE_FORM = "at most one of text.format and structured_outputs is there, and no allowed_token_ids"
MIN_AGREES = "min_tokens is at most what max_output_tokens is, or is by default"
_NO_TOOLS_HERE = "this server runs no tools of its own; the only supported type is function"
_FUNCTION = only(("function",), _NO_TOOLS_HERE)


# --- text -----------------------------------------------------------------------------------------

_FORMATS = ("text", "json_object", "json_schema")
_REPEATED = ("name", "description", "strict")  # of a schema


@dataclass(frozen=True, slots=True)
class RequestedText:
    """What the answer must match, if anything, and `text` as the answer repeats it."""

    grammar: RequestedGrammar | None
    shown: Json


class FormatFields(FieldTable, open=True):
    """The members of `text.format`."""

    type = required(
        only(_FORMATS, f"use one of {', '.join(_FORMATS)}"),
        "what the answer must match: anything, an object, or a schema",
    )
    schema = optional(mapping(), "of type `json_schema`: the JSON schema; required there")
    name = ignored(text(), "a text for the client's own use")
    description = ignored(text(), "a text for the client's own use")
    strict = ignored(boolean(), "each schema is enforced")


def _format_schema(types: Sequence[str], *needed: str) -> Json:
    schema = schema_of(FormatFields)
    properties = schema["properties"] | {"type": {"enum": list(types)}}
    properties |= {name: FormatFields.FIELDS[name].kind.schema for name in needed}
    return schema | {"properties": properties, "required": ["type", *needed]}


_FORMAT_SCHEMA: Json = {
    "anyOf": [_format_schema(("text", "json_object")), _format_schema(("json_schema",), "schema")]
}


def _read_format(at: str, value: Any) -> RequestedText:
    fields = read_fields(FormatFields, object_at(at, value), at)
    shown: Json = {"type": fields.type}
    if fields.type == "text":
        return RequestedText(None, shown)
    if fields.type == "json_object":
        return RequestedText(RequestedGrammar("json_object", "", at), shown)
    if fields.schema is None:
        raise wrong(f"{at}.schema", MISSING, "it must be a JSON schema")
    encoded = encode_bounded(f"{at}.schema", fields.schema)
    shown |= {name: getattr(fields, name) for name in _REPEATED}
    shown["schema"] = msgspec.Raw(encoded.encode())
    return RequestedText(RequestedGrammar("json", encoded, f"{at}.schema"), shown)


class TextFields(FieldTable):
    """The members of `text`."""

    format = optional(
        ValueKind(_read_format, _FORMAT_SCHEMA, FormatFields),
        "what the answer must match ([structured output](structured-output.md))",
        "`text`",
    )
    verbosity = refused("there are no levels of verbosity", accepts=("medium",))


def _read_text(at: str, value: Any) -> RequestedText:
    fields = read_fields(TextFields, object_at(at, value), at)
    form = fields.format or ANY_TEXT
    return RequestedText(form.grammar, {"format": form.shown, "verbosity": "medium"})


ANY_TEXT = RequestedText(None, {"type": "text"})
TEXT_KIND = ValueKind(_read_text, schema_of(TextFields), TextFields)


# --- tools ----------------------------------------------------------------------------------------


class ResponseToolFields(FieldTable, open=True):
    """The members of each of `tools`."""

    type = required(_FUNCTION, "only `function`")
    name = required(
        function_name(f"it must have 1 to {MAX_NAME} characters: letters, digits, _ . -"),
        f"up to {MAX_NAME} letters, digits, `_`, `.`, `-`",
    )
    description = optional(text(MAX_DESCRIPTION), "passed to the model's template")
    parameters = optional(mapping(), "the JSON schema of its arguments", "none")
    strict = flag(
        False, "true: its arguments match `parameters` in each call ([more](tools.md#strict))"
    )


def _read_tools(at: str, value: Any) -> OfferedTools:
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a list of functions")
    return offered_tools(at, value, _read_tool)


def _read_tool(at: str, tool: Any) -> Function:
    fields = read_fields(ResponseToolFields, object_at(at, tool), at)
    parameters = NO_PARAMETERS if fields.parameters is None else fields.parameters
    return Function(f"{at}.parameters", fields.name, fields.description, parameters, fields.strict)


TOOLS = ValueKind(
    _read_tools,
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "uniqueItems": True,
        "items": schema_of(ResponseToolFields),
    },
    ResponseToolFields,
    listed=True,
)


class NamedToolFields(FieldTable, open=True):
    """A function of `tools`, by its name."""

    type = required(_FUNCTION, "only `function`")
    name = required(function_name("it must be the name of one of tools"), "one of `tools`")


class ToolChoiceFields(FieldTable, open=True):
    """The members of `tool_choice` where it is an object."""

    type = required(
        only(("function", "allowed_tools"), f"use function or allowed_tools; {_NO_TOOLS_HERE}"),
        "`function` or `allowed_tools`",
    )
    name = optional(
        function_name("it must be the name of one of tools"), "of type `function`: one of `tools`"
    )
    mode = optional(
        choice("auto", "required"), "of type `allowed_tools`: whether one of them must be called"
    )
    tools = optional(
        ValueKind(
            lambda at, value: _read_allowed(at, value),
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_TOOLS,
                "items": schema_of(NamedToolFields),
            },
            NamedToolFields,
            listed=True,
        ),
        "of type `allowed_tools`: the functions that the model may call",
    )


def _read_allowed(at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a list of at least one function")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"{at} has {len(value)} functions; at most {MAX_TOOLS}", param=at)
    return tuple(
        read_fields(NamedToolFields, object_at(path, tool), path).name
        for path, tool in ((f"{at}[{position}]", tool) for position, tool in enumerate(value))
    )


@dataclass(frozen=True, slots=True)
class RequestedChoice:
    """Which functions the model may or must call. `allowed`: only these; None for all of `tools`.
    `shown` is the value as the answer repeats it."""

    choice: ToolChoice
    allowed: tuple[str, ...] | None
    shown: str | Json

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that it names."""
        named = self.choice.named
        return (self.allowed or ()) if named is None else (named,)


def _read_choice(at: str, value: Any) -> RequestedChoice:
    for simple in CHOICES:
        if value == simple:
            return RequestedChoice(ToolChoice(simple, None, value), None, simple)
    if not isinstance(value, dict):
        allowed = f'use {", ".join(CHOICES)} or {{"type": "function", "name": ...}}'
        raise wrong(at, value, allowed)
    fields = read_fields(ToolChoiceFields, value, at)
    if fields.type == "function":
        if fields.name is None:
            raise wrong(f"{at}.name", MISSING, "it must be the name of one of tools")
        shown: Json = {"type": "function", "name": fields.name}
        return RequestedChoice(ToolChoice("required", fields.name, value), None, shown)
    if fields.tools is None:
        raise wrong(f"{at}.tools", MISSING, "it must be a list of at least one function")
    if fields.mode is None:
        raise wrong(f"{at}.mode", MISSING, "use one of auto, required")
    listed = [{"type": "function", "name": name} for name in fields.tools]
    shown = {"type": "allowed_tools", "mode": fields.mode, "tools": listed}
    mode = ToolChoice("required" if fields.mode == "required" else "auto", None, value)
    return RequestedChoice(mode, fields.tools, shown)


def _choice_schema(kind: str, *needed: str) -> Json:
    kinds = {name: ToolChoiceFields.FIELDS[name].kind.schema for name in needed}
    properties = {"type": {"enum": [kind]}, **kinds}
    return {"type": "object", "properties": properties, "required": ["type", *needed]}


_CHOICE_SCHEMA: Json = {
    "anyOf": [
        {"enum": list(CHOICES)},
        _choice_schema("function", "name"),
        _choice_schema("allowed_tools", "mode", "tools"),
    ]
}
TOOL_CHOICE = ValueKind(_read_choice, _CHOICE_SCHEMA, ToolChoiceFields)


# --- the rest -------------------------------------------------------------------------------------


class ReasoningFields(FieldTable, open=True):
    """The members of `reasoning`."""

    effort = optional(
        choice(*EFFORTS),
        "passed to the model's template, which may ignore it; `none` also sets"
        " `enable_thinking` to false there ([reasoning](tools.md#reasoning))",
    )
    summary = ignored(
        choice("auto", "concise", "detailed"), "the answer has the reasoning itself, unsummarized"
    )
    generate_summary = ignored(choice("auto", "concise", "detailed"), "the older name of `summary`")


def _read_reasoning(at: str, value: Any) -> ReasoningFields:
    return read_fields(ReasoningFields, object_at(at, value), at)


class ResponseStreamOptions(FieldTable):
    """The members of `stream_options`."""

    include_usage = ignored(boolean(), "the last event always has the usage")
    include_obfuscation = refused(
        "events are not padded to hide their length",
        accepts=(False,),
        complaint="this server does not pad events; leave it out",
    )


def _read_stream_options(at: str, value: Any) -> ResponseStreamOptions | None:
    options = object_at(at, value)
    return read_fields(ResponseStreamOptions, options, at) if options else None


def _read_include(at: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise wrong(at, value, f"it must be a list of {', '.join(INCLUDABLE)}")
    if len(value) > MAX_INCLUDED:
        raise InvalidRequest(f"{at} holds {len(value)} texts; at most {MAX_INCLUDED}", param=at)
    for each in value:
        if each not in INCLUDABLE:
            raise wrong(at, each, f"an answer can include {', '.join(INCLUDABLE)}")
    return frozenset(value)


INCLUDE = ValueKind(
    _read_include,
    {"type": "array", "items": {"enum": list(INCLUDABLE)}, "maxItems": MAX_INCLUDED},
)


class PromptFields(SamplingFields):
    """The fields that make a response's prompt."""

    input = required(
        INPUT, "a text, or the items of the conversation ([below](responses.md#items))"
    )
    instructions = optional(text(), "a system message before the conversation; not kept for later")
    previous_response_id = optional(
        text(MAX_ID),
        "the response that this one continues; it must have been kept"
        " ([below](responses.md#kept-responses))",
    )
    tools = optional(TOOLS, "functions that the model may call ([tools](tools.md))")
    tool_choice = optional(
        TOOL_CHOICE,
        "`none`, `auto`, `required`, the function to call, or the functions that may be called",
        "`auto`",
    )
    parallel_tool_calls = flag(True, "false: at most one call")
    reasoning = optional(
        ValueKind(_read_reasoning, schema_of(ReasoningFields), ReasoningFields),
        "how much the model thinks before it answers",
    )
    text = optional(TEXT_KIND, "the form of the answer")
    truncation = optional(
        choice("auto", "disabled"),
        "`auto`: of a prompt that is too long, the last tokens that fit are kept",
        "`disabled`",
    )
    conversation = refused("use `previous_response_id`", accepts=())
    prompt = refused("there are no stored prompts; send `input` and `instructions`", accepts=())

    @rule("tool_choice", "tools", schemas=[{"description": TOOLS_AGREE}])
    def check_tools(self) -> None:
        chosen, tools = self.tool_choice, self.tools
        if chosen is None:
            return
        functions = tools.functions if tools is not None else {}
        if chosen.choice.choice == "required" and not functions:
            raise wrong("tool_choice", chosen.choice.given, "it needs tools: send some")
        for name in chosen.names:
            if name not in functions:
                names = ", ".join(functions) or "missing"
                allowed = f"tools has no such function; its functions are {names}"
                raise wrong("tool_choice", name, allowed)

    @property
    def offered(self) -> OfferedTools | None:
        """The functions that the model may know; None without any."""
        tools, chosen = self.tools, self.tool_choice
        if tools is None or not tools.functions:
            return None
        if chosen is None or chosen.allowed is None:
            return tools
        kept = {name: tools.functions[name] for name in tools.functions if name in chosen.allowed}
        return replace(tools, functions=kept)


class ResponseFields(PromptFields, route="/v1/responses"):
    """A response's body."""

    max_output_tokens = optional(
        integer(1), "all generated tokens count, those of reasoning and calls, too", "what fits"
    )
    max_tool_calls = ignored(integer(1), "it limits tools of the server, which has none")
    top_logprobs = optional(
        integer(0, MAX_LOGPROBS),
        "number of likely tokens beside each token of the text; above 0, the text has logprobs",
        "0",
    )
    include = optional(
        INCLUDE,
        f"`{LOGPROBS}`: logprobs of the text; `{ENCRYPTED}`: reasoning in a form for the next"
        " request",
    )
    store = flag(False, "keep the response ([below](responses.md#kept-responses))")
    background = flag(
        False,
        "go on without the client, which may read the answer later; only with `store`."
        " Without `stream` the first state is the answer",
    )
    metadata = optional(METADATA, "repeated in the answer")
    client_metadata = ignored(mapping(), "for the client's own use; Codex sends it")
    stream_options = optional(
        ValueKind(_read_stream_options, schema_of(ResponseStreamOptions), ResponseStreamOptions),
        "only with `stream`",
    )
    context_management = refused("the router compacts no conversation")

    min_tokens_agree = stated({"description": MIN_AGREES})

    @rule("text", "structured_outputs", schemas=[{"description": ONE_FORM}])
    def check_forms(self) -> None:
        if len(self.grammars) > 1:
            raise InvalidRequest(
                "structured_outputs and text.format both constrain the answer; send only one of"
                " them",
                param="structured_outputs",
            )
        if self.grammars and self.allowed_token_ids is not None:
            name = "text.format" if self.structured_outputs is None else "structured_outputs"
            raise InvalidRequest(
                f"allowed_token_ids and {name} both restrict the tokens; send only one of them",
                param="allowed_token_ids",
            )

    @property
    def grammars(self) -> Sequence[RequestedGrammar]:
        """What the answer must match, according to each field that says so."""
        form = None if self.text is None else self.text.grammar
        return [each for each in (form, self.structured_outputs) if each is not None]

    @rule(
        "background",
        schemas=[
            {
                "if": {"properties": {"background": TRUE}, "required": ["background"]},
                "then": {"properties": {"store": TRUE}, "required": ["store"]},
            }
        ],
    )
    def check_background(self) -> None:
        if self.background and not self.store:
            raise wrong("background", True, "its answer is read later: set store, too")

    @rule(
        "stream_options",
        schemas=[needs("stream_options", {"type": "object", "minProperties": 1}, "stream", TRUE)],
    )
    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )


class InputTokenFields(PromptFields, route="/v1/responses/input_tokens"):
    """A body whose prompt's tokens are counted."""


def shown_tools(tools: OfferedTools | None) -> list[Mapping[str, Any]]:
    """The functions as an answer repeats them."""
    return [
        {
            "type": "function",
            "name": function.name,
            "description": function.description,
            "parameters": msgspec.Raw(msgspec.json.encode(function.parameters)),
            "strict": function.strict,
        }
        for function in (tools.functions.values() if tools is not None else ())
    ]
