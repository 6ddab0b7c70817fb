"""What several of the command line's tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hubs.model_fetch import model_hub
from tests.support.hubs.stub_hub import StubHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with model_hub(monkeypatch) as running:
        yield running
