"""The pool's KV store: the user's Redis, or embedded servers that end with the pool.

In: PoolOptions. Out: URLs for the children while the context lasts. The user's Redis is checked
before it is used; embedded servers are restarted when they die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton_cli.errors import CommandError
from baton_cli.local_pool.children import FIRST_PAUSE_S, LONGEST_PAUSE_S, describe_end
from baton_cli.options.records import PoolOptions, StoreLoginOptions
from baton_kvstore.errors import StoreError
from baton_protocol.backoff import Backoff

if TYPE_CHECKING:
    from baton_kvstore.connection.server_settings import StoreRole
    from baton_kvstore.embedded.servers import EmbeddedStore

LOOK_S = 0.5


@dataclass(frozen=True)
class StoreUrls:
    """The store's URLs, which may hold a password."""

    index: str = field(repr=False)
    data: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class OpenStore:
    """An open store. `embedded` is None if the user provided the Redis servers."""

    urls: StoreUrls
    embedded: EmbeddedStore | None = None

    async def keep(self, note: Callable[[str], None]) -> None:
        """Keep the embedded store alive until cancelled.

        The store's guardian process restarts a server that dies; this task reports it with `note`.
        If the guardian itself is killed, its servers end with it, and this task restarts them all:
        empty, at the same addresses, so that nodes and router reconnect by themselves.
        """
        if self.embedded is None:
            return
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        ends = {name: self.embedded.last_end(name) for name in self.embedded.names}
        while True:
            await asyncio.sleep(LOOK_S)
            for name, last_end in ends.items():
                ends[name] = end = self.embedded.last_end(name)
                if end is not None and end != last_end:
                    how = f"pid {end[0]} {describe_end(end[1])}"
                    note(f"restarting the store's server {name} ({how}) without its data")
            if self.embedded.is_alive:
                backoff.reset()
                continue
            pause_s = backoff.next_pause_s()
            servers = ", ".join(ends)
            note(
                f"the store's guardian and its servers ({servers}) were killed; restarting them "
                f"in {pause_s:g} s"
            )
            await asyncio.sleep(pause_s)
            try:
                self.embedded.revive()
            except (OSError, StoreError) as error:
                note(f"cannot start the store: {error}")


def logged_in(options: StoreLoginOptions, *urls: str) -> list[str]:
    """Add --redis-username and --redis-password to the URLs; "" stays "". Raise CommandError."""
    from baton_kvstore.connection.endpoint import with_login

    login = (options.redis_username, options.redis_password)
    try:
        return [with_login(url, *login) if url else "" for url in urls]
    except StoreError as error:
        raise CommandError(str(error)) from error


@contextmanager
def open_store(options: PoolOptions) -> Iterator[OpenStore]:
    """Yield the pool's store; raise CommandError if it cannot be reached or started."""
    if options.redis_index:
        yield OpenStore(_check_given(options))
        return
    from baton_kvstore.embedded.servers import EmbeddedStore

    store = EmbeddedStore(
        store_memory=options.store_memory,
        data_instances=options.store_instances,
        pool=options.pool,
    )
    try:
        store.start()
    except StoreError as error:
        raise CommandError(str(error)) from error
    try:
        yield OpenStore(StoreUrls(store.index_url, store.data_urls), store)
    finally:
        store.stop()


def _check_given(options: PoolOptions) -> StoreUrls:
    from baton_kvstore.settings import StoreSettings, check_distinct

    index, *data = logged_in(options, options.redis_index, *options.redis_data)
    given = StoreSettings(index_url=index, data_urls=tuple(data), pool=options.pool)
    try:
        given.check()
        run_ids = [_reached(index, "index"), *(_reached(url, "data") for url in data)]
        check_distinct(index, data, run_ids)
    except StoreError as error:
        raise CommandError(str(error)) from error
    return StoreUrls(given.index_url, given.data_urls)


def _reached(url: str, role: StoreRole) -> str:
    """The run id of the server; raise CommandError with what to do if it does not answer."""
    from baton_kvstore.connection.endpoint import parse_endpoint
    from baton_kvstore.connection.remedies import remedy_of
    from baton_kvstore.settings import check_reachable

    try:
        return check_reachable(url).run_id
    except StoreError as error:
        remedy = remedy_of(error, parse_endpoint(url), role)
        named = f"; {remedy}" if remedy and remedy not in str(error) else ""
        raise CommandError(f"{error}{named}") from error
