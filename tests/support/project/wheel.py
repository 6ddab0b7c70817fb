"""Builds the wheel of this tree, and reads its metadata.

The wheel is built as the Dockerfiles build it, without a package registry, by the build backend of
this environment.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[3]


def build_wheel(folder: Path, tree: Path = ROOT) -> Path:
    """Build the wheel in this folder, which takes one or two seconds."""
    arguments = (
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    )
    subprocess.run([sys.executable, "-m", "pip", *arguments, str(tree)], check=True, timeout=240)
    [wheel] = folder.glob("*.whl")
    return wheel


def metadata_of(wheel: Path) -> Distribution:
    """Return the metadata as importlib.metadata does for an installed distribution."""
    [info] = [one for one in ZipPath(ZipFile(wheel)).iterdir() if one.name.endswith(".dist-info")]
    return PathDistribution(info)
