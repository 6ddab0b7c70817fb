"""The fields of POST /v1/messages and of POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_STOP_CHARS, MAX_TEMPERATURE
from baton_router.anthropic.blocks import MESSAGES, SYSTEM
from baton_router.anthropic.tools import TOOL_CHOICE, TOOLS, check_choice
from baton_router.openai.fields.chat import ChatFields, check_template_names
from baton_router.openai.fields.generation import MAX_STOPS, MAX_TOP_K, GenerationFields
from baton_router.openai.fields.kinds import (
    ANYTHING,
    ValueKind,
    choice,
    integer,
    mapping,
    number,
    object_at,
    only,
    text,
    texts,
)
from baton_router.openai.fields.table import (
    FieldTable,
    flag,
    ignored,
    optional,
    read_fields,
    refused,
    required,
    rule,
    schema_of,
    stated,
)
from baton_router.openai.fields.unserved import CACHED
from baton_router.openai.reasoning import MAX_BUDGET
from baton_router.openai.structured_output import GRAMMAR_KINDS, RequestedGrammar

ROUTE = "/v1/messages"
COUNT_ROUTE = f"{ROUTE}/count_tokens"
EFFORTS = ("low", "medium", "high", "xhigh", "max")
TOOLS_AGREE = (
    "names in tools differ, all input schemas together are bounded, and tool_choice asks for what"
    " tools has"
)
ENDS_ANSWERED = "the last message has no tool_use"
ONE_FORMAT = "output_format is not beside output_config.format"
_BETAS = texts(64, 256)
_ONE_TIER = "there is one tier"
_NO_STATE = "the server keeps nothing between requests"


class ThinkingFields(FieldTable):
    """The members of `thinking`."""

    type = required(
        choice("enabled", "adaptive", "disabled"),
        "`disabled` sets `enable_thinking` to false in the model's template, `enabled` to true;"
        " with `adaptive` the template decides",
    )
    budget_tokens = optional(
        integer(1, MAX_BUDGET),
        "maximum tokens of thinking, if the router can separate this model's reasoning",
        "no bound",
    )
    display = optional(
        choice("summarized", "omitted"),
        "`omitted`: the answer does not show the thinking; it is never summarized",
        "shown",
    )


def _read_thinking(at: str, value: Any) -> ThinkingFields:
    return read_fields(ThinkingFields, object_at(at, value), at)


class OutputFormat(FieldTable):
    """The members of a format of the output."""

    type = required(only(("json_schema",), "the only format is json_schema"), "only `json_schema`")
    schema = required(GRAMMAR_KINDS["json"], "the JSON schema, which is enforced")


def _read_format(at: str, value: Any) -> RequestedGrammar:
    return read_fields(OutputFormat, object_at(at, value), at).schema


FORMAT = ValueKind(_read_format, schema_of(OutputFormat), OutputFormat)


class OutputConfig(FieldTable):
    """The members of `output_config`."""

    effort = optional(
        choice(*EFFORTS), "passed to the model's template as `reasoning_effort`, if it has that"
    )
    format = optional(FORMAT, "what the answer's text must match")
    task_budget = ignored(ANYTHING, "a hint to the model")


def _read_config(at: str, value: Any) -> OutputConfig:
    return read_fields(OutputConfig, object_at(at, value), at)


class PromptFields(FieldTable):
    """The fields of a conversation, whether it is answered or counted."""

    model = optional(text(), "another name is a 404 that lists the known ones", "the pool's")
    messages = required(
        MESSAGES, "the conversation; the answer continues a last message of the assistant"
    )
    system = optional(SYSTEM, "the instruction before the conversation: a text, or blocks of text")
    tools = optional(TOOLS, "tools that the model may call")
    tool_choice = optional(TOOL_CHOICE, "whether and what the model must call", "`auto`")
    thinking = optional(
        ValueKind(_read_thinking, schema_of(ThinkingFields), ThinkingFields),
        "whether the model thinks before it answers",
        "as the model's template has it",
    )
    output_config = optional(
        ValueKind(_read_config, schema_of(OutputConfig), OutputConfig), "form of the answer"
    )
    output_format = optional(FORMAT, "the older place of `output_config.format`")
    chat_template_kwargs = ChatFields.chat_template_kwargs

    cache_control = ignored(mapping(), CACHED)
    context_management = ignored(mapping(), "nothing is cleared from the conversation")
    anthropic_version = ignored(text(), "there is one version")
    anthropic_beta = ignored(_BETAS, "a feature is on if its field is there")
    betas = ignored(_BETAS, "a feature is on if its field is there")
    speed = ignored(choice("standard", "fast"), "there is one speed")
    user_profile_id = ignored(text(), "for the client's own use")
    mcp_servers = refused("the server calls no tools; call them in the client")

    tools_agree = stated({"description": TOOLS_AGREE})
    ends_answered = stated({"description": ENDS_ANSWERED})

    @rule("tools", "tool_choice")
    def check_tools(self) -> None:
        check_choice(self.tools, self.tool_choice)

    @rule("output_format", schemas=[{"description": ONE_FORMAT}])
    def check_format(self) -> None:
        if self.output_config is not None and self.output_config.format is not None:
            raise InvalidRequest(
                "output_format and output_config.format both constrain the answer; leave out"
                " output_format",
                param="output_format",
            )

    @rule("chat_template_kwargs")
    def check_template_kwargs(self) -> None:
        check_template_names(self.chat_template_kwargs or {})

    @property
    def grammar(self) -> RequestedGrammar | None:
        """What the answer must match."""
        config = self.output_config
        return self.output_format or (None if config is None else config.format)


class CountFields(PromptFields, route=COUNT_ROUTE):
    """A conversation whose tokens are counted."""


class MessagesFields(PromptFields, route=ROUTE):
    """A conversation to answer."""

    max_tokens = required(
        integer(0),
        "most tokens of the answer, thinking included; the context may leave fewer. 0: the prompt"
        " is computed and cached, and the answer is empty",
    )
    stop_sequences = optional(
        texts(MAX_STOPS, MAX_STOP_CHARS),
        "the text ends before the first one that occurs; `stop_sequence` names it",
    )
    stream = flag(False, "server-sent events")
    temperature = optional(number(0.0, MAX_TEMPERATURE), "0 is greedy", "the model's, else 1")
    top_p = optional(number(0.0, 1.0), "1 is off", "the model's, else 1")
    top_k = optional(integer(-1, MAX_TOP_K), "-1 and 0 are off", "the model's, else -1")
    seed = optional(
        integer(),
        "key of the random numbers, the same on every node ([more](api.md#the-same-tokens))",
        "random",
    )
    ignore_eos = GenerationFields.ignore_eos
    priority = optional(
        integer(), "lower ones of your own requests go first ([more](api.md#priority))", "0"
    )
    skip_reading_prefix_cache = GenerationFields.skip_reading_prefix_cache

    metadata = ignored(mapping(), "for the client's own use")
    service_tier = ignored(only(("auto", "standard_only"), _ONE_TIER), _ONE_TIER)
    inference_geo = ignored(text(), "the pool is where it is")
    diagnostics = ignored(mapping(), _NO_STATE)
    container = refused("the server runs no code")
