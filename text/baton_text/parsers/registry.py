"""All parsers by name, and which one a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Mapping

from baton_text.parsers.generic_json import GENERIC_JSON
from baton_text.parsers.granite import GRANITE
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.llama3_json import LLAMA3_JSON
from baton_text.parsers.mistral import MISTRAL, MISTRAL_NAMED
from baton_text.parsers.parser import Reader, ReasoningParser, ToolParser, Tools, all_content
from baton_text.parsers.pythonic import OLMO3, PYTHONIC
from baton_text.parsers.reasoning import reasoned

# Where several read a template's calls, the first one does.
TOOL_PARSERS: Mapping[str, ToolParser] = {
    parser.name: parser
    for parser in (
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
_ASSISTANT = "<\uff5cAssistant\uff5c>"  # of DeepSeek
_THINK = ("<think>", "</think>")
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    parser.name: parser
    for parser in (
        ReasoningParser("deepseek_r1", *_THINK, marks=(_ASSISTANT, *_THINK), always=True),
        ReasoningParser("qwen3", *_THINK, marks=_THINK),
    )
}


def tool_parser_for(template: str) -> ToolParser | None:
    """The one that reads the calls which a chat template shows; None if it shows none of a family
    that is known."""
    return next((one for one in TOOL_PARSERS.values() if _all_in(one.marks, template)), None)


def enforced(parser: ToolParser) -> ToolParser:
    """The parser whose form a grammar enforces and whose reading the answer then needs: this one,
    or the generic one where it has no form."""
    return parser if parser.form is not None else GENERIC_JSON


def reasoning_parser_for(template: str) -> ReasoningParser | None:
    return next((one for one in REASONING_PARSERS.values() if _all_in(one.marks, template)), None)


def _all_in(marks: tuple[str, ...], template: str) -> bool:
    """No marks stand in no template: that parser is chosen by name."""
    return bool(marks) and all(mark in template for mark in marks)


def reader(
    tools: Tools,
    tool_parser: ToolParser | None = None,
    reasoning_parser: ReasoningParser | None = None,
    *,
    begun: bool = False,
) -> Reader:
    """A reader of one answer. Without a tool parser there are no calls, without a reasoning parser
    no reasoning. `begun`: the answer begins within reasoning, see ReasoningParser.begun."""
    parse = all_content if tool_parser is None else tool_parser.parse
    if reasoning_parser is not None and not (tool_parser and tool_parser.reads_reasoning):
        parse = reasoned(reasoning_parser, begun, parse)
    return Reader(lambda source: parse(source, tools))
