"""Collects every `pip install` hint that Baton prints or documents.

In: the packages' sources and the documents (README, docs, charts). Out: `pip install` commands; an
f-string gives one command for each value it can take. A mention of an installation in any other
form is an error, because a hint that no test tries may install a foreign package, or nothing.

Commands that run rather than being read (Makefile, Dockerfiles) are left out: `make` and the image
builds test them.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baton_cli.doctor import machine as doctor_machine
from baton_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node", "router"),
    *("operator", "cli"),
)
DOCUMENTS = (
    "*.md",
    "docs/**/*",
    "charts/**/*",
    "models/**/*",
    *(f"{room}/**/*.md" for room in ROOMS),
)
PICTURE = ".png"
# The values that an expression in an f-string can take.
KNOWN_VALUES = {
    "command.extra": [one.extra for one in COMMANDS if one.extra],
    "extra": ["operator", *doctor_machine.EXTRAS],
}

# Options, then one requirement, in shell quotes if it has brackets.
HINT = re.compile(r"pip install((?: -\S+| constraints\.txt)* (?:'[^']+'|[\w.=<>-]*\w))")
# Anything like a hint: an installer's command, or Baton with an extra, in any spelling.
INSTALLER = r"\b(?:pip[\d.]*|pipx|uvx?|poetry|conda)\b"
WITH_EXTRA = r"\bbaton(?:[-_.]serve)?\["
MENTION = re.compile(rf"{INSTALLER}[^.;`]{{0,20}}\b(?:install|add)\b|{WITH_EXTRA}", re.IGNORECASE)
# What each mention contains: sources without it are not parsed, which would take seconds.
MENTIONED = re.compile(f"{INSTALLER}|{WITH_EXTRA}", re.IGNORECASE)


class Hint(NamedTuple):
    """`arguments` are those of `pip install`; `place` is the file with the hint."""

    arguments: tuple[str, ...]
    place: str


class UnknownHint(Exception):
    """A text mentions an installation that does not match HINT."""


def all_hints() -> list[Hint]:
    """Raise UnknownHint for a mention that is no hint."""
    return [hint for place, text in _texts() for hint in hints_in(text, place)]


def hints_in(text: str, place: str) -> list[Hint]:
    """Raise UnknownHint for a mention that is no hint."""
    hints = list(HINT.finditer(text))
    for mention in MENTION.finditer(text):
        if not any(one.start() <= mention.start() < mention.end() <= one.end() for one in hints):
            raise UnknownHint(f"{place}: {text[mention.start() :][:80]!r}")
    return [Hint(tuple(shlex.split(one[1])), place) for one in hints]


def strings_of(source: str, known_values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the strings of a Python source; an f-string once for each text it can give."""
    tree = ast.parse(source)
    f_strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = {id(piece) for string in f_strings for piece in string.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from map("".join, itertools.product(*_choices(node, known_values)))
        elif id(node) not in pieces and isinstance(node, ast.Constant):
            yield str(node.value)


def _choices(
    string: ast.JoinedStr, known_values: Mapping[str, Sequence[str]]
) -> list[Sequence[str]]:
    """The possible texts of each piece of an f-string."""
    choices: list[Sequence[str]] = []
    for piece in string.values:
        if isinstance(piece, ast.FormattedValue):
            name = ast.unparse(piece.value)
            choices.append(known_values.get(name, [f"{{{name}}}"]))
        else:
            assert isinstance(piece, ast.Constant)
            choices.append([str(piece.value)])
    return choices


def _texts() -> Iterator[tuple[str, str]]:
    found = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern) if path.is_file()}
    for path in sorted(found):
        if path.parent.name == "__pycache__" or path.suffix == PICTURE:
            continue
        yield str(path.relative_to(ROOT)), path.read_text()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            if MENTIONED.search(source):
                for text in strings_of(source, KNOWN_VALUES):
                    yield str(path.relative_to(ROOT)), text
