"""`make gpu DRY=1`: the same code without a card. All parts run in `make test-long`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.parts import CARD, PARTS
from benchmarks.gpu.processes import ENDED, ROOT
from benchmarks.gpu.results import Results, load
from tests.support.needs import needs

# Far more than it takes: a dry run ends by itself.
END_S = 3600.0


def dry_run(out: Path, names: Sequence[str]) -> Results:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(out)]
    done = subprocess.run(
        [*command, "--parts", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.json")
    return load(path)


@pytest.mark.integration
def test_the_part_card_measures_a_ceiling_for_the_others(tmp_path: Path) -> None:
    results = dry_run(tmp_path, [CARD])
    assert results.card == "dry"
    assert results.measured(CARD)["copy bandwidth"].value


@pytest.mark.long
@pytest.mark.timeout(END_S)
def test_every_part_ends_and_passes_its_checks(tmp_path: Path) -> None:
    results = dry_run(tmp_path, [part.name for part in PARTS])
    assert [(part.name, part.state) for part in results.parts] == [
        (part.name, ENDED) for part in PARTS
    ]
    assert all(part.findings for part in results.parts)


@pytest.mark.integration
def test_make_bench_runs_no_part_of_make_gpu() -> None:
    needs("make")

    def planned(*words: str) -> str:
        command = ["make", "--dry-run", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    bench = planned("bench")
    assert "benchmarks.engine.cpu" in bench
    assert "benchmarks.gpu" not in bench
    assert "-m benchmarks.gpu --dry" in planned("gpu", "DRY=1")
