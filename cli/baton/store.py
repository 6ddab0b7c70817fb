"""The pool's KV store: the user's Redis, checked, or two embedded servers that end with the pool.

In: UpOptions. Out: URLs for the children, while the context lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import CommandError
from baton.options import UpOptions
from baton_kvstore.errors import StoreError


@dataclass(frozen=True)
class StoreUrls:
    index: str
    data: tuple[str, ...]


@contextmanager
def open_store(options: UpOptions) -> Iterator[StoreUrls]:
    """Raise CommandError in one line where there is no store to be had."""
    if options.redis_index:
        yield _check_given(options)
        return
    from baton_kvstore.embedded import EmbeddedStore

    store = EmbeddedStore(store_memory=options.store_memory, pool=options.pool)
    try:
        store.start()
    except StoreError as error:
        raise CommandError(str(error)) from error
    try:
        yield StoreUrls(store.index_url, store.data_urls)
    finally:
        store.stop()


def _check_given(options: UpOptions) -> StoreUrls:
    from baton_kvstore.settings import StoreSettings, check_reachable

    given = StoreSettings(
        index_url=options.redis_index, data_urls=options.redis_data, pool=options.pool
    )
    try:
        given.check()
        for url in (given.index_url, *given.data_urls):
            check_reachable(url)
    except StoreError as error:
        raise CommandError(str(error)) from error
    return StoreUrls(given.index_url, given.data_urls)
