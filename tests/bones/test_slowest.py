"""The times of test runs that .ci/run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project.slowest import SHOWN, main, run_of, slowest, totals

REPORT = """<testsuites><testsuite time="9.5">
<testcase classname="tests.a.test_x" name="test_one" time="4.0"/>
<testcase classname="tests.a.test_x" name="test_two[7]" time="1.5"><failure/></testcase>
<testcase classname="tests.a.test_x" name="test_two[7]" time="0.5"><error/></testcase>
<testcase classname="tests.b.test_y" name="test_three" time="5.0"/>
<testcase classname="tests.b.test_y" name="test_four" time="0.0">
  <skipped type="pytest.skip"/></testcase>
<testcase classname="tests.b.test_y" name="test_five" time="0.25">
  <skipped type="pytest.xfail"/></testcase>
</testsuite></testsuites>"""


def report(folder: Path, text: str) -> Path:
    path = folder / "test.xml"
    path.write_text(text)
    return path


def test_a_run_s_summary_counts_results_and_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(report(tmp_path, REPORT))
    assert main([path, path]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == ["test: 3 passed, 1 failed, 1 skipped in 10 s (11 worker-seconds)"] * 2


def test_tests_and_files_are_listed_by_time(tmp_path: Path) -> None:
    tests = run_of(report(tmp_path, REPORT)).tests
    assert slowest(tests)[:3] == [
        ("tests/b/test_y.py::test_three", 5.0),
        ("tests/a/test_x.py::test_one", 4.0),
        ("tests/a/test_x.py::test_two[7]", 2.0),
    ]
    assert totals(tests) == [("tests/a/test_x.py", 6.0), ("tests/b/test_y.py", 5.25)]


def test_only_the_slowest_of_many_tests_are_listed(tmp_path: Path) -> None:
    cases = "".join(
        f'<testcase classname="tests.a.test_x" name="test_{number}" time="{number}"/>'
        for number in range(SHOWN + 5)
    )
    tests = run_of(report(tmp_path, f"<testsuite>{cases}</testsuite>")).tests
    names = [name for name, _ in slowest(tests)]
    assert names == [f"tests/a/test_x.py::test_{SHOWN + 4 - place}" for place in range(SHOWN)]
