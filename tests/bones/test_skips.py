"""What .ci/run says about skipped tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import needs as vocabulary
from tests.support.needs import NEEDS, Need, complaint, needs
from tests.support.skips import Skip, main, skips_of

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
    """A machine with `have`, that could get `could`, and can never have `never`."""
    words = {
        "have": Need(lambda: True, lambda: True, "a thing"),
        "could": Need(lambda: False, lambda: True, "a thing"),
        "never": Need(lambda: False, lambda: False, "a thing"),
    }
    monkeypatch.setattr(vocabulary, "NEEDS", words)


def report(folder: Path, reason: str) -> Path:
    path = folder / "report.xml"
    path.write_text(REPORT.format(reason))
    return path


def test_skips_are_read_from_the_report_and_expected_failures_are_none(tmp_path: Path) -> None:
    assert skips_of(report(tmp_path, "needs: gpu")) == [
        Skip("tests.a.test_x::test_one", "needs: gpu")
    ]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        ("needs: never", 0, ""),
        ("needs: have", 1, "this machine has a thing"),
        ("needs: could", 1, "this machine could have a thing"),
        ("needs: other", 1, "knows no such need"),
        ("no redis here", 1, "its reason does not begin with"),
    ],
)
def test_a_skip_is_accepted_only_for_what_the_machine_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: int, said: str
) -> None:
    assert main([str(report(tmp_path, reason))]) == code
    printed = capsys.readouterr().out
    assert f"skipped tests.a.test_x::test_one: {reason}" in printed
    assert said in printed


@pytest.mark.usefixtures("machine")
def test_a_test_is_skipped_with_a_reason_of_the_vocabulary() -> None:
    needs("have")
    with pytest.raises(pytest.skip.Exception) as skipped:
        needs("have", "never")
    assert complaint(str(skipped.value)) == ""


def test_every_need_can_be_asked_for_on_this_machine() -> None:
    for name, need in NEEDS.items():
        assert need.present() in (True, False), name
        assert need.obtainable() in (True, False), name
