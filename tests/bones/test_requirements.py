"""The images' requirements files hold the requirements of pyproject.toml, as constraints.txt pins.

`make requirements` writes them with uv and a package registry. These tests need no registry: they
read requirements from the metadata of the installed packages.
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
# The requirements behind each file.
SOURCES: dict[str, list[str]] = {
    "operator/requirements.txt": ["baton-serve[operator]"],
    "router/requirements.txt": ["baton-serve[router,otel,s3]"],
    "node/requirements-sim.txt": ["baton-serve[serve,otel]"],
    "node/requirements.txt": ["baton-serve[bridge,otel]"],
    "requirements-build.txt": BUILD,
}
# The images' machine types. Only the minor version of Python counts: a base may be replaced.
MACHINES = ("x86_64", "aarch64")
[PYTHON] = re.findall(
    r"^ARG BASE=python:(3\.\d+)\.", (ROOT / "router/Dockerfile").read_text(), re.M
)
ENTRY = re.compile(r"(?P<name>\S+)==(?P<version>[^\s;]+)(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)")
STALE = "pyproject.toml or constraints.txt has changed: run `make requirements`"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def listed(file: str) -> dict[str, str]:
    """Versions by name. Each line must have a version and hashes, and no address or marker."""
    text = (ROOT / file).read_text().replace(" \\\n   ", "")
    versions = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            entry = ENTRY.fullmatch(line)
            assert entry is not None, line[:100]
            versions[canonical(entry["name"])] = entry["version"]
    return versions


def environment(machine: str) -> dict[str, str]:
    linux = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
    python = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    return {**linux, **python, "platform_machine": machine}


def needs_of(name: str, extra: str) -> list[str]:
    """Baton's requirements come from pyproject.toml, because its installation may be older."""
    if name != PROJECT["name"]:
        return installed_needs(name, extra)
    own: list[str] = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return own


def required(file: str, machine: str) -> set[str]:
    """The names of all packages that a file must list."""
    return closure(SOURCES[file], needs_of, environment(machine)) - {PROJECT["name"]}


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("file", SOURCES)
def test_a_requirements_file_lists_exactly_the_requirements_of_pyproject(
    file: str, machine: str
) -> None:
    assert set(listed(file)) == required(file, machine), STALE


@pytest.mark.parametrize("file", SOURCES)
def test_a_requirements_file_has_the_versions_of_constraints(file: str) -> None:
    """constraints.txt may lack packages that only another Python version needs."""
    pinned = pins()
    for name, chosen in listed(file).items():
        if name in pinned or is_installed(name):
            assert pinned.get(name) == chosen, STALE


def test_the_build_backend_is_pinned_as_constraints_pin_it() -> None:
    """A wheel that is built from a source archive elsewhere then has the same backend."""
    assert {Requirement(one).name: str(Requirement(one).specifier) for one in BUILD} == {
        Requirement(one).name: f"=={pins()[Requirement(one).name]}" for one in BUILD
    }


@pytest.mark.parametrize("file", [one for one in SOURCES if one != "node/requirements.txt"])
def test_the_images_of_router_operator_and_simulated_node_have_no_torch(file: str) -> None:
    assert "torch" in listed("node/requirements.txt")
    assert listed(file).keys() & {"torch", "transformers", "triton"} == set()
