"""A plugin of pytest: writes failed tests as findings of `make gpu` at once.

In: the findings' file and the run's name, as variables of the environment. Out: a failed check per
failed test, and a check with the counts at the end. Of several workers, only the process that
collects their reports writes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu.findings import Findings

FILE, RUN = "BATON_GPU_FINDINGS", "BATON_GPU_RUN"


class Reporter:
    def __init__(self, findings: Findings, run: str) -> None:
        self._findings, self._run = findings, run
        self._counts: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            lines = str(report.longrepr).splitlines() or [""]
            errors = [line[1:].strip() for line in lines if line.startswith("E ")]
            self._findings.checked(report.nodeid, False, (errors or lines[-1:])[0][:300])
        elif report.skipped or report.when == "call":
            self._counts["skipped" if report.skipped else "passed"] += 1

    def pytest_sessionfinish(self) -> None:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(self._counts.items()))
        took = time.monotonic() - self._began
        passed = self._counts["failed"] == 0 and self._counts["passed"] > 0
        self._findings.checked(self._run, passed, f"{counts}; {took:.0f} s")


def pytest_configure(config: pytest.Config) -> None:
    if FILE in os.environ and not hasattr(config, "workerinput"):
        import torch  # after conftest.py, which sets variables that torch reads

        findings = Findings(
            path=Path(os.environ[FILE]), device=torch.device("cpu"), dry=False, deadline=0.0
        )
        config.pluginmanager.register(Reporter(findings, os.environ[RUN]))
