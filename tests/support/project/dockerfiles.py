"""Dockerfiles as data, for tests on machines that cannot build images.

In: a Dockerfile's text. Out: its stages with their instructions. Supports only the grammar that our
Dockerfiles use: comments, continued lines, and ARG before the first FROM, whose default replaces
`${NAME}` in each FROM. `in_context` applies .dockerignore.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "USER", "WORKDIR"}
_FROM = re.compile(r"(?P<image>\S+)(?: AS (?P<name>[a-z][a-z0-9-]*))?")


class Instruction(NamedTuple):
    word: str
    rest: str


class Stage(NamedTuple):
    name: str
    image: str
    instructions: tuple[Instruction, ...]

    def texts(self, word: str) -> list[str]:
        return [one.rest for one in self.instructions if one.word == word]


def stages_of(text: str) -> list[Stage]:
    """Return the stages. Raise ValueError for a line that is no instruction, and for an instruction
    other than ARG before the first FROM."""
    stages: list[Stage] = []
    defaults: dict[str, str] = {}
    for word, rest in _instructions(text):
        if word == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda one: defaults[one[1]], rest)
            match = _FROM.fullmatch(image)
            if match is None:
                raise ValueError(f"FROM {rest}")
            stages.append(Stage(match["name"] or "", match["image"], ()))
        elif not stages and word == "ARG":
            name, _, defaults[name] = rest.partition("=")
        elif not stages:
            raise ValueError(f"{word} before the first FROM")
        else:
            last = stages[-1]
            stages[-1] = last._replace(instructions=(*last.instructions, Instruction(word, rest)))
    return stages


def lineage(stages: list[Stage], stage: Stage) -> Iterator[Stage]:
    """Yield the stage, the stage that it is built from, and so on."""
    yield stage
    for one in stages:
        if one.name and one.name == stage.image:
            yield from lineage(stages, one)


def in_context(patterns: Iterable[str], path: str) -> bool:
    """Return whether a file is included to the builder. The last matching pattern decides."""
    included = True
    folders = [path[: slash.start()] for slash in re.finditer("/", path)]
    for pattern in patterns:
        glob = pattern.removeprefix("!").rstrip("/")
        anywhere = glob.startswith("**/")
        for candidate in [path, *folders]:
            name = candidate.rpartition("/")[2] if anywhere else candidate
            if fnmatch.fnmatchcase(name, glob.removeprefix("**/")):
                included = pattern.startswith("!")
    return included


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            if word not in KNOWN or not rest.strip():
                raise ValueError(f"no instruction: {line!r}")
            yield Instruction(word, rest.strip())
