"""Python environments with Baton's wheel and a selection of the other packages.

The selected packages are symbolic links to those of the environment that runs the tests, so they
have the versions of constraints.txt, and 5 GB of torch are not copied. Only `fetch` uses a package
registry. The checkout and all other packages are invisible.

A link points to a package's whole folder. If several packages share one (`google`, `nvidia`,
`opentelemetry`), all of these are visible.
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
    """An environment without Baton, until install(). `packages` None links all other packages."""

    def __init__(self, folder: Path, packages: Iterable[str] | None) -> None:
        self.folder = folder
        selected = None if packages is None else {canonical(name) for name in packages}
        venv.create(folder, symlinks=True)
        links = folder / "linked"
        links.mkdir()
        for package in distributions():
            name = canonical(package.metadata["Name"])
            if name != THIS and (selected is None or name in selected):
                for file in package.files or ():
                    top = file.parts[0]
                    if top not in {"..", "__pycache__"} and not (links / top).is_symlink():
                        (links / top).symlink_to(Path(str(package.locate_file(top))))
        # Not in site-packages itself: pip would remove them.
        [site] = folder.glob("lib/python*/site-packages")
        (site / "linked.pth").write_text(f"{links}\n")

    def install(self, wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `pip install` with these arguments in the checkout. pip finds only this wheel.

        It is the pip of the environment that runs the tests."""
        offline = ("--isolated", "--no-index", f"--find-links={wheel.parent}")
        return self._run(ROOT, *self._pip, *offline, *arguments)

    def fetch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `pip install` with these arguments, from this machine's package registry."""
        return self._run(self.folder, *self._pip, "--no-cache-dir", *arguments)

    def run(
        self, program: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, in a folder outside the checkout."""
        return self._run(self.folder, str(self.folder / "bin" / program), *arguments, **variables)

    @property
    def _pip(self) -> tuple[str, ...]:
        python = self.folder / "bin" / "python"
        options = ("--disable-pip-version-check", f"--python={python}")
        return (sys.executable, "-m", "pip", *options, "install")

    def _run(
        self, folder: Path, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BATON_", "PYTHON"))
        }
        path = f"{self.folder / 'bin'}{os.pathsep}{inherited['PATH']}"
        return subprocess.run(
            arguments,
            cwd=folder,
            env={**inherited, "PATH": path, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
