"""Fixtures that tests of the package share."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.support.project.wheel import build_wheel, metadata_of


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from this tree, in a folder without other files."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def package(wheel: Path) -> Distribution:
    return metadata_of(wheel)
