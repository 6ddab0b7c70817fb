"""Linters of OpenAPI documents, from npm: Redocly's and Stoplight's Spectral.

In: tests/cluster/lint, which pins every package of both by its digest and holds their rules. Out:
their programs in the user's cache, installed once, and what they say of a document.
`npm install --package-lock-only --omit-lockfile-registry-resolved` writes the lock anew; `funding`,
which holds addresses, is left out.

`make lint-tools` installs them and says so; a test that comes first does it itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.needs import NEEDS
from tests.support.project.cache import made_once

CONFIG = Path(__file__).resolve().parents[2] / "cluster" / "lint"
PINNED = ("package.json", "package-lock.json")
# No call home, and no word about newer versions.
QUIET = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "NO_COLOR": "1"}
INSTALL_S, LINT_S = 600.0, 300.0
# The rules' files, and how each program is told to count a warning as a failure.
LINTERS = {
    "redocly": ("lint", f"--config={CONFIG / 'redocly.yaml'}", "--format=stylish"),
    "spectral": ("lint", f"--ruleset={CONFIG / 'spectral.yaml'}", "--fail-severity=hint"),
}


def programs() -> Path:
    """The folder with the linters' programs."""
    digest = hashlib.sha256(b"".join((CONFIG / name).read_bytes() for name in PINNED))
    installed = made_once("api-linters", digest.hexdigest()[:16], _install)
    return installed / "node_modules" / ".bin"


def complaints(linter: str, document: Path) -> str:
    """What the linter finds in this file; "" where it finds nothing."""
    done = subprocess.run(
        [programs() / linter, *LINTERS[linter], str(document)],
        env=os.environ | QUIET,
        cwd=document.parent,
        capture_output=True,
        text=True,
        timeout=LINT_S,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _install(folder: Path) -> None:
    for name in PINNED:
        shutil.copy(CONFIG / name, folder)
    _say("installing Redocly's and Spectral's linters: 90 MB, some 10 seconds")
    done = subprocess.run(
        # What a package would run at its installation, such as to count users, is not run.
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"npm could not install the linters:\n{done.stdout}{done.stderr}")
    _say("installed")


def _say(line: str) -> None:
    print(f"lint tools: {line}", file=sys.stderr, flush=True)


def main() -> None:
    if not NEEDS["npm"].present():
        _say(f"this machine lacks {NEEDS['npm'].meaning}: tests that need npm will skip")
        return
    programs()


if __name__ == "__main__":
    main()
