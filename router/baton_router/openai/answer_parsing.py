"""Parses a chat's answers into reasoning, content and tool calls.

In: what the client asked for, the model's parsers, and the prompt. Out: an AnswerParsing, which
stays the same on whatever node the request runs, and a ChoiceReader per choice, which splits text
into reasoning, content and calls. A chat that needs no parsing has no AnswerParsing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.nodes.model_grammars import AnswerRules
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.reasoning import RequestedReasoning
from baton_router.openai.structured_output import RequestedGrammar, shorten_reason
from baton_router.openai.tools import RequestedTools
from baton_text.grammars.errors import GrammarError
from baton_text.parsers.generic_json import GENERIC_JSON
from baton_text.parsers.parser import Piece, Reader, ReasoningParser, ToolParser
from baton_text.parsers.reasoning import reasoning_tokens
from baton_text.parsers.registry import enforced, reader
from baton_text.tokenizer import Tokenizer

ID_BYTES = 12  # bytes in a call's id


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsing:
    """How to parse the answers of one chat. `begun`: the answer starts inside reasoning.
    `includes_reasoning`: the client gets the reasoning. `rules` are what the whole answer must
    match, beyond a grammar for its content; `fields` are the client's fields that require them."""

    tools: RequestedTools | None
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    begun: bool
    includes_reasoning: bool
    rules: AnswerRules | None = None
    fields: tuple[str, ...] = ()

    @classmethod
    def for_chat(
        cls,
        model: PoolModel,
        tools: RequestedTools | None,
        reasoning: RequestedReasoning,
        content: RequestedGrammar | None,
        prompt: str,
        continued: str | None,
    ) -> AnswerParsing | None:
        """None if the whole answer is content. `continued` is the text of the last message if the
        answer continues it. Raise InvalidRequest."""
        thinks = model.reasoning_parser
        if reasoning.budget is not None and thinks is None:
            raise InvalidRequest(
                f"{reasoning.budget_field} is {reasoning.budget}, but the router cannot separate"
                " this model's reasoning from its answers; leave it out, or start its nodes with"
                " --reasoning-parser NAME",
                param=reasoning.budget_field,
            )
        if tools is None and thinks is None:
            return None
        begun = False
        if continued is None:
            begun = thinks is not None and thinks.begun(prompt)
        elif thinks is not None:
            begun = continued.rfind(thinks.begin) > continued.rfind(thinks.end)
            # A continued message whose reasoning has ended gets no more reasoning.
            thinks = thinks if begun or not continued else None
        parser = None
        if tools is not None:
            parser = model.tool_parser or GENERIC_JSON
            if tools.required or content is not None:
                parser = enforced(parser)
        plain = cls(
            tools=tools,
            tool_parser=parser,
            reasoning_parser=thinks,
            begun=begun,
            includes_reasoning=reasoning.included,
        )
        inside = continued is not None and not begun
        return plain._ruled(reasoning, content, inside)

    def _ruled(
        self, reasoning: RequestedReasoning, content: RequestedGrammar | None, inside: bool
    ) -> AnswerParsing:
        """This parsing, with the rules that must be enforced. `inside`: see `answer_grammar`."""
        tools, parser = self.tools, self.tool_parser
        budget = None if self.reasoning_parser is None else reasoning.budget
        ends_early = tools is not None and tools.most_calls == 1 and _may_repeat(parser)
        limits = tools is not None and (
            tools.required or bool(tools.strict) or content is not None or ends_early
        )
        fields = []
        if limits:
            fields.append("tools")
        if budget is not None:
            fields.append(reasoning.budget_field)
        if content is not None:
            fields.append(content.field)
        if not fields:
            return self
        rules = AnswerRules(
            reasoning=self.reasoning_parser, begun=self.begun, budget=budget, inside=inside
        )
        if content is not None and not (tools is not None and tools.required):
            rules = replace(rules, content=(content.kind, content.value))
        if limits and tools is not None:
            rules = replace(
                rules,
                calls=parser,
                tools=msgspec.json.encode(tools.callable).decode(),
                required=tools.required,
                strict=tools.strict,
                parallel=tools.most_calls is None,
            )
        return replace(self, rules=rules, fields=tuple(fields))

    @property
    def reads_special(self) -> bool:
        """True if the parsers' markers are special tokens, so the text must contain those."""
        tools, thinks = self.tool_parser, self.reasoning_parser
        return bool((tools and tools.reads_special) or (thinks and thinks.reads_special))

    @property
    def calls_end(self) -> bool:
        """True if an answer with calls finishes with `tool_calls`. With a named function it
        finishes with `stop`, as in OpenAI's API."""
        return self.tools is not None and self.tools.named is None

    def reader(self) -> Reader:
        tools = {} if self.tools is None else self.tools.callable
        return reader(tools, self.tool_parser, self.reasoning_parser, begun=self.begun)

    def reasoning_tokens(
        self, tokenizer: Tokenizer, choices: Iterable[Sequence[int]], *, skip_special: bool
    ) -> int | None:
        """Reasoning tokens in these complete answers; None if the model's reasoning is not
        separated. Takes 2 us per token."""
        if self.reasoning_parser is None:
            return None
        return sum(
            reasoning_tokens(self.reader(), tokenizer, ids, skip_special=skip_special)
            for ids in choices
        )

    def refusal(self, error: GrammarError) -> InvalidRequest:
        """The error for a grammar that cannot be made or does not compile."""
        name, _, why = str(error).partition(": ")
        function = None if self.tools is None else self.tools.functions.get(name)
        if function is not None and why:
            field = function.field
            return InvalidRequest(f"{field}: {shorten_reason(why)}", param=field)
        return InvalidRequest(
            f"{', '.join(self.fields)}: {shorten_reason(str(error))}",
            param=self.fields[0].partition(".")[0],
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _may_repeat(parser: ToolParser | None) -> bool:
    """Whether a family writes several calls, in a form that a grammar can end after the first."""
    return parser is not None and parser.form is not None and parser.form.between is not None


class ChoiceReader:
    """Splits one choice's text into the pieces that its client gets. Leaves out calls beyond the
    limit, and reasoning that the client does not want. An answer that must be calls has no content:
    other text in it is a call that was cut off before its name."""

    def __init__(self, parsing: AnswerParsing, name: str, *, sees_markers: bool = True) -> None:
        """`name` identifies the choice; its calls' ids derive from it. Without `sees_markers` the
        text lacks the parser's markers, so its calls are content."""
        tools = parsing.tools
        self._reader = parsing.reader()
        self._most_calls = 0 if tools is None else tools.most_calls
        self._has_content = tools is None or not tools.required or not sees_markers
        self._includes_reasoning = parsing.includes_reasoning
        self._name = name
        self._short = parsing.tool_parser is not None and parsing.tool_parser.short_ids
        self.called = False
        self._arguments: list[str] = []  # of the last call

    def read_text(self, text: str, *, ended: bool) -> list[Piece]:
        """The pieces that the text adds; at the end, also those held back."""
        pieces = self._reader.push(text) if text else []
        if ended:
            pieces += self._reader.finish()
        if not pieces:
            return pieces
        shown = [piece for piece in pieces if self._shows(piece)]
        for piece in shown:
            if piece.kind == "call":
                self.called, self._arguments = True, []
            elif piece.kind == "arguments":
                self._arguments.append(piece.text)
        return shown

    @property
    def has_whole_calls(self) -> bool:
        """True if there is a call and none is cut off in its arguments."""
        return self.called and _is_object("".join(self._arguments))

    def call_id(self, number: int) -> str:
        """The id of a call, derived from request, choice and call, so any router gives the same."""
        digest = blake2b(f"{self._name}/{number}".encode(), digest_size=ID_BYTES).hexdigest()
        return digest[:9] if self._short else f"call_{digest}"

    def _shows(self, piece: Piece) -> bool:
        if piece.kind == "reasoning":
            return self._includes_reasoning
        if piece.kind in ("call", "arguments"):
            return self._most_calls is None or piece.call < self._most_calls
        return self._has_content
