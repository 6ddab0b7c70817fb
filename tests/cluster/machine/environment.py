"""Python with all that Baton depends on, and Baton itself: the two layers of its image.

In: the checkout and its interpreter. Out: a virtual environment in the user's cache, made once for
each content of pyproject.toml and constraints.txt, and the same as a layer; and a small layer with
the checkout's own packages, made anew each time. Without torch: what the extras `router` and
`operator` ask for is enough for a simulated node as well.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machine import layers
from tests.cluster.machine.cache import Progress, made_once
from tests.cluster.machine.layers import Layer

CHECKOUT = Path(__file__).parents[3]
EXTRAS = "router,operator"
# Where the environment lies in the image. A cache may be below /tmp, which pods mount over.
IN_IMAGE = "/opt/baton"
# Parts of Python's own library that no server imports; site-packages: its own, not ours.
_UNUSED = frozenset(
    {"test", "idlelib", "tkinter", "_tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"}
    | {"site-packages"}
)
# Loaded by torch, for pods that see this machine's (see `torch_pods`).
_MORE_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "librt.so.1", "libutil.so.1", "libz.so.1")


@dataclass(frozen=True)
class Environment:
    folder: Path

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def layer(self) -> Path:
        return self.folder / "environment.layer"


def environment_folder(progress: Progress) -> Environment:
    return Environment(made_once("environment", _digest(), lambda folder: _fill(folder, progress)))


def write_source(folder: Path, environment: Environment) -> Path:
    """The layer with the checkout's packages and the command `baton`."""
    installed, path = folder / "installed", folder / "source.layer"
    # The environment has the build back end: no registry is asked.
    how = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(installed))
    _pip(environment, "install", *how, str(CHECKOUT))
    for script in (installed / "bin").iterdir():
        script.write_text(script.read_text().replace(str(environment.venv), IN_IMAGE))
    packages = next(environment.venv.glob("lib/python3*/site-packages"))
    place = f"{IN_IMAGE}/{packages.relative_to(environment.venv)}"
    with Layer(path) as layer:
        layer.add_tree(installed / "bin", at=f"{IN_IMAGE}/bin")
        layer.add_tree(installed, lambda one: one == installed / "bin", at=place)
    return path


def _digest() -> str:
    digest = hashlib.sha256(f"{sys.version} {sys.base_prefix} {EXTRAS}".encode())
    recipe = (Path(__file__), Path(layers.__file__))
    for path in (CHECKOUT / "pyproject.toml", CHECKOUT / "constraints.txt", *recipe):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _fill(folder: Path, progress: Progress) -> None:
    progress("installing what Baton depends on, without torch, for its image")
    environment = Environment(folder)
    venv = environment.venv
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    constraints = ("--constraint", str(CHECKOUT / "constraints.txt"))
    _pip(environment, "install", *constraints, f"{CHECKOUT}[{EXTRAS}]", "hatchling")
    _pip(environment, "uninstall", "--yes", "baton")
    with Layer(environment.layer) as layer:
        layer.add_base()
        _add_python(layer)
        layer.add_tree(venv, lambda one: one.name == "tests", at=IN_IMAGE)
        layer.add_libraries(more=_MORE_LIBRARIES)


def _add_python(layer: Layer) -> None:
    """The interpreter under each name that a virtual environment may link to, and its library."""
    real = Path(sys.executable).resolve()
    for name in ("python", "python3", real.name):
        if (named := real.parent / name).exists():
            layer.add(named)
    for key in ("stdlib", "platstdlib"):
        folder = Path(sysconfig.get_path(key, vars={"base": sys.base_prefix}))
        layer.add_tree(folder, _is_unused)


def _is_unused(path: Path) -> bool:
    return path.name.split(".")[0] in _UNUSED or path.name.startswith("config-")


def _pip(environment: Environment, *words: str) -> None:
    python = ("--python", str(environment.venv / "bin" / "python"))
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", *python, *quiet, *words], check=True)
