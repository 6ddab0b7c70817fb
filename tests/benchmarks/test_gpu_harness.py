"""`make gpu`: a part that hangs, dies or raises loses only itself; what it had found is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu.findings import Finding, Findings, begun, read
from benchmarks.gpu.harness import NOT_STARTED, main, run_all
from benchmarks.gpu.parts import CARD, PARTS, Part
from benchmarks.gpu.processes import ENDED, INTERRUPTED, ROOT, Outcome
from benchmarks.gpu.results import Results, load, newest
from tests.support.waiting import until

# The hanging part's share of this is a second; the rest is for imports on a busy machine.
BUDGET_S = 240
FAKES = {
    "card": """
        def run(findings):
            findings.measured("copy bandwidth", 3000.0, "GB/s")
    """,
    "hangs": """
        import os, subprocess, time

        def run(findings):
            # A child in a session of its own, and one whose parent has ended.
            own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            shell = subprocess.run(
                ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True
            )
            for pid in (own.pid, int(shell.stdout), os.getpid()):
                findings.measured("pid", pid, "")
            time.sleep(1000)
    """,
    "dies at once": """
        import os, signal

        os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "never imported": """
        import time

        time.sleep(1000)
    """,
    "raises": """
        def run(findings):
            findings.checked("before", True)
            raise ValueError("no such kernel")
    """,
    "dies in a row": """
        import os, signal

        def run(findings):
            for row in ("first", "second", "third"):
                if findings.first_try(row):
                    if row == "second":
                        os.kill(os.getpid(), signal.SIGKILL)
                    findings.checked(row, True)
    """,
    "last": """
        def run(findings):
            findings.measured("ceiling", findings.ceilings["copy bandwidth"], "GB/s")
            findings.checked("on a CPU", findings.device.type == "cpu" and findings.dry)
    """,
}
# What the parts' processes have in place of torch, whose import would take most of their time.
TORCH = """
    class device:
        def __init__(self, type):
            self.type = type
"""


def parts_of(names: Mapping[str, float]) -> list[Part]:
    return [
        Part(name=name, module=f"fake_{name.replace(' ', '_')}", seconds=seconds, tells=name)
        for name, seconds in names.items()
    ]


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fakes")
    for name, source in FAKES.items():
        path = folder / f"fake_{name.replace(' ', '_')}.py"
        path.write_text(textwrap.dedent(source))
    (folder / "torch.py").write_text(textwrap.dedent(TORCH))
    return folder


