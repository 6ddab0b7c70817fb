"""The results of `make gpu` as files: JSON to compute with, Markdown to read.

In: the outcomes of the parts. Out: `<card>-<date>.json` and `.md` in a folder; and the newest
results of a folder, which the documents quote.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Finding
from benchmarks.gpu.parts import CARD
from benchmarks.gpu.processes import ROOT, Outcome

COMMITTED = ROOT / "benchmarks" / "results" / "gpu"
HEAD = "| part | state | time | checks passed |\n|---|---|---|---|"
FINDINGS_HEAD = "| what | value | share | of | check | note |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`date` is in UTC; `card` is the card's name, "dry" of a dry run."""

    card: str
    date: str
    parts: Sequence[Outcome] = ()

    def with_part(self, outcome: Outcome) -> Results:
        """The results with another part; `card` names the card."""
        names = [each.note for each in outcome.findings if each.name == CARD and each.note]
        card = names[0] if names and outcome.name == CARD else self.card
        return replace(self, card=card, parts=[*self.parts, outcome])

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)

    @property
    def file_name(self) -> str:
        words = re.findall("[a-z0-9]+", f"{self.card} {self.date}".lower())
        return "-".join(words)

    def part(self, name: str) -> Outcome | None:
        return next((part for part in self.parts if part.name == name), None)

    def measured(self, name: str) -> dict[str, Finding]:
        """The measurements of a part by name."""
        part = self.part(name)
        findings = part.findings if part else ()
        return {each.name: each for each in findings if each.value is not None}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        path.with_suffix(".md").write_text(f"# {self.card}, {self.date}\n\n{self.table()}")

    def table(self) -> str:
        """All findings of all parts, then a line per part."""
        sections = [
            f"## {part.name}: {part.state}\n\n{FINDINGS_HEAD}\n{finding_rows(part.findings)}\n"
            for part in self.parts
        ]
        rows = "\n".join(part_row(part) for part in self.parts)
        return "\n".join([*sections, f"{HEAD}\n{rows}\n"])


def now() -> str:
    return time.strftime("%Y-%m-%d-%H%M", time.gmtime())


def part_row(part: Outcome) -> str:
    checks = [each.passed for each in part.findings if each.passed is not None]
    passed = f"{sum(checks)} of {len(checks)}"
    return _row(part.name, part.state, f"{part.seconds:.0f} s", passed)


def finding_rows(findings: Sequence[Finding]) -> str:
    """A row per name: a check and a measurement of one name, one after the other, share a row."""
    shown: list[Finding] = []
    for each in findings:
        last = shown[-1] if shown else None
        if last and last.name == each.name and last.value is None and each.passed is None:
            note = "; ".join(filter(None, (last.note, each.note)))
            shown[-1] = replace(each, passed=last.passed, note=note)
        else:
            shown.append(each)
    return "\n".join(
        _row(
            each.name,
            "" if each.value is None else f"{number(each.value)} {each.unit}".strip(),
            "" if each.share is None else share(each),
            each.of,
            {None: "", True: "passed", False: "**FAILED**"}[each.passed],
            each.note,
        )
        for each in shown
    )


def number(value: float) -> str:
    """Three digits; whole numbers from 100 on, with separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(finding: Finding) -> str:
    """In percent up to two times the bound, then as a factor."""
    assert finding.share is not None
    return f"{finding.share:.0%}" if finding.share < 2 else f"{finding.share:.3g}x"


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(each.split()).replace('|', '/') for each in cells)} |"


def load(path: Path) -> Results:
    record: dict[str, Any] = json.loads(path.read_text())
    parts = [
        Outcome(**{**part, "findings": [Finding(**each) for each in part["findings"]]})
        for part in record["parts"]
    ]
    return Results(card=record["card"], date=record["date"], parts=parts)


def newest(folder: Path = COMMITTED) -> Results | None:
    """The newest results in a folder; None if no card has been measured."""
    found = [load(path) for path in folder.glob("*.json")]
    return max(found, key=lambda each: each.date, default=None)
