"""Python environments that hold Baton's wheel, and of other packages only chosen ones.

Unless it is told to `fetch`, no registry is asked: the chosen packages are those of the environment
that runs the tests, linked into the new one. So they have the versions that constraints.txt says,
and 5 GB of torch are not copied. The checkout and all other packages cannot be seen.

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

from tests.support.project.requirements import canonical

ROOT = Path(__file__).resolve().parents[3]
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
        offline = ("--isolated", "--no-index", f"--find-links={wheel.parent}")
        return self._run(ROOT, *self._pip, *offline, *words)

    def fetch(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`pip install` with these words, from the registry that this machine's pip asks."""
        return self._run(self.folder, *self._pip, "--no-cache-dir", *words)

    def run(self, program: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One of its programs, in a folder outside the checkout."""
        return self._run(self.folder, str(self.folder / "bin" / program), *words, **variables)

    @property
    def _pip(self) -> tuple[str, ...]:
        python = self.folder / "bin" / "python"
        options = ("--disable-pip-version-check", f"--python={python}")
        return (sys.executable, "-m", "pip", *options, "install")

    def _run(self, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BATON_", "PYTHON"))
        }
        path = f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}"
        return subprocess.run(
            words,
            cwd=folder,
            env={**kept, "PATH": path, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
