"""Fixtures that several command-line tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.hubs.model_fetch import model_hub
from tests.support.hubs.stub_hub import StubHub


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Restore the root logger, which commands set up for their whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with model_hub(monkeypatch) as running:
        yield running
