"""A real store for the node's tests: one per module, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton_kvstore.embedded import EmbeddedStore
from tests.support.stores.kvstore import plain_client


@pytest.fixture(scope="module")
def module_store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(128 << 20, data_instances=2) as store:
        yield store


@pytest.fixture
def store(module_store: EmbeddedStore) -> EmbeddedStore:
    for url in (module_store.index_url, *module_store.data_urls):
        with plain_client(url) as client:
            client.flushall()
    return module_store
