"""Every line that tells a user what to install, as Baton prints or documents it.

In: the rooms' sources, and what people read: README, docs, charts. Out: `pip install` commands,
with all values of what a program fills in. A mention that is not understood is an error: a hint
that nobody tries may install somebody else's package, or nothing.

Commands that are run instead of read (Makefile, Dockerfiles) are not here: `make` and the images'
builds try them.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baton_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node", "router"),
    *("operator", "cli"),
)
READ = ("*.md", "docs/**/*", "charts/**/*", "models/**/*", *(f"{room}/**/*.md" for room in ROOMS))
# What stands in the braces of an f-string, and all that it may become.
FILLED_IN = {"command.extra": [one.extra for one in COMMANDS if one.extra]}

# Options, then one requirement, in a shell's quotes where it has brackets.
HINT = re.compile(r"pip install((?: -\S+| constraints\.txt)* (?:'[^']+'|[\w.=<>-]*\w))")
# All that looks like one: an installer at work, or Baton with an extra, however either is spelt.
MENTION = re.compile(
    r"\b(?:pip[\d.]*|pipx|uvx?|poetry|conda)\b[^.;`]{0,20}\b(?:install|add)\b"
    r"|\bbaton(?:[-_.]serve)?\[",
    re.IGNORECASE,
)


class Hint(NamedTuple):
    """`words` is what pip is told after `install`; `place` is where the hint was found."""

    words: tuple[str, ...]
    place: str


class UnknownHint(Exception):
    """A text mentions an installation in another form than that of HINT."""


def all_hints() -> list[Hint]:
    """Raise UnknownHint for a mention that is no hint."""
    return [hint for place, text in _texts() for hint in hints_in(text, place)]


def hints_in(text: str, place: str) -> list[Hint]:
    """Raise UnknownHint for a mention that is no hint."""
    found = list(HINT.finditer(text))
    for mention in MENTION.finditer(text):
        if not any(one.start() <= mention.start() < mention.end() <= one.end() for one in found):
            raise UnknownHint(f"{place}: {text[mention.start() :][:80]!r}")
    return [Hint(tuple(shlex.split(one[1])), place) for one in found]


def strings_of(source: str, filled_in: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The strings of a Python source; an f-string once for each text that it may become."""
    tree = ast.parse(source)
    f_strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = {id(piece) for string in f_strings for piece in string.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from map("".join, itertools.product(*_choices(node, filled_in)))
        elif id(node) not in pieces and isinstance(node, ast.Constant):
            yield str(node.value)


def _choices(string: ast.JoinedStr, filled_in: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """For each piece of an f-string the texts that it may be."""
    found: list[Sequence[str]] = []
    for piece in string.values:
        if isinstance(piece, ast.FormattedValue):
            name = ast.unparse(piece.value)
            found.append(filled_in.get(name, [f"{{{name}}}"]))
        else:
            assert isinstance(piece, ast.Constant)
            found.append([str(piece.value)])
    return found


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted({path for pattern in READ for path in ROOT.glob(pattern) if path.is_file()}):
        yield str(path.relative_to(ROOT)), path.read_text()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for text in strings_of(path.read_text(), FILLED_IN):
                yield str(path.relative_to(ROOT)), text
