"""Read a client's grammar in Lark: its rules, its inline JSON schemas, and what it can never match.

In: the grammar's text. Out: the text with its schemas in enforceable form, or a GrammarError that
names a rule or terminal that matches no text. llguidance compiles the grammar and reports errors
of syntax; what this module does not understand it leaves alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.limits import LIMITS
from baton_text.grammars.property_names import byte_tokenizer

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+ | //[^\n]* | \#[^\n]*)
    | (?P<text>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<special><[^<>\s]*(?:\s[^<>]*)?>)
    | (?P<part>@[\w.-]+)
    | (?P<json>%json\b\s*)
    | (?P<directive>%\w+)
    | (?P<name>[?!]?_?[A-Za-z][\w-]*)
    | (?P<number>\.?\d+)
    | (?P<sign>->|\.\.|.)
    """,
    re.X | re.S,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Definition:
    """A rule or terminal: its name, and the tokens behind its colon."""

    name: str
    body: list[Token]

    @property
    def is_terminal(self) -> bool:
        return self.name.lstrip("_").isupper()


def tokens_of(grammar: str) -> list[Token]:
    """All tokens of a grammar, white space and comments included. An inline schema is one token.
    Raise GrammarError for a schema that is nested too deep."""
    decoder, tokens, place = json.JSONDecoder(), list[Token](), 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        assert match is not None, "every character is at least a sign"
        kind, end = str(match.lastgroup), match.end()
        tokens.append(Token(kind, match.group()))
        if kind == "json":
            try:
                _, end = decoder.raw_decode(grammar, end)
            except RecursionError:
                raise GrammarError("a schema in the grammar is nested too deep") from None
            except ValueError:
                pass  # not JSON, which llguidance reports
            else:
                tokens.append(Token("schema", grammar[match.end() : end]))
        place = end
    return tokens


def schemas_in(grammar: str) -> Iterator[Any]:
    """The inline JSON schemas of a grammar."""
    for token in tokens_of(grammar):
        if token.kind == "schema":
            yield json.loads(token.text)


def with_schemas(grammar: str, change: Callable[[Any], Any]) -> str:
    """The grammar with each inline JSON schema changed."""
    return "".join(
        json.dumps(change(json.loads(token.text)), ensure_ascii=False)
        if token.kind == "schema"
        else token.text
        for token in tokens_of(grammar)
    )


def number_of_rules(grammar: str) -> int:
    """How many rules and terminals a grammar defines."""
    return len(_definitions(grammar))


def check_matches(grammar: str) -> None:
    """Raise GrammarError if a rule matches no finite text, or a terminal or regex no text."""
    definitions = _definitions(grammar)
    rules = {
        definition.name: definition.body for definition in definitions if not definition.is_terminal
    }
    users: dict[str, set[str]] = {}  # rule -> the rules that use it
    for name, body in rules.items():
        for token in body:
            if token.text in rules:
                users.setdefault(token.text, set()).add(name)
    finite, pending = set[str](), set(rules)
    while pending:
        name = pending.pop()
        if name not in finite and _Expansions(rules[name], rules, finite).match():
            finite.add(name)
            pending |= users.get(name, set())
    for name in rules:
        if name not in finite:
            raise GrammarError(f"the rule {name} matches no finite text; it always needs itself")
    _check_terminals(definitions)


def _definitions(grammar: str) -> list[_Definition]:
    tokens = [token for token in tokens_of(grammar) if token.kind != "space"]
    heads: list[tuple[int, int, str]] = []  # where a definition starts, where its body starts
    for index, token in enumerate(tokens):
        if token.kind == "name":
            colon = _colon(tokens, index + 1)
            if colon:
                heads.append((index, colon + 1, token.text.lstrip("?!")))
    ends = [*(begin for begin, _, _ in heads[1:]), len(tokens)]
    return [
        _Definition(name, _up_to_directive(tokens[body:end]))
        for (_, body, name), end in zip(heads, ends[: len(heads)], strict=True)
    ]


