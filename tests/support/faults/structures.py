"""The structures that answers must match in the grammar faults: schemas, regexes, grammars,
choices, structural tags and function calls, each with a check of a finished answer. Data only.

The simulated model generates random printable ASCII. Markers that it must generate by chance in
free text are therefore single characters with a logit bias.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema_rs

from baton_text.artifacts import byte_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.parser import CallForm, Piece, ReasoningParser, ToolParser, Tools
from baton_text.parsers.registry import reader
from baton_text.tokenizer import Tokenizer
from tests.support.clients.http import Json

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
Check = Callable[[str], None]


@dataclass(frozen=True)
class Structure:
    """One structure. `fields` request it; `grammar` is the text that the router sends to nodes;
    `check` raises if a finished answer does not match; `bias` is the request's logit_bias."""

    fields: Json
    grammar: str
    check: Check
    bias: Json = field(default_factory=dict)


def _asked(kind: Kind, value: Any, check: Check, **bias: float) -> Structure:
    given = value if kind != "json_object" else True
    return Structure(
        {"structured_outputs": {kind: given}},
        grammar_of(kind, value, TOKENIZER),
        check,
        {str(ord(char)): more for char, more in bias.items()},
    )


def _object(**properties: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items: Json, least: int, most: int) -> Json:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD = {"type": "string", "minLength": 1, "maxLength": 6}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG = {"type": "boolean"}
SIDE = {"enum": ["left", "right"]}
POINT = _object(x=COUNT, y=COUNT)
SCHEMAS: Mapping[str, Json] = {
    "point": POINT,
    "person": _object(name=WORD, age=COUNT),
    "flags": _object(ready=FLAG, open=FLAG, late=FLAG),
    "sides": _array(SIDE, 2, 4),
    "points": _array(POINT, 1, 3),
    "matrix": _array(_array(COUNT, 2, 2), 2, 3),
    "constant": _object(kind={"const": "place"}, side=SIDE),
    "either": _object(value={"anyOf": [COUNT, WORD]}),
    "nullable": _object(name={"type": ["string", "null"], "maxLength": 5}, side=SIDE),
    "pattern": _object(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    "date": _object(day={"type": "string", "format": "date"}),
    "reference": {
        **_object(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}),
        "$defs": {"p": POINT},
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(size=COUNT, parts=_array({"$ref": "#/$defs/leaf"}, 0, 2)),
            "leaf": _object(side=SIDE),
        },
    },
    "nested": _object(a=_object(b=_object(c=_object(d=SIDE)))),
    "optional": {
        "type": "object",
        "properties": {"a": FLAG, "b": COUNT, "c": WORD},
        "required": ["c"],
        "additionalProperties": False,
    },
    "number": _object(share={"type": "number", "minimum": 0, "maximum": 1}),
    "words": _array({"enum": ["caf\u00e9", "na\u00efve", "plain"]}, 2, 3),
    "mixed": _object(id=COUNT, tags=_array(WORD, 0, 2), place=POINT),
}  # fmt: skip
REGEXES = (
    r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]",
    r"[a-f0-9]{8}(-[a-f0-9]{4}){3}",
    r"(ab|ba){4,12}",
    r"[A-Z][a-z]{2,9} [A-Z][a-z]{2,9}",
    r"\+[0-9]{2} [0-9]{3} [0-9]{4}",
    r"(yes|no)(, (yes|no)){3,6}",
)
CHOICES = (
    ["approve the request", "decline the request", "defer the request"],
    ["alpha-one-two", "alpha-one-three", "beta-one-two"],
    ['say "maybe" and wait', "say {nothing} at all"],
)
# Each grammar with a regex for the same language.
GRAMMARS = (
    ('start: "a" ("b" | "c")~6', r"a[bc]{6}"),
    ('start: NUMBER ("+" NUMBER)~3\nNUMBER: /[0-9]{1,3}/', r"[0-9]{1,3}(\+[0-9]{1,3}){3}"),
    ('start: pair~4\npair: "(" /[a-z]/ ";" /[0-9]/ ")"', r"(\([a-z];[0-9]\)){4}"),
    ('root ::= "x" [0-9] [0-9] "y" [a-c]+ "z"', r"x[0-9]{2}y[a-c]+z"),
    ('root ::= item item item\nitem ::= "<" [a-z] ">"', r"(<[a-z]>){3}"),
    ('root ::= ("left " | "right ") ("up" | "down") "!"', r"(left|right) (up|down)!"),
)

TOOLS: Tools = {
    "move": _object(to=POINT),
    "turn": _object(side=SIDE, steps=COUNT),
    "note": _object(text=WORD, urgent=FLAG),
}
THINK = ReasoningParser("brackets", "[", "]", marks=("[", "]"))
# A format of calls that begins and ends with one character.
TILDE = replace(
    HERMES,
    form=CallForm(
        before_name='~{"name": "', before_arguments='", "arguments": ', after_arguments="}~",
    ),
)  # fmt: skip


def _matches(schema: Json) -> Check:
    return lambda text: jsonschema_rs.validate(schema, json.loads(text))


