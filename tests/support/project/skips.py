"""Print each skipped test with its reason; fail if it should have run on this machine.

In: JUnit files that pytest wrote. Out: lines on stdout; exit code 1 if a skip is not accepted.
Used by .ci/run: `python -m tests.support.project.skips REPORT...`.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.needs import complaint


class Skip(NamedTuple):
    test: str
    reason: str


def skips_of(report: Path) -> list[Skip]:
    """The skipped tests of one JUnit file. An expected failure is not a skip."""
    skips = []
    for case in xml.parse(report).getroot().iter("testcase"):
        for skipped in case.iter("skipped"):
            if skipped.get("type") != "pytest.xfail":
                name = f"{case.get('classname')}::{case.get('name')}"
                skips.append(Skip(name, skipped.get("message") or "no reason"))
    return skips


def main(reports: Sequence[str]) -> int:
    skips = [skip for report in reports for skip in skips_of(Path(report))]
    refused = 0
    for skip in skips:
        problem = complaint(skip.reason)
        refused += bool(problem)
        print(f"skipped {skip.test}: {skip.reason}" + (f" -- but {problem}" if problem else ""))
    print(f"{len(skips)} skipped, {refused} of them should have run here")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