@dataclass
class Run:
    status: int
    results: Results
    printed: str
    written: list[Path]

    def part(self, name: str) -> Outcome:
        found = self.results.part(name)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def run(fakes: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All fake parts, one after the other."""
    out = tmp_path_factory.mktemp("out")
    names = [name for name in FAKES if name != "never imported"]
    parts = parts_of({name: 1 if name == "hangs" else 50 for name in names})
    printed = out / "printed"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        before = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(fakes), before))))
        patch.setattr("sys.stdout", file)
        status = main(["--dry", "--budget", str(BUDGET_S), "--out", str(out / "results")], parts)
    written = sorted((out / "results").iterdir())
    [path] = [path for path in written if path.suffix == ".json"]
    return Run(status, load(path), printed.read_text(), written)


def names_of(outcome: Outcome) -> list[str]:
    return [each.name for each in outcome.findings]


@pytest.mark.integration
def test_a_part_that_hangs_is_killed_and_keeps_what_it_found(run: Run) -> None:
    assert run.part("hangs").state.startswith("killed after ")
    assert names_of(run.part("hangs")) == ["pid"] * 3


@pytest.mark.integration
def test_everything_that_a_killed_part_started_is_gone(run: Run) -> None:
    pids = [int(each.value or 0) for each in run.part("hangs").findings]
    assert len(pids) == 3
    assert [pid for pid in pids if pid <= 0 or _alive(pid)] == []


def _alive(pid: int) -> bool:
    """Whether a process runs. One that nobody waited for yet is a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.integration
def test_the_state_says_what_ended_a_part(run: Run) -> None:
    assert run.part("dies at once").state == "signal 11"
    assert run.part("raises").state == "exit 1: ValueError: no such kernel"
    assert names_of(run.part("raises")) == ["before"]


@pytest.mark.integration
def test_a_part_that_dies_in_a_row_goes_on_behind_it(run: Run) -> None:
    outcome = run.part("dies in a row")
    assert outcome.state == ENDED
    assert names_of(outcome) == ["first", "third", "second"]
    assert outcome.findings[-1].passed is False
    assert outcome.findings[-1].note == "its process died: signal 9"


@pytest.mark.integration
def test_a_part_behind_them_runs_and_knows_what_the_card_can_do(run: Run) -> None:
    last = run.part("last")
    assert last.passed
    assert last.findings[0].value == 3000.0


@pytest.mark.integration
def test_one_bad_part_makes_the_exit_status_1_and_the_table_says_how_each_ended(run: Run) -> None:
    assert run.status == 1
    lines = run.printed.splitlines()
    first = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    names = [part.name for part in run.results.parts]
    assert first[: 1 + len(names)] == ["| part", *(f"| {name}" for name in names)]
    states = [line.split(" | ")[1] for line in lines if line.startswith("| ")]
    assert states[-len(names) :] == [part.state for part in run.results.parts]
    assert [path.suffix for path in run.written] == [".json", ".log", ".md"]
    assert "ValueError: no such kernel" in run.written[1].read_text()


@pytest.mark.integration
async def test_a_run_that_is_stopped_ends_its_part_and_writes_what_was_found(
    fakes: Path, tmp_path: Path
) -> None:
    names = parts_of({"never imported": 1.0, "last": 1.0})
    script = f"""
import sys
from benchmarks.gpu.harness import main
from benchmarks.gpu.parts import Part
sys.exit(main(sys.argv[1:], {names!r}))
"""
    path = os.pathsep.join((str(fakes), str(ROOT), os.environ.get("PYTHONPATH", "")))
    run = subprocess.Popen(
        [sys.executable, "-c", script, "--dry", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    await until(lambda: psutil.Process(run.pid).children())
    [part] = psutil.Process(run.pid).children()
    run.terminate()
    assert "| never imported | interrupted |" in run.communicate(timeout=240)[0]
    assert run.returncode == 1
    assert not _alive(part.pid)
    [written] = tmp_path.glob("*.json")
    assert [each.state for each in load(written).parts] == [INTERRUPTED]


@pytest.mark.integration
def test_what_an_unending_part_gets_is_bounded_by_the_budget(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    parts = parts_of({"never imported": 1.0, "last": 0.0})
    hanging, last = run_all(parts, tmp_path, budget=6.0, dry=True)
    assert hanging.state.startswith("killed after ")
    assert hanging.seconds < 60
    assert last.state == NOT_STARTED


def test_without_time_no_part_is_started_and_the_exit_status_is_1(tmp_path: Path) -> None:
    assert main(["--dry", "--budget", "0", "--out", str(tmp_path)], PARTS) == 1
    [path] = tmp_path.glob("*.json")
    assert [part["state"] for part in json.loads(path.read_text())["parts"]] == [NOT_STARTED] * len(
        PARTS
    )


def test_the_part_card_comes_first_and_names_are_unique() -> None:
    names = [part.name for part in PARTS]
    assert names[0] == CARD
    assert len(set(names)) == len(names)


def findings_in(path: Path) -> Findings:
    return Findings(path=path, device=torch.device("cpu"), dry=True, deadline=0.0)


def test_an_exception_of_an_attempt_is_a_failed_check(tmp_path: Path) -> None:
    findings = findings_in(tmp_path / "part.jsonl")
    with findings.attempt("division"):
        findings.measured("before", 1.0, "us")
        raise ZeroDivisionError("by zero")
    assert read(findings.path) == [
        Finding(name="before", value=1.0, unit="us"),
        Finding(name="division", passed=False, note="ZeroDivisionError: by zero"),
    ]


def test_a_line_that_was_not_finished_is_dropped(tmp_path: Path) -> None:
    findings = findings_in(tmp_path / "part.jsonl")
    findings.first_try("a row")
    findings.checked("whole", True)
    with findings.path.open("a") as file:
        file.write('{"name": "ha')
    assert read(findings.path) == [Finding(name="whole", passed=True)]
    assert begun(findings.path) == ["a row"]
    assert not findings.first_try("a row")


def outcome_of(*findings: Finding, name: str = "kernels", state: str = ENDED) -> Outcome:
    return Outcome(name=name, state=state, seconds=7.0, findings=list(findings))


def test_the_newest_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    older = Results(card="unknown card", date="2026-11-01-0900")
    named = older.with_part(outcome_of(Finding(name=CARD, note="NVIDIA H100 80GB"), name=CARD))
    later = Results(card="A card", date="2026-11-02-0800").with_part(
        outcome_of(Finding(name="speed", value=1.5, unit="us", share=0.5, of="bytes"))
    )
    assert named.file_name == "nvidia-h100-80gb-2026-11-01-0900"
    for each in (later, named):
        each.write(tmp_path)
    assert newest(tmp_path) == load(tmp_path / f"{later.file_name}.json") == later
    assert later.measured("kernels")["speed"].share == 0.5


def test_a_check_and_a_measurement_of_one_name_share_a_row_of_the_table() -> None:
    part = outcome_of(
        Finding(name="draw", passed=True),
        Finding(name="draw", value=1234.5, unit="us", share=0.61, of="copy bandwidth", note="a|b"),
        Finding(name="store", passed=False, note="result 0"),
    )
    table = Results(card="c", date="d", parts=[part]).table()
    assert "| draw | 1,234 us | 61% | copy bandwidth | passed | a/b |" in table
    assert "| store |  |  |  | **FAILED** | result 0 |" in table
    assert table.endswith("| kernels | ended | 7 s | 1 of 2 |\n")
    assert not part.passed