def _fits(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def _one_of(strings: list[str]) -> Check:
    def check(text: str) -> None:
        assert text in strings

    return check


def _tagged(schemas: Mapping[str, Json], end: str) -> Check:
    """Check that after each tag's beginning in the text, a value matches its schema and `end`
    follows."""

    def check(text: str) -> None:
        at = 0
        while found := re.search("|".join(map(re.escape, schemas)), text[at:]):
            at += found.end()
            value, length = json.JSONDecoder().raw_decode(text[at:].lstrip())
            jsonschema_rs.validate(schemas[found.group()], value)
            at += len(text[at:]) - len(text[at:].lstrip()) + length
            assert text.startswith(end, at), text

    return check


def _calls(
    tools: Tools, *, content: Check | None = None, reasoning: ReasoningParser | None = None,
    begun: bool = False, most: int = 99,
) -> Check:  # fmt: skip
    """Check that the text holds Hermes calls whose arguments match, or content that passes
    `content`."""

    def check(text: str) -> None:
        answer_reader = reader(tools, HERMES, reasoning, begun=begun)
        pieces: list[Piece] = [*answer_reader.push(text), *answer_reader.finish()]
        calls: list[tuple[str, str]] = []
        content_text = ""
        for piece in pieces:
            if piece.kind == "call":
                calls.append((piece.text, ""))
            elif piece.kind == "arguments":
                calls[piece.call] = calls[piece.call][0], calls[piece.call][1] + piece.text
            elif piece.kind == "content":
                content_text += piece.text
        for name, arguments in calls:
            jsonschema_rs.validate(dict(tools[name]), json.loads(arguments))
        assert len(calls) <= most
        if content is not None and not calls:
            content(content_text)
        else:
            assert calls
            assert not content_text

    return check


def _tilde_calls(text: str) -> None:
    for match in re.finditer(r"~(\{.*?\})~", text):
        call = json.loads(match.group(1))
        jsonschema_rs.validate(dict(TOOLS[call["name"]]), call["arguments"])


def _behind_reasoning(content: Check, *, begun: bool) -> Check:
    def check(text: str) -> None:
        if begun or text.startswith("["):
            text = text.partition("]")[2].lstrip()
        content(text)

    return check


def _answer(check: Check, bias: str = "", **rules: Any) -> Structure:
    grammar = answer_grammar(TOKENIZER, **rules)
    assert grammar is not None
    biases = {str(ord(char)): 10 for char in bias}
    return Structure({"structured_outputs": {"grammar": grammar}}, grammar, check, biases)


def _required(parser: ToolParser = HERMES, tools: Tools = TOOLS, **rules: Any) -> CallRules:
    return CallRules(parser, tools, required=True, **rules)


POINT_TEXT = grammar_of("json", POINT)
TAG: Json = {
    "structures": [
        {"begin": "<", "schema": POINT, "end": ">"},
        {"begin": "~", "schema": FLAG, "end": ">"},
    ],
    "triggers": ["<", "~"],
}
LONG_TAG: Json = {"structures": [{"begin": "<", "schema": SCHEMAS["person"]}], "triggers": ["<"]}


def _structures() -> dict[str, Structure]:
    found = {
        f"schema {name}": _asked("json", schema, _matches(schema))
        for name, schema in SCHEMAS.items()
    }
    found |= {f"regex {n}": _asked("regex", each, _fits(each)) for n, each in enumerate(REGEXES)}
    found |= {
        f"choice {n}": _asked("choice", each, _one_of(each)) for n, each in enumerate(CHOICES)
    }
    found |= {
        f"grammar {n}": _asked("grammar", text, _fits(pattern))
        for n, (text, pattern) in enumerate(GRAMMARS)
    }
    named = {"turn": TOOLS["turn"]}
    strict = frozenset(TOOLS)
    either = CallRules(HERMES, TOOLS, strict=strict)
    return found | {
        "object": _asked("json_object", None, _matches({"type": "object"})),
        "tag": Structure(
            {"structured_outputs": {"structural_tag": TAG}},
            grammar_of("structural_tag", TAG, TOKENIZER),
            _tagged({"<": POINT, "~": FLAG}, ">"),
            {str(ord("<")): 10, str(ord("~")): 10},
        ),
        "tag without end": Structure(
            {"structured_outputs": {"structural_tag": LONG_TAG}},
            grammar_of("structural_tag", LONG_TAG, TOKENIZER),
            _tagged({"<": SCHEMAS["person"]}, ""),
            {str(ord("<")): 10},
        ),
        "calls": _answer(_calls(TOOLS), calls=_required()),
        "one call": _answer(_calls(TOOLS, most=1), calls=_required(parallel=False)),
        "named call": _answer(
            _calls(named, most=1), calls=_required(tools=named, parallel=False)
        ),
        "calls in text": _answer(_tilde_calls, "~", calls=CallRules(TILDE, TOOLS, strict=strict)),
        "one call in text": _answer(
            _tilde_calls, "~", calls=CallRules(TILDE, TOOLS, strict=strict, parallel=False)
        ),
        "calls or schema": _answer(
            _calls(TOOLS, content=_matches(POINT)), "<", content=POINT_TEXT, calls=either
        ),
        "reasoning, schema": _answer(
            _behind_reasoning(_matches(POINT), begun=True), "]",
            content=POINT_TEXT, reasoning=THINK, begun=True,
        ),
        "reasoning or schema": _answer(
            _behind_reasoning(_matches(POINT), begun=False), "[]",
            content=POINT_TEXT, reasoning=THINK,
        ),
        "reasoning, calls": _answer(
            _calls(TOOLS, reasoning=THINK, begun=True), "]",
            calls=_required(), reasoning=THINK, begun=True,
        ),
        "reasoning, regex": _answer(
            _behind_reasoning(_fits(REGEXES[0]), begun=True), "]",
            content=grammar_of("regex", REGEXES[0]), reasoning=THINK, begun=True,
        ),
    }  # fmt: skip


STRUCTURES: Mapping[str, Structure] = _structures()
