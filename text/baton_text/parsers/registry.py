"""All parsers by name, and the choice of one by flag or by chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from baton_text.artifacts import BATON, ArtifactError, load_json
from baton_text.parsers.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from baton_text.parsers.generic_json import GENERIC_JSON
from baton_text.parsers.glm45 import GLM45
from baton_text.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from baton_text.parsers.granite import GRANITE
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.llama3_json import LLAMA3_JSON
from baton_text.parsers.mistral import MISTRAL, MISTRAL_NAMED
from baton_text.parsers.parser import Reader, ReasoningParser, ToolParser, Tools, all_content
from baton_text.parsers.pythonic import OLMO3, PYTHONIC
from baton_text.parsers.qwen3_coder import QWEN3_CODER
from baton_text.parsers.reasoning import reasoned

P = TypeVar("P")
NONE = "none"  # the flag value that disables a kind of parser

# Ordered: the first parser whose marks are in a template reads its calls.
TOOL_PARSERS: Mapping[str, ToolParser] = {
    parser.name: parser
    for parser in (
        GPT_OSS,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        GLM45,
        QWEN3_CODER,
        HERMES,
        GRANITE,
        MISTRAL_NAMED,
        MISTRAL,
        OLMO3,
        PYTHONIC,
        LLAMA3_JSON,
        GENERIC_JSON,
    )
}
_ASSISTANT = "<\uff5cAssistant\uff5c>"  # DeepSeek's
_THINK = ("<think>", "</think>")
_GRANITE = ("Here is my thought process:", "Here is my response:")
_MISTRAL = ("[THINK]", "[/THINK]")
_SEED = ("<seed:think>", "</seed:think>")
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    parser.name: parser
    for parser in (
        GPT_OSS_REASONING,
        ReasoningParser("deepseek_r1", *_THINK, marks=(_ASSISTANT, "</think>"), always=True),
        ReasoningParser("glm45", *_THINK, marks=("[gMASK]", *_THINK)),
        ReasoningParser("kimi_k2", *_THINK, marks=("<|im_middle|>", *_THINK)),
        ReasoningParser("minimax_m2", *_THINK, marks=("]~b]", *_THINK), always=True),
        ReasoningParser("granite", *_GRANITE, marks=_GRANITE),
        ReasoningParser(
            "granite33",
            *_THINK,
            marks=("<think></think>", "<response></response>"),
            answer=("<response>", "</response>"),
        ),
        ReasoningParser("mistral", *_MISTRAL, marks=_MISTRAL, reads_special=True),
        ReasoningParser("seed_oss", *_SEED, marks=_SEED),
        # After all others with <think>, because its marks fit any template that has the markers.
        # Models of this family sometimes start a call without closing their reasoning.
        ReasoningParser("qwen3", *_THINK, marks=_THINK, call="<tool_call>"),
    )
}


def tool_parser_for(template: str) -> ToolParser | None:
    """The parser of the calls in a chat template; None if no known family writes such calls."""
    return next(
        (parser for parser in TOOL_PARSERS.values() if _all_in(parser.marks, template)), None
    )


def enforced(parser: ToolParser) -> ToolParser:
    """The parser for calls whose arguments may have any schema: `parser`, or GENERIC_JSON if
    `parser` does not write arguments as a JSON object."""
    form = parser.form
    return parser if form is not None and form.arguments is None else GENERIC_JSON


def reasoning_parser_for(template: str) -> ReasoningParser | None:
    return next(
        (parser for parser in REASONING_PARSERS.values() if _all_in(parser.marks, template)), None
    )


def _all_in(marks: tuple[str, ...], template: str) -> bool:
    """False without marks: such a parser is only chosen by name."""
    return bool(marks) and all(mark in template for mark in marks)


def parsers_artifact(tool_parser: str, reasoning_parser: str) -> dict[str, bytes]:
    """The artifact that tells routers which parsers a node's flags select.

    Each argument is a parser's name, NONE, or "" to let the chat template decide. With "" for both
    there is no artifact. Raise ArtifactError for an unknown name."""
    given = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    chosen = {key: name for key, name in given.items() if name}
    _chosen(chosen, "tool_parser", TOOL_PARSERS)
    _chosen(chosen, "reasoning_parser", REASONING_PARSERS)
    return {BATON: json.dumps(chosen).encode()} if chosen else {}


def parsers_of(
    artifacts: Mapping[str, bytes], template: str
) -> tuple[ToolParser | None, ReasoningParser | None]:
    """A model's parsers: those that the node's flags select, else those that fit its template.

    Raise ArtifactError for an unknown name."""
    chosen = load_json(artifacts, BATON)
    tools, reasoning = tool_parser_for(template), reasoning_parser_for(template)
    if "tool_parser" in chosen:
        tools = _chosen(chosen, "tool_parser", TOOL_PARSERS)
    if "reasoning_parser" in chosen:
        reasoning = _chosen(chosen, "reasoning_parser", REASONING_PARSERS)
    return tools, reasoning


def _chosen(chosen: Mapping[str, Any], key: str, parsers: Mapping[str, P]) -> P | None:
    name = chosen.get(key, NONE)
    if name == NONE:
        return None
    if not isinstance(name, str) or name not in parsers:
        kind, names = key.replace("_", " "), ", ".join(parsers)
        raise ArtifactError(f"no {kind} is named {name!r}; there are {names}, and {NONE}")
    return parsers[name]


def reader(
    tools: Tools,
    tool_parser: ToolParser | None = None,
    reasoning_parser: ReasoningParser | None = None,
    *,
    begun: bool = False,
) -> Reader:
    """A Reader for one answer.

    Without a tool parser it reads no calls. Without a reasoning parser it reads no reasoning,
    unless the tool parser does. `begun`: the answer begins inside reasoning, see
    ReasoningParser.begun."""
    parse = all_content if tool_parser is None else tool_parser.parse
    if reasoning_parser is not None and not (tool_parser and tool_parser.reads_reasoning):
        parse = reasoning_parser.parse or reasoned(
            reasoning_parser, parse, with_calls=tool_parser is not None
        )
    opened = reasoning_parser.begin if reasoning_parser is not None and begun else ""
    return Reader(lambda source: parse(source, tools), opened)
