"""Formats findings: text for people, JSON for scripts."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import get_args

import msgspec

from baton_cli.doctor.finding import Finding, Severity

WIDTH = 100
INDENT = " " * 10


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps([msgspec.to_builtins(finding) for finding in findings], indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    return "\n".join(_lines(findings))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for check, group in groupby(findings, lambda finding: finding.check):
        yield check
        for finding in group:
            yield from _wrapped(f"  {finding.severity:<7} ", finding.found)
            if finding.severity == "ok":
                continue
            yield from _wrapped(f"{INDENT}why: ", finding.why)
            yield from _wrapped(f"{INDENT}do:  ", finding.remedy)
            # A command is one line, to copy it.
            yield from (f"{INDENT}     {command}" for command in finding.commands)
    counts = Counter(finding.severity for finding in findings)
    order = reversed(get_args(Severity))
    yield ", ".join(_counted(counts[severity], severity) for severity in order)


def _counted(count: int, severity: Severity) -> str:
    return f"{count} {severity}" + "s" * (count != 1 and severity != "ok")


def _wrapped(head: str, text: str) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        text,
        width=WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
