"""Fixtures: real stores for nodes; each test gets one in the state of a new store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from tests.support.stores.kvstore import SharedStore


@pytest.fixture(scope="session")
def two() -> Iterator[SharedStore]:
    shared = SharedStore(128 << 20, data_instances=2)
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def one() -> Iterator[SharedStore]:
    shared = SharedStore(64 << 20)
    yield shared
    shared.close()


@pytest.fixture
def store(two: SharedStore) -> EmbeddedStore:
    return two.as_new()


@pytest.fixture
def single(one: SharedStore) -> EmbeddedStore:
    """A store with one index and one data server."""
    return one.as_new()
