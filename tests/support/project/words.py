"""Finds retired words: private names and odd phrases that plain English has replaced.

    python -m tests.support.project.words      a line per finding; exit code 1 if there is any

In: tracked Python files, Markdown, and the chart with its CRDs. Out: findings, each with the words
to use instead. A name of Python is split into its words (`told`, `_told` and `ToldNode` all contain
`told`). Phrases are searched in text of any kind, across line ends, and in long Python names.
"""

from __future__ import annotations

import ast
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

# Words of Python names -> what the project calls it. In prose these words are fine.
NAMES: Mapping[str, str] = {
    "asker": "poller",
    "chores": "maintenance",
    "crew": "workers",
    "desk": "loop",
    "flights": "in_flight",
    "hearing": "listener",
    "heir": "successor",
    "ledger": "state",
    "lot": "fetcher",
    "misbehaved": "violation",
    "outbox": "output",
    "roster": "nodes, running requests",
    "said": "message, reason",
    "stash": "early announcements",
    "stories": "records",
    "story": "record",
    "told": "response, received messages",
    "untaken": "unacknowledged",
    "ward": "guarded server",
    "weigher": "chooser",
    "wish": "wanted",
    "wished": "wanted",
    "wishes": "wanted",
}
# Names that no class may have, because they say nothing about what the class is.
CLASSES = re.compile(
    r"Asked|Bans|Bodies|Chores|Chosen|Circuit|Crew|Drains|Drawn|EachTime|"
    r"Explanations|Flight|Flights|Gathered|Hearing|Indexing|Kept|Leave|Ledger|Listed|"
    r"Look|Lot|Misbehaved|Miss|OnItsWay|Outbox|Pages|Pairs|Places|Prices|Puts|"
    r"Reporting|Roster|Said|Shares|Siblings|Stash|Story|Taken|Told|Trail|Untaken|"
    r"Waits|Ward|Weigher|Wish|Wished"
)
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
    """Retired words on a line (from 1) of a file, and what to write."""

    file: str
    line: int
    words: str
    better: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.better}"


def findings(file: str, text: str) -> Iterator[Finding]:
    """Every retired word of a file, in the order of the tables."""
    yield from _phrases_of(file, text)
    if file.endswith(".py"):
        yield from _names_of(file, text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and CLASSES.fullmatch(node.name.lstrip("_")):
                better = "a class name that says what it is"
                yield Finding(file, node.lineno, f"class {node.name}", better)


def _phrases_of(file: str, text: str) -> Iterator[Finding]:
    for pattern, better in _PHRASES.items():
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield Finding(file, line, " ".join(found[0].split()), better)


def _names_of(file: str, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NAME:
            continue
        words = [word.lower() for word in _WORD.findall(token.string)]
        for word in words:
            if word in NAMES:
                yield Finding(file, token.start[0], token.string, NAMES[word])
        if len(words) >= LONG:
            for finding in _phrases_of(file, " ".join(words)):
                yield finding._replace(line=token.start[0], words=token.string)


def tracked() -> list[str]:
    """The files to read, relative to the repository."""
    command = ["git", "ls-files", "--", *FILES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if name not in OWN]


def main() -> int:
    found = [one for name in tracked() for one in findings(name, (ROOT / name).read_text())]
    for one in found:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
