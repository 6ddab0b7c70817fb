"""What failed beside others on a busy machine runs once more, alone, where that is fair.

In: JUnit files that pytest wrote. Out: lines on stdout; exit code 0 where each failure passed
alone. Used by .ci/run: `python -m tests.support.project.again REPORT...`.

Tests of whole processes wait on a real clock, and a machine that stands still for seconds makes a
wait run out, or an event come before the one that was to be first. Run alone such a test passes,
and is named here with what it said. It is not fair to run a test again

- that compared an answer: a wrong or lost token is wrong however busy the machine was;
- of one process's own code: it does not depend on the machine;
- beside several others: then something is broken.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Of tests of whole processes: folders, and files among others.
ROUTERS = ("crowd", "fuzz", "markers", "process", "schema_fuzz", "several", "workers")
PROCESSES = (
    *("tests/cli/", "tests/cluster/", "tests/e2e/", "tests/faults/"),
    *(f"tests/router/test_router_{name}.py" for name in ROUTERS),
)
AT_MOST = 3
# pytest puts the line that failed behind ">", and what it says behind "E".
FAILED_LINE = re.compile(r"^>\s+(.*)$", re.MULTILINE)
SAID = re.compile(r"^E\s+(.*)$", re.MULTILINE)
OF_ANSWERS = re.compile(
    r"\b(answers?|calm|check_begins|choices|ids|rights?|text|told|tokens?|whole)\b"
)


class Failure(NamedTuple):
    """`test` as pytest takes it; `lines` are the ones that failed, from the test's on inwards."""

    test: str
    lines: tuple[str, ...]
    said: str

    @property
    def unfair(self) -> str:
        """Why it may not run again; "" where it may."""
        if not self.lines:
            return "it says not where it failed"
        if not self.test.startswith(PROCESSES):
            return "it does not depend on the machine"
        if any(OF_ANSWERS.search(line) for line in self.lines):
            return "it compared an answer"
        return ""


def failures_of(report: Path) -> list[Failure]:
    """Each test of one JUnit file that failed, or whose fixtures did."""
    found: dict[str, Failure] = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            module = (case.get("classname") or "unknown").replace(".", "/")
            test = f"{module}.py::{case.get('name')}"
            text = problem.text or ""
            said = SAID.search(text)
            lines = (*FAILED_LINE.findall(text), *(found[test].lines if test in found else ()))
            found[test] = Failure(test, lines, said[1] if said else problem.get("message") or "")
    return list(found.values())


def main(reports: Sequence[str]) -> int:
    failures = [each for report in reports for each in failures_of(Path(report))]
    for each in failures:
        print(f"failed {each.test}: {each.said}" + (f" -- {each.unfair}" if each.unfair else ""))
    if not failures or len(failures) > AT_MOST or any(each.unfair for each in failures):
        print(f"{len(failures)} failed; nothing is run again")
        return 1
    tests = [each.test for each in failures]
    code = subprocess.run([sys.executable, "-m", "pytest", *tests], check=False).returncode
    for test in tests:
        print(f"{test}: failed beside others; " + ("failed again" if code else "passed alone"))
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
