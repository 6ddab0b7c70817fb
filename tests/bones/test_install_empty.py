"""The wheel, installed from a package registry into an environment that holds nothing.

This is what the first user of a release does, but for the wheel, which is of this tree: no
constraints, so other packages have the versions that the registry gives today. It shows that
pyproject.toml names all that is needed, and that newer versions of it still work.
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
    """Away afterwards: pytest would keep 6 GB of it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Environment(Path(folder), ())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_the_quick_start_installs_answers_a_question(empty: Environment, wheel: Path) -> None:
    needs("registry")
    for asked in ([f"{wheel}[local]"], INSTALL_LINE.removeprefix("pip install ").split()):
        installed = empty.fetch(*asked)
        assert installed.returncode == 0, installed.stdout + installed.stderr
    cache = {"XDG_CACHE_HOME": str(empty.folder / "cache")}
    fetched = empty.run("baton", "model", "fetch-demo", **cache)
    assert fetched.returncode == 0, fetched.stderr
    words = ("--model", fetched.stdout.strip(), "--port", "0")
    answered = empty.run("baton", "up", *words, "--once", "What is the capital of France?", **cache)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.startswith("The capital of France is Paris.\n"), answered.stdout
