"""Where the store is, and whether it answers.

In: URLs from flags or the environment. Out: `StoreSettings`, checked; `check_reachable` for a
command that wants one clear line before it starts anything.
"""

from __future__ import annotations

import time

import msgspec

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import RespConnection, ServerInfo
from baton_kvstore.errors import StoreMisconfigured


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One store as every process of a pool sees it. The order of `data_urls` is part of it:
    markers name instances by index; new ones are appended."""

    index_url: str
    data_urls: tuple[str, ...]
    pool: str = "default"

    def __repr__(self) -> str:
        """Without the URLs: they may hold a password."""
        return f"StoreSettings(pool={self.pool!r})"

    def check(self) -> None:
        """Raise StoreMisconfigured naming what is wrong; no I/O."""
        if not self.pool or any(c in self.pool for c in ":{} \n"):
            raise StoreMisconfigured(f"pool name {self.pool!r}: one word without ':', '{{' or '}}'")
        if not self.data_urls:
            raise StoreMisconfigured("no data URL; give at least one (--redis-data)")
        index = parse_endpoint(self.index_url)
        data = [parse_endpoint(url) for url in self.data_urls]
        labels = [endpoint.label for endpoint in data]
        for position, label in enumerate(labels):
            if label in labels[:position]:
                raise StoreMisconfigured(f"data URL {label} is given twice")
        for endpoint in data:
            if endpoint.server == index.server:
                raise StoreMisconfigured(
                    f"index and data are the same server ({index.label}, {endpoint.label}): one"
                    " must not evict and the other must, which a server does for all its"
                    " databases; write another server for one of them"
                )


def check_reachable(url: str, timeout_s: float = 2.0) -> ServerInfo:
    """Connect, log in, ask who it is. Raise StoreError with one line for the user. Blocks."""
    connection = RespConnection(parse_endpoint(url), connect_timeout_s=timeout_s)
    try:
        return connection.open(time.monotonic() + timeout_s)
    finally:
        connection.close()
