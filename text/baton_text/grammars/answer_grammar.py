"""Build the grammar of a whole answer: optional reasoning, then content or function calls.

In: the grammar of the content, the functions that may be called, and how the model's family writes
reasoning and calls (see `parsers`). Out: one grammar text, or None if nothing is constrained.

In the grammar, a marker that is a token of the model becomes that token (see `lark`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from baton_text.grammars.argument_grammar import ArgumentGrammar
from baton_text.grammars.client_schema import schema_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammar_text import check_size, grammars_in
from baton_text.grammars.lark import Lark
from baton_text.grammars.limits import JSON_OPTIONS
from baton_text.grammars.refusals import validate
from baton_text.parsers.parser import CallForm, ReasoningParser, ToolParser, Tools
from baton_text.tokenizer import Tokenizer

NAME = "a function's name"
# Between reasoning and the rest. Bounded, as a model might otherwise emit only white space.
SPACE = r"/[ \n\t]{0,4}/"


@dataclass(frozen=True)
class CallRules:
    """Which calls an answer may make.

    tools      the functions that may be called: all that the client offers, or the one it names
    required   the answer is one or more calls and nothing else; all arguments match their schemas
    strict     functions whose arguments match their schemas if calls are not required; arguments
               of other functions are any JSON object
    parallel   allow more than one call
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
    inside: bool = False,
) -> str | None:
    """Return the text of a grammar, or None if nothing is constrained.

    `content` is the grammar text of the content, None for any text. With `calls` the answer is
    content or calls: only calls if they are required, text that may contain calls if the content is
    any text. Reasoning may come first; if it has `begun` (see ReasoningParser.begun), the answer
    starts inside it. `budget` is the maximum number of tokens between its markers. `inside`: the
    answer continues a message's content, which matters for a family that writes several messages.

    Raise GrammarError for rules that cannot be enforced. If a function's schema is the cause, the
    message starts with the function's name. `Grammars.check` tests whether the result compiles.
    """
    answer = _Answer(Lark(tokenizer), calls, reasoning, begun, inside)
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
    """Collects the grammar's rules and the grammars to which they refer as @name."""

    def __init__(
        self,
        lark: Lark,
        calls: CallRules | None,
        reasoning: ReasoningParser | None,
        begun: bool,
        inside: bool,
    ) -> None:
        self.lark = lark
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._reasoning = reasoning
        self._begun = begun
        of_reasoning = reasoning.messages if reasoning else None
        self._messages = calls.parser.messages if calls else of_reasoning
        self._inside = inside and self._messages is not None
        # Per function: its schema, and the Lark expression of its arguments.
        self._schemas: list[dict[str, Any]] = []
        self._arguments: list[str] = []

    @property
    def opening(self) -> str:
        """The marker that opens reasoning; empty if none may open. Free text must not start with
        it, or reasoning would match as free text."""
        return self._reasoning.begin if self._reasoning and not self._begun else ""

    def before(self, budget: int | None, calls: CallRules | None) -> str:
        """Reasoning with its markers and the white space after it, in Lark. It excludes the start
        of a call, because some parsers end reasoning there."""
        parser = None if self._inside else self._reasoning
        if parser is None:
            if budget is not None:
                raise GrammarError("a budget for reasoning needs a reasoning parser")
            return ""
        without = self._messages.markers if self._messages else self._call_markers(calls)
        end = self.lark.leading_token(parser.end)
        whole = self._begun or self.lark.is_token(parser.begin)
        if budget is not None and not (end and whole):
            raise GrammarError(
                "a budget for reasoning needs a model whose markers are tokens, not "
                f"{parser.begin!r} and {parser.end!r}"
            )
        if end:
            token = self.lark.any_token(end, *without)
            thought = f"{token}*" if budget is None else f"{token}{{0,{budget}}}" if budget else ""
            thought += f" {self.lark.text(parser.end)}"
        else:
            thought = "thought"
            self.rules += [
                f"thought[suffix={self.lark.text(parser.end)}]: THOUGHT",
                f"THOUGHT: {self.lark.excluding(*without)}",
            ]
        thought += f" {SPACE}"
        return thought if self._begun else f"({self.lark.text(parser.begin)} {thought})?"

    def _call_markers(self, calls: CallRules | None) -> list[str]:
        """The markers of calls; none without calls and for calls that start with JSON."""
        if calls is None or calls.parser.form is None:
            return []
        ends_reasoning = (self._reasoning and self._reasoning.call) or ""
        markers = (self._trigger(calls.parser.form), ends_reasoning)
        return [marker for marker in dict.fromkeys(markers) if marker]

    def _trigger(self, form: CallForm) -> str:
        """The marker of a form's calls; empty if they start with JSON."""
        return self.lark.leading_token(form.open + form.before_name) or _marker(form)

    def behind_reasoning(self, content: str | None, calls: CallRules | None) -> str | None:
        """Content or calls, in Lark; None for any text."""
        if calls is not None and not _constrains(calls, content):
            calls = None
        if content is not None and not (calls and calls.required):
            first, *others = grammars_in(content)
            self.grammars += [{**first, "name": "content"}, *others]
        if calls is None:
            return None if content is None else self._message("@content")
        form = calls.parser.form
        if form is None:
            raise GrammarError(f"the call format {calls.parser.name!r} cannot be enforced")
        self._add_arguments(form, calls)
        if calls.required:
            return f"{self._another} {self._calls(form, calls)}"
        if self._messages is not None:
            return self._calls_in_messages(form, calls, content is not None)
        if content is None:
            return self._calls_in_text(form, calls)
        written = self._json_calls(form, calls) if _is_json(content) else None
        return f"({written or self._calls(form, calls)} | @content)"

    @property
    def _another(self) -> str:
        """In Lark, what ends the message that the answer continues, if any."""
        if self._messages is None or not self._inside:
            return ""
        return self.lark.text(self._messages.another)

    def _message(self, content: str) -> str:
        """Content with the header of its message, if the family writes any."""
        if self._messages is None or self._inside:
            return content
        return f"{self.lark.text(self._messages.content)} {content}"

    def _calls_in_messages(self, form: CallForm, calls: CallRules, has_content: bool) -> str:
        """A call or content, each a message of its own; a remark may precede it."""
        messages = self._messages
        assert messages is not None, "called for such families only"
        call = self._calls(form, calls)
        if has_content:
            return f"({self._another} {call} | {self._message('@content')})"
        another = self.lark.text(messages.another)
        if self.lark.leading_token(messages.another):
            remark = f"clean {another}"
        else:
            remark = "remark"
            self.rules.append(f"remark[suffix={another}]: REMARK")
            self.rules.append(f"REMARK: {self.lark.excluding(*messages.markers)}")
        self.rules += self.lark.clean_text(messages.markers)
        last = f"({call} | {self.lark.text(messages.content)} clean)"
        if self._inside:
            return f"(clean | {remark} {last})"
        return f"({self.lark.text(messages.remark)} {remark})? {last}"

    def _add_arguments(self, form: CallForm, calls: CallRules) -> None:
        one_by_one = None if form.arguments is None else ArgumentGrammar(self.lark, form.arguments)
        for number, (name, schema) in enumerate(calls.tools.items()):
            enforced = calls.required or name in calls.strict
            try:
                allowed = _arguments_schema(schema) if enforced else {"type": "object"}
                if one_by_one is None:
                    arguments = self._json_arguments(number, allowed, enforced)
                elif enforced:
                    arguments = one_by_one.arguments(allowed)
                else:
                    arguments = one_by_one.any_arguments()
            except GrammarError as error:
                raise GrammarError(f"{name}: {error}") from None
            self._schemas.append(allowed)
            self._arguments.append(arguments)
        if one_by_one is not None:
            self.rules += one_by_one.rules
            self.grammars += one_by_one.grammars

    def _json_arguments(self, number: int, schema: dict[str, Any], enforced: bool) -> str:
        grammar = {"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}
        if enforced:
            validate(json.dumps({"grammars": [grammar]}))
        self.grammars.append({"name": f"arguments_{number}", **grammar})
        return f"@arguments_{number}"

    def _calls(self, form: CallForm, calls: CallRules) -> str:
        """Calls from the first marker to the last, in Lark."""
        return f"{self.lark.text(form.open + form.before_name)} {self._from_name(form, calls)}"

    def _from_name(self, form: CallForm, calls: CallRules) -> str:
        """Calls from the first function's name on, in Lark; adds the rule `call`."""
        functions = " | ".join(
            f"{self.lark.text(name + form.before_arguments)} {arguments}"
            for name, arguments in zip(calls.tools, self._arguments, strict=True)
        )
        self.rules.append(f"call: ({functions}) {self.lark.text(form.after_arguments)}")
        more = ""
        if calls.parallel and form.between is not None:
            more = f"({self.lark.text(form.between + form.before_name)} call)*"
        return f"call {more} {self.lark.text(form.close)}"

    def _calls_in_text(self, form: CallForm, calls: CallRules) -> str:
        trigger = self._trigger(form)
        if not trigger:
            return self._calls_or_text(form, calls)
        head = form.open + form.before_name
        self.rules.append(f"from_name: {self._from_name(form, calls)}")
        tags = [
            (start, f"{self.lark.text(follows)} from_name")
            for start, follows in ((trigger, head[len(trigger) :]), *form.also)
        ]
        self.rules += self.lark.tagged(tags, many=calls.parallel, opening=self.opening)
        return "tagged"

    def _calls_or_text(self, form: CallForm, calls: CallRules) -> str:
        """Either calls alone, or text that does not start like a call.

        For calls without a marker: within text, JSON cannot be told from a call."""
        head = (form.open + form.before_name)[0]
        self.rules += self.lark.clean_text(
            [start for start, _ in form.also],
            start=form.other_start or rf"[^\s\{head}]",
            opening=self.opening,
        )
        return f"({self._calls(form, calls)} | clean)"

    def _json_calls(self, form: CallForm, calls: CallRules) -> str | None:
        """Calls as JSON schemas; None if the calls are not JSON as a whole.

        Beside JSON content, calls written as Lark text that starts like JSON would exclude it."""
        shape = _json_shape(form)
        if not isinstance(shape, dict | list):
            return None
        call = shape[0] if isinstance(shape, list) else shape
        schemas = [
            # With an $id, "#" in the function's schema still refers to that schema.
            _call_schema(call, name, {"$id": f"function:{number}", **self._schemas[number]})
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
    """Whether the rules for calls exclude any answer.

    Optional calls without strict schemas do so beside content with a grammar, or if the family's
    form allows several calls and only one is allowed."""
    if calls.required or calls.strict or content is not None:
        return True
    form = calls.parser.form
    return not calls.parallel and form is not None and form.between is not None


def _marker(form: CallForm) -> str:
    """The text that announces a call to a parser: up to white space or JSON. Empty if calls start
    with JSON."""
    match = re.match(r"[^\s{]*", form.open.strip() or form.before_name)
    return match.group().rstrip("[") if match else ""


def _arguments_schema(schema: object) -> dict[str, Any]:
    """The schema of a function's arguments, narrowed to objects.

    Raise GrammarError if it allows no object."""
    arguments = schema_of(schema)
    kind = arguments.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarError(f"arguments must be an object; the schema's type is {kind!r}")
    return {**arguments, "type": "object"}


def _is_json(content: str) -> bool:
    return "json_schema" in grammars_in(content)[0]


def _json_shape(form: CallForm) -> object:
    """One call as JSON, with NAME as the function and {} as the arguments; None if the form is not
    JSON."""
    call = f"{form.before_name}{NAME}{form.before_arguments}{{}}{form.after_arguments}"
    try:
        return json.loads(f"{form.open}{call}{form.close}")
    except ValueError:
        return None


def _call_schema(shape: object, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of function `name` whose JSON has this shape (see _json_shape)."""
    if shape == {}:
        return arguments
    if isinstance(shape, dict):
        properties = {key: _call_schema(value, name, arguments) for key, value in shape.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    return {"const": name if shape == NAME else shape}
