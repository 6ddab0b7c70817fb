"""The error of a grammar that cannot be used, and plain sentences for llguidance's messages.

In: a message of llguidance, which may have several lines and a dump of its state. Out: one
sentence. A message of an unknown form is quoted inside a sentence of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_QUOTED = 200  # characters of a message that is quoted


class GrammarError(ValueError):
    """A grammar does not compile or exceeds a limit; the message names the place or the limit."""


def at(place: str, why: str) -> GrammarError:
    """The error of a part of a schema; `place` is its path, empty for the whole."""
    return GrammarError(f"{place}: {why}" if place else why)


def explain(message: str) -> str:
    """One sentence for a message of llguidance."""
    text = message.split("\n<state>")[0].replace("<non-verbose/>", "").strip()
    for pattern, sentence in _SENTENCES:
        match = pattern.search(text)
        if match is not None:
            return sentence(match)
    return f"the grammar does not compile: {_quoted(text)}"


def _quoted(text: str) -> str:
    """The part of a message that says what is wrong, on one line."""
    errors = re.findall(r"^error: (.*)", text, re.M)  # regex errors draw the place above it
    line = errors[0] if errors else text.split("\n")[0]
    line = " ".join(line.split())
    return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]}..."


def _unimplemented(match: re.Match[str]) -> str:
    keywords = re.findall(r'"([^"]+)"', match.group(1))
    return f"`{'`, `'.join(keywords)}` cannot be enforced"


_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"^panic"),
        lambda _: "the grammar cannot be compiled, because the parser fails on it",
    ),
    (re.compile(r"NoExtension"), lambda _: "no text matches it"),
    (re.compile(r"Unimplemented keys: (.*)"), _unimplemented),
    (
        re.compile(r"Unknown format: (.*)"),
        lambda found: f"the format {found.group(1)!r} cannot be enforced",
    ),
    (
        re.compile(r"Pointer '(.*)' does not exist|Resource '(.*)' is not present", re.S),
        lambda found: f"the $ref to {(found.group(1) or found.group(2))!r} cannot be resolved",
    ),
    (
        re.compile(r"oneOf constraints are not supported"),
        lambda _: "`oneOf` cannot be enforced if a value may match two options; use anyOf",
    ),
    (
        re.compile(r"min/maxProperties only supported"),
        lambda _: (
            "`minProperties` and `maxProperties` cannot be enforced beside optional `properties`"
        ),
    ),
    (
        re.compile(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint", re.S),
        lambda found: f"patternProperties {found.group(1)!r} and {found.group(2)!r} overlap",
    ),
    (
        re.compile(r"can't determine if patternProperty regexes /(.*)/ and /(.*)/ are", re.S),
        lambda found: f"patternProperties {found.group(1)!r} and {found.group(2)!r} may overlap",
    ),
    (
        re.compile(r"circular references"),
        lambda _: (
            "a schema that refers to itself cannot be enforced together with other keywords for the"
            " same value"
        ),
    ),
    (
        re.compile(r"Regex is empty"),
        lambda _: "no text matches it: its lengths, patterns and values exclude each other",
    ),
    (
        re.compile(r"Unsatisfiable schema: (.*)", re.S),
        lambda found: f"no value matches it: {_quoted(found.group(1))}",
    ),
    (
        re.compile(r"Parser[A-Za-z]*TooComplex|LexerTooComplex|fuel|too (?:large|big|many)"),
        lambda found: f"the grammar is too complex: {_quoted(found.string)}",
    ),
)
