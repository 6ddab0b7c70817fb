"""Real Redis servers and data planes for the tests of the KV store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_protocol.layout import KVLayout
from baton_protocol.policies import StoreCare
from tests.support.stores.kvstore import EPOCH, FINGERPRINT, LAYOUT, PATIENT, SharedStore, Transfers

MakeTransfers = Callable[..., Transfers]


@pytest.fixture(scope="session")
def three() -> Iterator[SharedStore]:
    shared = SharedStore(256 << 20, data_instances=3)
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def one() -> Iterator[SharedStore]:
    shared = SharedStore(256 << 20)
    yield shared
    shared.close()


@pytest.fixture
def store(three: SharedStore) -> EmbeddedStore:
    return three.as_new()


@pytest.fixture
def single(one: SharedStore) -> EmbeddedStore:
    """A store with one index server and one data server, emptied."""
    return one.as_new()


@pytest.fixture
def make_servers() -> Iterator[Callable[..., EmbeddedServers]]:
    """Return a function that starts servers; they are stopped at the end."""
    with ExitStack() as stack:

        def make(*specs: ServerSpec, binary: Path | None = None) -> EmbeddedServers:
            return stack.enter_context(EmbeddedServers(specs, binary=binary))

        yield make


@pytest.fixture
def make_transfers() -> Iterator[MakeTransfers]:
    """Return a function that starts data planes; they are closed at the end."""
    with ExitStack() as stack:

        def make(
            urls: tuple[str, ...],
            *,
            threads: int = 2,
            tuning: Tuning | None = None,
            inflight: int = 64 << 20,
            layout: KVLayout = LAYOUT,
            write_behind_bandwidth: float | None = None,
            settings: StoreCare | None = None,
        ) -> Transfers:
            plane = DataPlane(
                urls,
                layout,
                FINGERPRINT,
                EPOCH,
                write_behind_bandwidth=write_behind_bandwidth,
                settings=settings,
                tuning=replace(
                    tuning or PATIENT, threads_per_instance=threads, max_inflight_bytes=inflight
                ),
            )
            plane.start()
            stack.callback(plane.close)
            return Transfers(plane, layout)

        yield make
