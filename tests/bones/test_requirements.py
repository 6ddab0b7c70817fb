"""The requirements files of the images: what pyproject.toml asks for, as constraints.txt pins it.

`make requirements` writes them with uv, which asks a package registry. Here nobody is asked: the
metadata of the installed packages says what each needs.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.project.requirements import canonical, closure, installed_needs

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD = PYPROJECT["build-system"]["requires"]
# What each file is made of.
ASKED: dict[str, list[str]] = {
    "operator/requirements.txt": ["baton-serve[operator]"],
    "router/requirements.txt": ["baton-serve[router,otel]"],
    "node/requirements-sim.txt": ["baton-serve[serve,otel]"],
    "node/requirements.txt": ["baton-serve[node,otel]"],
    "requirements-build.txt": BUILD,
}
# What images are built for. Of their Python it is each patch, as a base may be replaced.
MACHINES = ("x86_64", "aarch64")
[PYTHON] = re.findall(
    r"^ARG BASE=python:(3\.\d+)\.", (ROOT / "router/Dockerfile").read_text(), re.M
)
ENTRY = re.compile(r"(?P<name>\S+)==(?P<version>[^\s;]+)(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)")
STALE = "pyproject.toml or constraints.txt has changed: `make requirements` writes this file anew"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def listed(file: str) -> dict[str, str]:
    """Versions by name. Each line has to be whole: a version, no address, no marker, hashes."""
    text = (ROOT / file).read_text().replace(" \\\n   ", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            entry = ENTRY.fullmatch(line)
            assert entry is not None, line[:100]
            found[canonical(entry["name"])] = entry["version"]
    return found


def environment(machine: str) -> dict[str, str]:
    linux = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
    python = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    return {**linux, **python, "platform_machine": machine}


def needs_of(name: str, extra: str) -> list[str]:
    """Baton's own are those of pyproject.toml, not of an installation that may be older."""
    if name != PROJECT["name"]:
        return installed_needs(name, extra)
    found: list[str] = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return found


def brought(file: str, machine: str) -> set[str]:
    """The names of all packages that a file is to list."""
    return closure(ASKED[file], needs_of, environment(machine)) - {PROJECT["name"]}


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("file", ASKED)
def test_a_requirements_file_lists_what_pyproject_asks_for_and_nothing_else(
    file: str, machine: str
) -> None:
    assert set(listed(file)) == brought(file, machine), STALE


@pytest.mark.parametrize("file", ASKED)
def test_a_requirements_file_has_the_versions_of_constraints(file: str) -> None:
    """What only another Python needs is in no constraints: they are what is installed here."""
    pinned = pins()
    for name, chosen in listed(file).items():
        if name in pinned or is_installed(name):
            assert pinned.get(name) == chosen, STALE


def test_the_build_backend_is_pinned_as_constraints_pin_it() -> None:
    """A wheel that is built from a source archive elsewhere is built by the same one."""
    assert {Requirement(one).name: str(Requirement(one).specifier) for one in BUILD} == {
        Requirement(one).name: f"=={pins()[Requirement(one).name]}" for one in BUILD
    }


@pytest.mark.parametrize("file", [one for one in ASKED if one != "node/requirements.txt"])
def test_no_torch_comes_with_the_router_the_operator_or_the_simulated_node(file: str) -> None:
    assert "torch" in listed("node/requirements.txt")
    assert listed(file).keys() & {"torch", "transformers", "triton"} == set()
