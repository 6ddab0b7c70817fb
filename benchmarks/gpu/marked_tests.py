"""The tests that mean something on a card, as a part of `make gpu`.

In: the tests of kernels, which run on the card if there is one, and all tests that are marked
`gpu`. Out: a failed check per failed test, as soon as it failed, and a check with the counts per
run of pytest.

A run of pytest is a process with several workers: while one compiles kernels, others run theirs,
and a test that takes down its worker fails alone. The kernels' tests come first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.report_plugin import FILE, RUN

KERNELS = "tests/engine/kernels"
# They compile for cards that are not there, in minutes, or look at settings.
NOT_ON_A_CARD = ("test_kernels_compile.py", "test_kernel_choice.py")
# By what they tell: these first, the others in the order of their names.
FIRST = (
    *("test_norms.py", "test_activation.py", "test_rope_store.py", "test_store_kv.py"),
    *("test_paged_attention.py", "test_gumbel.py", "test_matmul.py", "test_decode_recorded.py"),
)
DRY = (f"{KERNELS}/test_activation.py",)
MARKED = re.compile(r'mark\.gpu\b|needs\("gpu"\)')
WORKERS, DRY_WORKERS = 8, 2
TEST_S = 60
NO_TESTS = 5  # pytest's exit status


def run(findings: Findings) -> None:
    files = DRY if findings.dry else kernel_files()
    _pytest(findings, "tests of kernels", [*files, "-m", "not long"])
    if not findings.dry:
        _pytest(findings, "tests marked gpu", [*marked_files(), "-m", "gpu and not long"])


def kernel_files() -> list[str]:
    names = [path.name for path in sorted((ROOT / KERNELS).glob("test_*.py"))]
    names = [name for name in names if name not in NOT_ON_A_CARD]
    ordered = sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return [f"{KERNELS}/{name}" for name in ordered]


def marked_files() -> list[str]:
    """The other files with a test marked gpu. pytest would load all tests to find them."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [str(path.relative_to(ROOT)) for path in found if MARKED.search(path.read_text())]
    return [name for name in names if not name.startswith(KERNELS)]


def _pytest(findings: Findings, name: str, selection: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pytest", *selection, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.gpu.report_plugin"]
    command += ["-n", str(DRY_WORKERS if findings.dry else WORKERS)]
    # A new warning of another torch or Python is no failure here. A worker that hangs in the
    # device ends only by the method `thread`.
    command += ["-W", "default", "--timeout", str(TEST_S), "--timeout-method", "thread"]
    environment = {**os.environ, FILE: str(findings.path.absolute()), RUN: name}
    environment["PYTEST_ADDOPTS"] = ""
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode not in (0, 1):
        note = "selected none" if done.returncode == NO_TESTS else f"exit {done.returncode}"
        findings.checked(f"{name}: pytest", False, note)
