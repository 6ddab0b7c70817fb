"""The grammar of a whole answer: its reasoning, and then its content or its calls of functions.

In: what the content must match, which functions may be called, and how the model's family writes
reasoning and calls (see `parsers`). Out: one grammar text, or None where nothing is asked for.

A marker that is a token of the model is that token in the grammar, see `lark`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from baton_text.grammar import (
    JSON_OPTIONS,
    GrammarError,
    check_size,
    grammars_in,
    schema_of,
    validate,
)
from baton_text.lark import Lark
from baton_text.parsers.parser import CallForm, ReasoningParser, ToolParser, Tools
from baton_text.tokenizer import Tokenizer

# Between reasoning and what follows. Without a bound a model may write white space alone.
SPACE = r"/[ \n\t]{0,4}/"


@dataclass(frozen=True)
class CallRules:
    """Which calls an answer may make.

    tools      the functions that may be called: of all, or the one that a client names
    required   the answer is calls, one at least, and nothing else; the arguments match the schemas
    strict     where calls are not required: functions whose arguments match their schemas; those of
               others are any JSON objects
    parallel   there may be several calls
    """

    parser: ToolParser
    tools: Tools
    required: bool = False
    strict: frozenset[str] = frozenset()
    parallel: bool = True


def answer_grammar(
    tokenizer: Tokenizer,
    *,
    content: str | None = None,
    calls: CallRules | None = None,
    reasoning: ReasoningParser | None = None,
    begun: bool = False,
    budget: int | None = None,
) -> str | None:
    """The text of a grammar, as `grammar_of` gives one.

    `content` is a grammar's text; None is any text. With `calls` the answer is content or calls:
    calls alone where they are required, text with calls in it where the content is any text.
    Reasoning may come first, and does if it has `begun` (see ReasoningParser.begun); `budget` is
    the most tokens between its markers.

    Raise GrammarError for what cannot be enforced; where that is a function's schema, the message
    begins with the function's name. `Grammars.check` says whether the whole compiles.
    """
    answer = _Answer(Lark(tokenizer), reasoning, begun)
    rest = answer.behind_reasoning(content, calls)
    if rest is None:
        if budget is None:
            return None
        rest = f"{answer.lark.any_token(answer.opening)}*"
    start = f"start: {answer.before(budget, calls)} {rest}"
    lark = {"lark_grammar": "\n".join([start, *answer.rules])}
    text = json.dumps({"grammars": [lark, *answer.grammars]}, ensure_ascii=False)
    check_size(text)
    return text


class _Answer:
    """Collects the grammar's rules, and the grammars that these refer to as @name."""

    def __init__(self, lark: Lark, reasoning: ReasoningParser | None, begun: bool) -> None:
        self.lark = lark
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._reasoning = reasoning
        self._begun = begun
        self._arguments: list[dict[str, Any]] = []  # the schema of each function's

    @property
    def opening(self) -> str:
        """What opens reasoning, if something may: free text must not begin with it, or the
        reasoning would be free text."""
        return self._reasoning.begin if self._reasoning and not self._begun else ""

    def before(self, budget: int | None, calls: CallRules | None) -> str:
        """Reasoning with its markers, and the white space behind it. No call begins within it: a
        reader may take it for the reasoning's end."""
        parser = self._reasoning
        if parser is None:
            if budget is not None:
                raise GrammarError("a budget for reasoning needs a reasoning parser")
            return ""
        marker = self._call_marker(calls)
        end = self.lark.leading_token(parser.end)
        whole = self._begun or self.lark.is_token(parser.begin)
        if budget is not None and not (end and whole):
            raise GrammarError(
                "a budget for reasoning needs a model whose markers are tokens, not "
                f"{parser.begin!r} and {parser.end!r}"
            )
        if end:
            one = self.lark.any_token(end, marker)
            thought = f"{one}*" if budget is None else f"{one}{{0,{budget}}}" if budget else ""
            thought += f" {self.lark.text(parser.end)}"
        else:
            thought = "thought"
            called = f" & ~(/(?s:.*)/ {self.lark.text(marker)} /(?s:.*)/)" if marker else ""
            self.rules += [
                f"thought[suffix={self.lark.text(parser.end)}]: THOUGHT",
                f"THOUGHT: /(?s:.*)/{called}",
            ]
        thought += f" {SPACE}"
        return thought if self._begun else f"({self.lark.text(parser.begin)} {thought})?"

    def _call_marker(self, calls: CallRules | None) -> str:
        """What opens calls, as far as it is a marker; empty for no calls and for calls in JSON."""
        form = calls.parser.form if calls else None
        if form is None:
            return ""
        return self.lark.leading_token(form.open + form.before_name) or _marker(form)

    def behind_reasoning(self, content: str | None, calls: CallRules | None) -> str | None:
        """In Lark; None for any text."""
        if calls is not None and not _constrains(calls, content):
            calls = None
        if content is not None and not (calls and calls.required):
            first, *others = grammars_in(content)
            self.grammars += [{**first, "name": "content"}, *others]
        if calls is None:
            return None if content is None else "@content"
        form = calls.parser.form
        # Where one token opens messages of every kind, what follows it in free text is no call yet.
        if form is None or (calls.parser.reads_reasoning and not calls.required):
            raise GrammarError(
                f"calls in the form of {calls.parser.name!r} cannot be enforced"
                + (", unless one is required" if form is not None else "")
            )
        self._add_arguments(calls)
        if calls.required:
            return self._calls(form, calls)
        if content is None:
            return self._calls_in_text(form, calls)
        written = self._json_calls(form, calls) if _is_json(content) else None
        return f"({written or self._calls(form, calls)} | @content)"

    def _add_arguments(self, calls: CallRules) -> None:
        for number, (name, schema) in enumerate(calls.tools.items()):
            enforced = calls.required or name in calls.strict
            try:
                known = _arguments_schema(schema) if enforced else {"type": "object"}
                grammar = {"json_schema": {**known, "x-guidance": JSON_OPTIONS}}
                if enforced:
                    validate(json.dumps({"grammars": [grammar]}))
            except GrammarError as error:
                raise GrammarError(f"{name}: {error}") from None
            self._arguments.append(known)
            self.grammars.append({"name": f"arguments_{number}", **grammar})

    def _calls(self, form: CallForm, calls: CallRules) -> str:
        """From the first marker to the last one."""
        return f"{self.lark.text(form.open + form.before_name)} {self._from_name(form, calls)}"

    def _from_name(self, form: CallForm, calls: CallRules) -> str:
        """Calls from the first one's name on."""
        functions = " | ".join(
            f"{self.lark.text(name + form.before_arguments)} @arguments_{number}"
            for number, name in enumerate(calls.tools)
        )
        self.rules.append(f"call: ({functions}) {self.lark.text(form.after_arguments)}")
        more = ""
        if calls.parallel and form.between is not None:
            more = f"({self.lark.text(form.between + form.before_name)} call)*"
        return f"call {more} {self.lark.text(form.close)}"

    def _calls_in_text(self, form: CallForm, calls: CallRules) -> str:
        head = form.open + form.before_name
        marker = self._call_marker(calls)
        if not marker:
            return self._calls_or_text(form, calls)
        follows = f"{self.lark.text(head[len(marker) :])} {self._from_name(form, calls)}"
        tags = [(marker, follows)]
        self.rules += self.lark.tagged(tags, many=calls.parallel, opening=self.opening)
        return "tagged"

    def _calls_or_text(self, form: CallForm, calls: CallRules) -> str:
        """Where calls begin as JSON does, in text they would be anything; so they are the whole
        answer, and another answer begins with something else."""
        head = (form.open + form.before_name)[0]
        self.rules += [
            *self.lark.free_text(self.opening),
            "text: (FIRST free*)?",
            rf"FIRST: SOME & /(?s:\s*[^\s\{head}].*)/",
        ]
        return f"({self._calls(form, calls)} | text)"

    def _json_calls(self, form: CallForm, calls: CallRules) -> str | None:
        """Calls that are JSON as a whole, as schemas; None where they are something else. Beside
        JSON content, a text that begins as JSON does would exclude it."""
        shape = _json_shape(form)
        if not isinstance(shape, dict | list):
            return None
        one = shape[0] if isinstance(shape, list) else shape
        schemas = [
            # The $id keeps what the schema refers to as "#" within it.
            _shaped(one, name, {"$id": f"function:{number}", **self._arguments[number]})
            for number, name in enumerate(calls.tools)
        ]
        several = calls.parallel and form.between is not None
        if isinstance(shape, list):
            most = {} if several else {"maxItems": 1}
            schemas = [{"type": "array", "items": {"anyOf": schemas}, "minItems": 1, **most}]
        names = [f"calls_{number}" for number in range(len(schemas))]
        self.grammars += [
            {"name": name, "json_schema": {**schema, "x-guidance": JSON_OPTIONS}}
            for name, schema in zip(names, schemas, strict=True)
        ]
        any_call = f"({' | '.join(f'@{name}' for name in names)})"
        if several and not isinstance(shape, list):
            return f"{any_call} ({self.lark.text(form.between or '')} {any_call})*"
        return any_call