def _colon(tokens: list[Token], place: int) -> int:
    """The index of a definition's colon, behind its attributes and priority; 0 if there is none."""
    if place < len(tokens) and tokens[place].text in ("[", "{"):
        depth = 0
        while place < len(tokens):
            depth += (tokens[place].text in ("[", "{")) - (tokens[place].text in ("]", "}"))
            place += 1
            if not depth:
                break
    if place < len(tokens) and tokens[place].kind == "number":
        place += 1
    if place + 1 < len(tokens) and tokens[place].text == ":" and tokens[place + 1].text == ":":
        return 0
    return place if place < len(tokens) and tokens[place].text == ":" else 0


def _up_to_directive(body: list[Token]) -> list[Token]:
    for index, token in enumerate(body):
        if token.text in ("%ignore", "%import", "%declare", "%override", "%extend", "%llguidance"):
            return body[:index]
    return body


class _Expansions:
    """Whether the expansions of a rule match a finite text, as far as is known."""

    def __init__(self, body: list[Token], rules: Mapping[str, Any], finite: set[str]) -> None:
        self._tokens = body
        self._rules = rules
        self._finite = finite
        self._place = 0

    def match(self) -> bool:
        try:
            matches = self._alternatives()
        except RecursionError:
            return True  # nested deeper than llguidance allows
        return matches or self._place != len(self._tokens)  # syntax that is unknown here

    def _next(self) -> str:
        return self._tokens[self._place].text if self._place < len(self._tokens) else ""

    def _alternatives(self) -> bool:
        matches = self._sequence()
        while self._next() == "|":
            self._place += 1
            matches |= self._sequence()
        return matches

    def _sequence(self) -> bool:
        matches = True
        while self._next() not in ("", "|", ")", "]"):
            matches &= self._item()
        return matches

    def _item(self) -> bool:
        token = self._tokens[self._place]
        self._place += 1
        matches = True
        if token.text in ("(", "["):
            matches = self._alternatives() or token.text == "["
            self._place += 1
        elif token.text == "->":
            self._place += 1  # the name of an alternative
        elif token.text == "%" or token.kind == "directive":
            self._place = len(self._tokens) + 1  # a directive of llguidance: anything may follow
        elif token.kind == "name":
            matches = token.text not in self._rules or token.text in self._finite
        return self._repeated() or matches

    def _repeated(self) -> bool:
        """Read the operators behind an item; return whether the item may be left out."""
        may_miss = False
        while self._next() in ("?", "*", "+", "~", "{"):
            sign = self._next()
            self._place += 1
            if sign in ("?", "*"):
                may_miss = True
            if sign in ("~", "{"):
                may_miss |= self._next() in ("0", ",")
                while self._place < len(self._tokens):
                    token = self._tokens[self._place]
                    if sign == "~" and token.kind != "number" and token.text != "..":
                        break
                    self._place += 1
                    if token.text == "}":
                        break
        return may_miss


def _check_terminals(definitions: list[_Definition]) -> None:
    """Raise GrammarError for a terminal or regex that matches no text.

    One grammar offers all of them, each behind a text that selects it."""
    terminals = [definition for definition in definitions if definition.is_terminal]
    tested = [definition.name for definition in terminals if _may_be_empty(definition.body)]
    for definition in definitions:
        if not definition.is_terminal:
            tested += [token.text for token in definition.body if token.kind == "regex"]
    if not tested:
        return
    written = [
        f"{definition.name}: {' '.join(token.text for token in definition.body)}"
        for definition in terminals
    ]
    selected = [f'"{index}!" {name}' for index, name in enumerate(tested)]
    grammar = "\n".join([f"start: {' | '.join(selected)}", *written])
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return  # llguidance reports it for the whole grammar
    for index, name in enumerate(tested):
        terminal_matcher = matcher.deep_copy()
        if terminal_matcher.consume_tokens(list(f"{index}!".encode())):
            terminal_matcher.compute_bitmask()
            if terminal_matcher.is_error() and "NoExtension" in terminal_matcher.get_error():
                kind = "regex" if name.startswith("/") else "terminal"
                raise GrammarError(f"the {kind} {name} matches no text")


def _may_be_empty(body: list[Token]) -> bool:
    return any(token.text in ("&", "~") or "[^" in token.text for token in body)
