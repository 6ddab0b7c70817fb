"""Which failures .ci/run gives another try, and what becomes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from tests.support.project.again import Failure, failures_of, main

LATE = '>       assert load.busy, "nobody was there"\nE       AssertionError: nobody was there\n'
WRONG = ">       assert told.ids == [1, 2]\nE       assert [1, 3] == [1, 2]\n"
INNER = (
    ">       check(load)\n\n>           assert said.ids == full.ids\nE           assert 1 == 2\n"
)


def report(folder: Path, *cases: tuple[str, str]) -> Path:
    parts = "".join(
        f'<testcase classname="tests.{room}.test_x" name="test_{index}">'
        f'<failure message="?">{escape(text)}</failure></testcase>'
        for index, (room, text) in enumerate(cases)
    )
    path = folder / "report.xml"
    path.write_text(
        f"<testsuites><testsuite>{parts}"
        '<testcase classname="tests.e2e.test_y" name="test_good"/></testsuite></testsuites>'
    )
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pytest is asked to run; all of it passes but what is called test_1."""
    asked: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        tests = [word for word in words if "::" in word]
        asked.append(tests)
        bad = any(test.endswith("test_1") for test in tests)
        return subprocess.CompletedProcess(words, 1 if bad else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_failures_are_read_with_the_lines_that_failed(tmp_path: Path) -> None:
    path = report(tmp_path, ("cluster", LATE))
    assert failures_of(path) == [
        Failure(
            "tests/cluster/test_x.py::test_0",
            ('assert load.busy, "nobody was there"',),
            "AssertionError: nobody was there",
        )
    ]


def test_what_passes_alone_is_named_and_fails_nothing(
    tmp_path: Path, runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(report(tmp_path, ("faults", LATE)))]) == 0
    assert runs == [["tests/faults/test_x.py::test_0"]]
    assert "test_0: failed beside others; passed alone" in capsys.readouterr().out


def test_what_fails_alone_too_fails(tmp_path: Path, runs: list[list[str]]) -> None:
    assert main([str(report(tmp_path, ("e2e", LATE), ("e2e", LATE)))]) == 1
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ([("cluster", WRONG)], "it compared an answer"),
        ([("cluster", INNER)], "it compared an answer"),
        ([("engine", LATE)], "it does not depend on the machine"),
        ([("cluster", "worker gw0 crashed")], "it says not where it failed"),
        ([("cluster", LATE), ("cli", WRONG)], "it compared an answer"),
        ([("cluster", LATE)] * 4, "4 failed; nothing is run again"),
        ([], "0 failed; nothing is run again"),
    ],
)
def test_what_may_not_run_again_fails(
    tmp_path: Path,
    runs: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    cases: list[tuple[str, str]],
    why: str,
) -> None:
    assert main([str(report(tmp_path, *cases))]) == 1
    assert why in capsys.readouterr().out
    assert not runs
