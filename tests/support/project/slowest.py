"""Print how test runs spent their time: counts, the slowest tests, the slowest files.

In: JUnit files that pytest wrote, one per run. Out: lines on stdout. A test's time includes its
setup and teardown. The setup of a shared fixture counts for the first of its tests, its teardown
for the last.
Used by .ci/run: `python -m tests.support.project.slowest REPORT...`.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

SHOWN = 30
Outcome = Literal["passed", "failed", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "skipped")


class Test(NamedTuple):
    """`file` is the module's path, `name` the function's name with its parameters."""

    file: str
    name: str
    seconds: float
    outcome: Outcome


class Run(NamedTuple):
    """`wall_s` is the run's wall-clock time with all its workers."""

    name: str
    wall_s: float
    tests: list[Test]

    def __str__(self) -> str:
        counts = Counter(test.outcome for test in self.tests)
        outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        worker_s = sum(test.seconds for test in self.tests)
        return f"{self.name}: {outcomes} in {self.wall_s:.0f} s ({worker_s:.0f} worker-seconds)"


def run_of(report: Path) -> Run:
    """Read one JUnit file. An expected failure counts as passed."""
    root = xml.parse(report).getroot()
    tests: dict[tuple[str, str], Test] = {}
    for case in root.iter("testcase"):
        file = (case.get("classname") or "unknown").replace(".", "/") + ".py"
        name = case.get("name") or "unknown"
        test = Test(file, name, float(case.get("time") or 0), _outcome_of(case))
        # pytest writes a test whose call and teardown both failed as two cases.
        before = tests.get((file, name))
        if before is not None:
            test = before._replace(seconds=before.seconds + test.seconds, outcome="failed")
        tests[file, name] = test
    wall_s = sum(float(suite.get("time") or 0) for suite in root.iter("testsuite"))
    return Run(report.stem, wall_s, list(tests.values()))


def slowest(tests: Iterable[Test]) -> list[tuple[str, float]]:
    """Return the names and seconds of the slowest tests, slowest first."""
    return _longest((f"{test.file}::{test.name}", test.seconds) for test in tests)[:SHOWN]


def totals(tests: Iterable[Test]) -> list[tuple[str, float]]:
    """Return the slowest files with the total seconds of their tests, slowest first."""
    seconds: dict[str, float] = defaultdict(float)
    for test in tests:
        seconds[test.file] += test.seconds
    return _longest(seconds.items())[:SHOWN]


def _longest(timed: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(timed, key=lambda one: -one[1])


def _outcome_of(case: xml.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    return "passed" if skipped is None or skipped.get("type") == "pytest.xfail" else "skipped"


def main(reports: Sequence[str]) -> int:
    runs = [run_of(Path(report)) for report in reports]
    tests = [test for run in runs for test in run.tests]
    for title, timed in (("slowest tests", slowest(tests)), ("time by file", totals(tests))):
        print(f"{title}:")
        for name, seconds in timed:
            print(f"{seconds:8.1f} s  {name}")
    for run in runs:
        print(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
