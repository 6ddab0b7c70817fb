"""Limits of time and memory: each operation settles within a time computed from its size, whatever
the server does, and no destination is written after that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import LinkTimeout
from baton_protocol.ids import BlockHash
from baton_protocol.store import Marker, Priority
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    Transfers,
    chunk_name,
    frozen,
    payload_of,
    wait_until,
)

pytestmark = pytest.mark.integration

ONE = chunk_name(1)
MIB = 1 << 20
MACHINE_S = 30.0  # extra time for a busy machine
INFO_TEXT = b"# Server\r\nredis_version:6.2.0\r\nrun_id:" + b"a" * 40 + b"\r\n"
INFO = b"$%d\r\n%b\r\n" % (len(INFO_TEXT), INFO_TEXT)
VALUE_BYTES = 16 * MIB
DROP_BYTES, DROP_S = 32 << 10, 0.1  # a trickling server reads or sends 32 KiB each 0.1 s


def test_a_deadline_is_a_base_plus_the_size_at_the_slowest_rate() -> None:
    tuning = Tuning(deadline_base_s=2.0, floor_bytes_per_s=8 * MIB)
    assert tuning.deadline_s(0) == 2.0
    assert tuning.deadline_s(MIB) == 2.125
    assert tuning.deadline_s(4 * MIB) == 2.5


@contextmanager
def trickling(listener: socket.socket, reads: bool) -> Iterator[None]:
    """Run a server that answers the login, then reads (or answers a GETEX) very slowly."""
    over = threading.Event()

    def work() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.recv(1 << 16)
            peer.sendall(INFO)
            if not reads:
                peer.recv(1 << 16)
                peer.sendall(b"$%d\r\n" % VALUE_BYTES)
            while not over.wait(DROP_S):
                if not reads:
                    peer.sendall(bytes(DROP_BYTES))
                elif not peer.recv(DROP_BYTES):
                    return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _listen(kind: str, folder: Path) -> tuple[socket.socket, str]:
    if kind == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, f"redis://127.0.0.1:{listener.getsockname()[1]}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen()
    return listener, f"unix://{folder}/s"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("act", ["put", "get"])
def test_a_transfer_with_a_trickling_server_fails_at_its_deadline(
    tmp_path: Path, kind: str, act: str
) -> None:
    listener, url = _listen(kind, tmp_path)
    buffer = memoryview(bytearray(VALUE_BYTES))
    with listener, trickling(listener, reads=act == "put"):
        connection = RespConnection(parse_endpoint(url))
        connection.open(time.monotonic() + PATIENCE_S)
        began = time.monotonic()
        move = connection.put if act == "put" else connection.get
        with pytest.raises(LinkTimeout):  # the whole value would take 52 s
            move(began + 1.0, b"k", [buffer], 1000)
        assert 1.0 <= time.monotonic() - began < 30.0
        assert not connection.is_open


def test_every_operation_on_a_server_that_freezes_and_resumes_settles_in_time(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    tuning = Tuning(
        deadline_base_s=0.5, connect_timeout_s=0.3, queue_limit_s=2.0, backoff_limit_s=0.2
    )
    marker = make_transfers(single.data_urls).stored(ONE)
    plane = make_transfers(single.data_urls, tuning=tuning).plane
    took: list[float] = []

    def submit(number: int) -> None:
        began, priority, name = time.monotonic(), Priority(number % 3), chunk_name(number)

        def done(_: PutResult | GetResult) -> None:
            took.append(time.monotonic() - began)

        plane.submit_put(name, 16, 0, lambda *_: None, lambda: None, done, priority)
        plane.submit_get(ONE, marker, 0, lambda *_: None, done, priority)

    for _ in range(4):
        with frozen(single.pid("data0")):
            for number in range(40):
                submit(number)
            wait_until(lambda: bool(plane.troubles[0]), "the freeze to be noticed")
        wait_until(lambda: not plane.troubles[0], "the server to be used again")
    wait_until(lambda: len(took) == 4 * 80, "all operations to settle")
    # The wait in the queue, a probe that the thread may be running, and the operation itself.
    size = LAYOUT.chunk_bytes
    settled_s = tuning.queue_limit_s + tuning.deadline_s(4 * size) + tuning.deadline_s(size)
    assert max(took) < settled_s + MACHINE_S


def test_a_destination_is_never_written_after_its_get_has_settled(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls)
    markers = {chunk_name(number): transfers.stored(chunk_name(number)) for number in range(30)}
    for turn in range(5):
        calls = [list[str]() for _ in range(300)]
        _close_in_the_middle(store.data_urls, markers, calls, 0.002 * turn)
        assert {tuple(mine) for mine in calls} <= {("done",), ("sink", "done")}


def _close_in_the_middle(
    urls: tuple[str, ...],
    markers: dict[BlockHash, Marker],
    calls: list[list[str]],
    after_s: float,
) -> None:
    """Close a data plane while most gets are queued and some are in flight."""
    plane = DataPlane(urls, LAYOUT, FINGERPRINT, EPOCH)
    plane.start()

    def get(name: BlockHash, mine: list[str]) -> None:
        plane.submit_get(
            name,
            markers[name],
            0,
            lambda *_: mine.append("sink"),
            lambda _: mine.append("done"),
        )

    for number, mine in enumerate(calls):
        get(chunk_name(number % len(markers)), mine)
    wait_until(lambda: any(calls), "the first callback")
    time.sleep(after_s)
    plane.close()


def test_buffers_are_limited_while_the_server_is_frozen(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    tuning = Tuning(deadline_base_s=2.0, connect_timeout_s=2.0)
    transfers: Transfers = make_transfers(
        single.data_urls, threads=6, inflight=3 * (LAYOUT.chunk_bytes + 200), tuning=tuning
    )
    assert transfers.plane.wait_connected(PATIENCE_S)
    held: set[int] = set()

    def fill(view: memoryview, _: int) -> None:
        held.add(id(view.obj))

    results: list[PutResult] = []
    with frozen(single.pid("data0")):
        for number in range(30):
            transfers.plane.submit_put(
                chunk_name(number), 16, 0, fill, lambda: None, results.append
            )
        wait_until(lambda: len(results) == 30, "all puts to settle")
    assert len(held) <= 3
    assert transfers.put(ONE, payload_of(ONE)).hash == ONE
