"""How .ci/run judges skipped tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs as vocabulary
from tests.support.needs import NEEDS, Need, complaint, needs
from tests.support.project.skips import Skip, main, skips_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_one">
  <skipped type="pytest.skip" message="{}"/>
</testcase>
<testcase classname="tests.a.test_x" name="test_two">
  <skipped type="pytest.xfail" message="?"/>
</testcase>
<testcase classname="tests.a.test_x" name="test_three"/>
</testsuite></testsuites>"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has `have`, could install `could`, and can never have `never`."""
    needs_by_name = {
        "have": Need(lambda: True, lambda: True, "a thing"),
        "could": Need(lambda: False, lambda: True, "a thing"),
        "never": Need(lambda: False, lambda: False, "a thing"),
    }
    monkeypatch.setattr(vocabulary, "NEEDS", needs_by_name)


def report(folder: Path, reason: str) -> Path:
    path = folder / "report.xml"
    path.write_text(REPORT.format(reason))
    return path


def test_expected_failures_in_a_report_are_no_skips(tmp_path: Path) -> None:
    assert skips_of(report(tmp_path, "needs: gpu")) == [
        Skip("tests.a.test_x::test_one", "needs: gpu")
    ]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        ("needs: never", 0, ""),
        ("needs: have", 1, "this machine has a thing"),
        ("needs: could", 1, "this machine could have a thing"),
        ("needs: other", 1, "knows no such need"),
        ("no redis here", 1, "its reason does not begin with"),
    ],
)
def test_a_skip_is_accepted_only_for_a_need_that_the_machine_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: int, message: str
) -> None:
    assert main([str(report(tmp_path, reason))]) == code
    printed = capsys.readouterr().out
    assert f"skipped tests.a.test_x::test_one: {reason}" in printed
    assert message in printed


@pytest.mark.usefixtures("machine")
def test_needs_skips_a_test_with_an_accepted_reason() -> None:
    needs("have")
    with pytest.raises(pytest.skip.Exception) as skipped:
        needs("have", "never")
    assert complaint(str(skipped.value)) == ""


# Without a network, pip gives up only after half a minute.
SLOW = "registry"


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == SLOW else ()) for name in NEEDS]
)
def test_every_need_can_be_checked_on_this_machine(name: str) -> None:
    assert NEEDS[name].present() in (True, False)
    assert NEEDS[name].obtainable() in (True, False)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("version", "present"), [("v18.20.4", "False"), ("v20.19.0", "True"), ("v22.1.0", "True")]
)
def test_npm_counts_only_with_a_node_js_version_that_runs_the_linters(
    tmp_path: Path, version: str, present: str
) -> None:
    for name in ("node", "npm"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    question = "from tests.support.needs import NEEDS; print(NEEDS['npm'].present())"
    done = subprocess.run(
        [sys.executable, "-c", question],
        env={"PATH": str(tmp_path)},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == present
