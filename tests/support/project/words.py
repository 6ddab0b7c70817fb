"""Finds odd phrases, for which plain English has better words.

    python -m tests.support.project.words      a line per finding; exit code 1 if there is any

In: tracked Python files, Markdown, and the chart with its CRDs. Out: findings, each with the words
to use instead. Phrases are searched in text of any kind, across line ends, and in the words of long
Python names, which read as sentences.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FILES = ("*.py", "*.md", "charts/*")
OWN = {"tests/support/project/words.py", "tests/bones/test_words.py"}
LONG = 4  # words of a name that is read as a sentence

# Phrases, as regular expressions whose spaces stand for any white space -> what to write.
PHRASES: Mapping[str, str] = {
    r"begins? anew|began anew|begun anew|anew": "again",
    r"(?:is|are|was|were|be|been|being) told(?! (?:apart|from))": "receives, learns",
    r"(?:the )?same words": "the same request, message",
    r"(?:is|are|was) no news": "changes nothing",
    r"go(?:es)? by": "uses, follows",
    r"takes the one that": "chooses",
    r"for want of": "because ... is short",
    r"not much is to be": "say what happens",
    r"that are too many": "excess",
    r"who (?:waits|asks|comes|goes|left|leaves)": "a request that waits, a client that asks",
    r"whoever": "any client, any node, a user who",
    r"what came": "the result, the chunks",
    r"what there is|all that there is": "existing, all",
    r"as good as": "almost, equivalent to",
    r"(?:is|are) to be (?:said|told|had|hoped)": "say it with a subject",
    r"for ever": "forever",
    r"(?:hear|hears|heard) of": "learns of, receives",
    r"so (?:many|much|long)(?! (?:as|that))": "the number, or `this long`",
    r"stands? still|stood still": "stalls, hangs, is frozen",
    r"mended|mends": "repaired, fixed",
    r"what is so|it is so": "say what is true",
    r"nothing (?:is|was) (?:said|heard)": "no report",
}
_GAP = r"""[\s#"']+"""
_PHRASES = {
    re.compile(rf"\b(?:{phrase.replace(' ', _GAP)})\b", re.IGNORECASE): better
    for phrase, better in PHRASES.items()
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Finding(NamedTuple):
    """A phrase on a line (from 1) of a file, and what to write."""

    file: str
    line: int
    words: str
    better: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.better}"


def findings(file: str, text: str) -> Iterator[Finding]:
    """Every odd phrase of a file, in the order of the table; then those of its long names."""
    yield from _phrases_of(file, text)
    if file.endswith(".py"):
        yield from _names_of(file, text)


def _phrases_of(file: str, text: str) -> Iterator[Finding]:
    for pattern, better in _PHRASES.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Finding(file, line, " ".join(match[0].split()), better)


def _names_of(file: str, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = _WORD.findall(token.string) if token.type == tokenize.NAME else []
        if len(words) >= LONG:
            for finding in _phrases_of(file, " ".join(words)):
                yield finding._replace(line=token.start[0], words=token.string)


def tracked() -> list[str]:
    """The files to read, relative to the repository."""
    command = ["git", "ls-files", "--", *FILES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if name not in OWN]


def main() -> int:
    lines = [line for name in tracked() for line in findings(name, (ROOT / name).read_text())]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
