"""The addresses of the store, and a check that a server answers.

`StoreSettings` holds the URLs from flags or the environment. Commands call `check_reachable` before
they start anything, so that the user gets a one-line error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection, ServerInfo
from baton_kvstore.errors import StoreMisconfigured


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses of one store, the same in every process of a pool.

    Markers name data instances by their index in `data_urls`. So never change the order; append new
    URLs.
    """

    index_url: str
    data_urls: tuple[str, ...]
    pool: str = "default"

    def __repr__(self) -> str:
        """Leaves out the URLs, which may hold a password."""
        return f"StoreSettings(pool={self.pool!r})"

    def check(self) -> None:
        """Raise StoreMisconfigured if a setting is invalid. Does no I/O."""
        if not self.pool or any(c in self.pool for c in ":{} \n"):
            raise StoreMisconfigured(
                f"pool name {self.pool!r} is invalid: use one word without ':', '{{' or '}}'"
            )
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
                raise _one_server(index.label, endpoint.label)


def check_distinct(index_url: str, data_urls: Sequence[str], run_ids: Sequence[str]) -> None:
    """Raise StoreMisconfigured if two URLs lead to one server, under different names. `run_ids` are
    those of the index and the data servers, in this order; "" is unknown."""
    labels = [parse_endpoint(url).label for url in (index_url, *data_urls)]
    seen: dict[str, int] = {}
    for place, run_id in enumerate(run_ids):
        first = seen.setdefault(run_id, place) if run_id else place
        if first == place:
            continue
        if first == 0:
            raise _one_server(labels[0], labels[place])
        raise StoreMisconfigured(
            f"data URLs {labels[first]} and {labels[place]} lead to the same server; leave one out"
        )


def _one_server(index: str, data: str) -> StoreMisconfigured:
    return StoreMisconfigured(
        f"index and data are the same server ({index}, {data}): data must evict keys and the index"
        " must not, but a server has one eviction policy for all its databases; write another"
        " server for one of them"
    )


def check_reachable(url: str, timeout_s: float = 2.0) -> ServerInfo:
    """Connect, log in, and return the server's run id and version. Blocks for up to `timeout_s`.

    Raise StoreError with a one-line message for the user.
    """
    connection = RespConnection(parse_endpoint(url), connect_timeout_s=timeout_s)
    try:
        return connection.open(time.monotonic() + timeout_s)
    finally:
        connection.close()