def _constrains(calls: CallRules, content: str | None) -> bool:
    """Whether the answer may not be whatever the model writes: calls that are not required may be,
    as long as no other form of them is excluded."""
    if calls.required or calls.strict:
        return True
    enforced = calls.parser.form is not None and not calls.parser.reads_reasoning
    return content is not None or (enforced and not calls.parallel)


def _marker(form: CallForm) -> str:
    """The text that tells a reader that a call begins: up to white space or JSON. Empty where calls
    begin with JSON."""
    found = re.match(r"[^\s{]*", form.open.strip() or form.before_name)
    return found.group().rstrip("[") if found else ""


def _arguments_schema(schema: object) -> dict[str, Any]:
    """Arguments are an object, also where the schema leaves it open."""
    known = schema_of(schema)
    kind = known.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarError(f"arguments are an object; the schema's type is {kind!r}")
    return {**known, "type": "object"}


def _is_json(content: str) -> bool:
    return "json_schema" in grammars_in(content)[0]


NAME = "a function's name"


def _json_shape(form: CallForm) -> object:
    """One call as JSON, with NAME as its function and {} as its arguments; None where it is none.
    Calls in an array are apart by commas."""
    call = f"{form.before_name}{NAME}{form.before_arguments}{{}}{form.after_arguments}"
    try:
        return json.loads(f"{form.open}{call}{form.close}")
    except ValueError:
        return None


def _shaped(shape: object, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of this function."""
    if shape == {}:
        return arguments
    if isinstance(shape, dict):
        properties = {key: _shaped(value, name, arguments) for key, value in shape.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    return {"const": name if shape == NAME else shape}
