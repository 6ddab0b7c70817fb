"""Linters of OpenAPI documents, from npm: Redocly's and Stoplight's Spectral.

In: tests/cluster/lint, which holds their rules, and pins every package of both by its digest. Out:
the linters' programs, installed once in the user's cache, and their findings in a document. `npm
install --package-lock-only --omit-lockfile-registry-resolved` updates the lock file; remove its
`funding` entries, which contain addresses.

`make lint-tools` installs the linters; otherwise the first test that needs them does.
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
# No telemetry, and no notices of newer versions.
QUIET = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "NO_COLOR": "1"}
INSTALL_S, LINT_S = 600.0, 300.0
# Arguments: the file with the rules, and that warnings count as failures.
LINTERS = {
    "redocly": ("lint", f"--config={CONFIG / 'redocly.yaml'}", "--format=stylish"),
    "spectral": ("lint", f"--ruleset={CONFIG / 'spectral.yaml'}", "--fail-severity=hint"),
}


def programs() -> Path:
    """Return the folder with the linters' programs; install them if needed."""
    digest = hashlib.sha256(b"".join((CONFIG / name).read_bytes() for name in PINNED))
    installed = made_once("api-linters", digest.hexdigest()[:16], _install)
    return installed / "node_modules" / ".bin"


def complaints(linter: str, document: Path) -> str:
    """Return the linter's findings in this file, "" if there are none."""
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
    _log("installing Redocly's and Spectral's linters: 90 MB, some 10 seconds")
    done = subprocess.run(
        # Do not run the packages' install scripts.
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"npm could not install the linters:\n{done.stdout}{done.stderr}")
    _log("installed")


def _log(line: str) -> None:
    print(f"lint tools: {line}", file=sys.stderr, flush=True)


def main() -> None:
    if not NEEDS["npm"].present():
        _log(f"this machine lacks {NEEDS['npm'].meaning}: tests that need npm will skip")
        return
    programs()


if __name__ == "__main__":
    main()
