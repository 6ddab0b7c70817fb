"""Python environments that hold Baton's wheel, and of other packages only chosen ones.

Nothing is fetched: the chosen packages are those of the environment that runs the tests, which are
linked into the new one. So they have the versions that constraints.txt says, and 5 GB of torch are
not copied. What the new environment cannot see of the checkout or of other packages, its programs
do without.

A link is to a package's whole folder. Where several packages share one (`google`, `nvidia`,
`opentelemetry`), all of them are seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from tests.support.requirements import canonical

ROOT = Path(__file__).resolve().parents[2]
THIS = "baton-serve"


class Environment:
    """Baton is not in it until its wheel is installed; `packages` None: all others are."""

    def __init__(self, folder: Path, packages: Iterable[str] | None) -> None:
        self.folder = folder
        wanted = None if packages is None else {canonical(name) for name in packages}
        venv.create(folder, symlinks=True)
        links = folder / "linked"
        links.mkdir()
        for package in distributions():
            name = canonical(package.metadata["Name"])
            if name != THIS and (wanted is None or name in wanted):
                for file in package.files or ():
                    top = file.parts[0]
                    if top not in {"..", "__pycache__"} and not (links / top).is_symlink():
                        (links / top).symlink_to(Path(str(package.locate_file(top))))
        # Not into site-packages itself: pip removes what it finds there.
        [site] = folder.glob("lib/python*/site-packages")
        (site / "linked.pth").write_text(f"{links}\n")

    def install(self, wheel: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """`pip install` with these words in the checkout, where pip finds this wheel and no more.

        pip itself is that of the environment that runs the tests."""
        pip = (sys.executable, "-m", "pip", f"--python={self.folder / 'bin' / 'python'}")
        options = ("--disable-pip-version-check", "--no-index", f"--find-links={wheel.parent}")
        return self._run(ROOT, *pip, "install", *options, *words)

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """One of its programs, in a folder outside the checkout."""
        return self._run(self.folder, str(self.folder / "bin" / program), *words)

    def _run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BATON_", "PIP_", "PYTHON"))
        }
        path = f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}"
        return subprocess.run(
            words,
            cwd=folder,
            env={**kept, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
