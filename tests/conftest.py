"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model

# Before anybody loads torch: idle threads that spin take the cores from other workers and pools.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """Name of a random tiny model -> its folder (see tests/support/tiny_models)."""
    return make_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one worker, since they share pools and servers; those of a file marked
    `spread` start what they need themselves, and run wherever there is room."""
    for item in items:
        if item.get_closest_marker("spread") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the exactness tests compared: differences are accepted only when counted."""
    lines = [
        str(value)
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == "exactness"
    ]
    if lines:
        terminalreporter.section("exactness against transformers")
        for line in sorted(lines):
            terminalreporter.write_line(line)
