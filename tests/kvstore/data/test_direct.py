"""Direct operations: chunks sent from and received into the cache's memory, without a copy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from baton_kvstore.data.chunk_format import HEADER_BYTES
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.instance import CLOSED
from baton_kvstore.data.transfers import GetResult, Pieces, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.store import Marker
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    Transfers,
    chunk_name,
    frozen,
    payload_of,
    plain_client,
    wait_until,
)
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.tls import make_certificate, tls_before
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

WIDE = msgspec.structs.replace(LAYOUT, chunk_blocks=4)
BLOCK = WIDE.block_bytes
ONE = chunk_name(1)
SHORT_DEADLINES = Tuning(deadline_base_s=0.5, connect_timeout_s=0.5, backoff_limit_s=0.2)
MakeWide = Callable[..., Transfers]


class Pool:
    """A block pool in one piece of memory, filled with random bytes."""

    def __init__(self, seed: int, blocks: int = 8) -> None:
        self.data = bytearray(random.Random(seed).randbytes(blocks * BLOCK))

    def views(self, *blocks: int) -> list[memoryview]:
        return [memoryview(self.data)[block * BLOCK : (block + 1) * BLOCK] for block in blocks]

    def content(self, *blocks: int) -> bytes:
        return b"".join(self.views(*blocks))

    def others(self, *blocks: int) -> bytes:
        return self.content(*(n for n in range(len(self.data) // BLOCK) if n not in blocks))


class Moves:
    """Direct puts and gets of one chunk on a data plane, and the order of their callbacks."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.calls: list[str] = []

    def put_later(self, source: list[memoryview]) -> Callable[[], PutResult]:
        results: SimpleQueue[PutResult] = SimpleQueue()

        def done(result: PutResult) -> None:
            self.calls.append("done")
            results.put(result)

        self._plane.submit_put(
            ONE,
            WIDE.chunk_tokens,
            0,
            self._not_called,
            lambda: self.calls.append("copied"),
            done,
            direct=source,
        )
        return lambda: results.get(timeout=PATIENCE_S)

    def stored(self, source: list[memoryview]) -> Marker:
        result = self.put_later(source)()
        assert result.marker is not None, result.reason
        assert result.bytes == WIDE.chunk_bytes
        return result.marker

    def get_later(self, marker: Marker, target: Pieces) -> Callable[[], GetResult]:
        results: SimpleQueue[GetResult] = SimpleQueue()
        self._plane.submit_get(ONE, marker, 0, self._not_called, results.put, direct=target)
        return lambda: results.get(timeout=PATIENCE_S)

    def get(self, marker: Marker, target: Pieces) -> GetResult:
        return self.get_later(marker, target)()

    def _not_called(self, view: memoryview, shard: int) -> None:
        self.calls.append("copied through a buffer")


@pytest.fixture
def make_wide(make_transfers: MakeTransfers) -> MakeWide:
    def make(*urls: str, tuning: Tuning | None = None) -> Transfers:
        return make_transfers(urls, layout=WIDE, tuning=tuning)

    return make


@pytest.fixture
def loop() -> Iterator[WireLoop]:
    loop = WireLoop()
    yield loop
    loop.close()


@pytest.fixture
def link(single: EmbeddedStore, loop: WireLoop) -> Iterator[LinkProxy]:
    link = LinkProxy(loop, single.data_urls[0])
    yield link
    link.close()


def test_blocks_are_fetched_into_other_blocks_and_no_other_byte_changes(
    single: EmbeddedStore, make_wide: MakeWide
) -> None:
    moves = Moves(make_wide(*single.data_urls).plane)
    source, target = Pool(1), Pool(2)
    sent, rest = source.content(*range(8)), target.others(7, 2, 3, 0)
    marker = moves.stored(source.views(5, 1, 6, 2))
    result = moves.get(marker, target.views(7, 2, 3, 0))
    assert (result.ok, result.bytes, result.reason) == (True, WIDE.chunk_bytes, "")
    assert target.content(7, 2, 3, 0) == source.content(5, 1, 6, 2)
    assert target.others(7, 2, 3, 0) == rest
    assert source.content(*range(8)) == sent
    assert moves.calls == ["copied", "done"]


def test_direct_and_buffered_operations_read_each_others_chunks(
    single: EmbeddedStore, make_wide: MakeWide
) -> None:
    transfers = make_wide(*single.data_urls)
    moves, source, target = Moves(transfers.plane), Pool(1), Pool(2)
    marker = moves.stored(source.views(0, 1, 2, 3))
    assert transfers.get(ONE, marker)[1] == source.content(0, 1, 2, 3)
    assert moves.get(transfers.stored(ONE), target.views(3, 2, 1, 0)).ok
    assert target.content(3, 2, 1, 0) == payload_of(ONE, WIDE)


@pytest.mark.parametrize("kept", [(0,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_blocks_given_as_none_are_not_written(
    single: EmbeddedStore, make_wide: MakeWide, kept: tuple[int, ...]
) -> None:
    moves = Moves(make_wide(*single.data_urls).plane)
    source, target = Pool(1), Pool(2)
    marker = moves.stored(source.views(0, 1, 2, 3))
    written = [block for block in range(4) if block not in kept]
    rest = target.others(*written)
    views = target.views(0, 1, 2, 3)
    assert moves.get(marker, [None if n in kept else views[n] for n in range(4)]).ok
    assert target.content(*written) == source.content(*written)
    assert target.others(*written) == rest


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (flipped(5), "corrupt: layout version"),
        (flipped(HEADER_BYTES - 1), "checksum"),
        (flipped(HEADER_BYTES), "checksum"),
        (flipped(HEADER_BYTES + 2 * BLOCK), "checksum"),
        (flipped(HEADER_BYTES + 4 * BLOCK - 1), "checksum"),
        (lambda value: b"", "corrupt: 0 bytes"),
        (lambda value: value[:10], "corrupt: 10 bytes"),
        (lambda value: value[: HEADER_BYTES + BLOCK], "corrupt: "),
        (lambda value: value[:-1], "corrupt: "),
        (lambda value: value + b"x", "corrupt: "),
        (lambda value: value + value, "corrupt: "),
    ],
)
def test_a_damaged_value_is_lost_and_writes_only_its_own_pieces(
    single: EmbeddedStore,
    make_wide: MakeWide,
    change: Callable[[bytes], bytes],
    expected: str,
) -> None:
    transfers = make_wide(*single.data_urls)
    moves, source, target = Moves(transfers.plane), Pool(1), Pool(2)
    marker = moves.stored(source.views(0, 1, 2, 3))
    with plain_client(single.data_urls[0]) as client:
        value = client.get(chunk_key(FINGERPRINT, ONE))
        assert isinstance(value, bytes)
        client.set(chunk_key(FINGERPRINT, ONE), change(value))
    rest = target.others(6, 1, 4)
    _, *views = target.views(0, 6, 1, 4)
    result = moves.get(marker, [None, *views])
    assert (result.ok, result.gone, result.bytes) == (False, True, 0)
    assert expected in result.reason
    assert target.others(6, 1, 4) == rest
    again = moves.stored(source.views(0, 1, 2, 3))
    assert moves.get(again, [None, *views]).ok
    assert target.content(6, 1, 4) == source.content(1, 2, 3)


# --- when the source is free ----------------------------------------------------------------------


def test_the_source_is_not_free_before_the_server_has_the_value(
    make_wide: MakeWide, link: LinkProxy
) -> None:
    transfers = make_wide(link.url)
    moves, source = Moves(transfers.plane), Pool(1)
    assert transfers.plane.wait_connected(PATIENCE_S)
    held = link.hold_at(is_set, after=4 * BLOCK)  # holds back the last HEADER_BYTES
    put = moves.put_later(source.views(0, 1, 2, 3))
    assert held.wait(PATIENCE_S)
    time.sleep(0.1)
    assert moves.calls == []
    link.mend()
    assert put().ok
    assert moves.calls == ["copied", "done"]


def test_the_source_is_freed_once_if_a_put_fails_or_never_runs(
    single: EmbeddedStore, make_wide: MakeWide
) -> None:
    transfers = make_wide(*single.data_urls, tuning=SHORT_DEADLINES)
    moves, source = Moves(transfers.plane), Pool(1)
    assert transfers.plane.wait_connected(PATIENCE_S)
    with frozen(single.pid("data0")):
        assert "did not answer in time" in moves.put_later(source.views(0, 1, 2, 3))().reason
    transfers.plane.close()
    assert moves.put_later(source.views(0, 1, 2, 3))().reason == CLOSED
    assert moves.calls == ["copied", "done"] * 2


# --- links ----------------------------------------------------------------------------------------


def is_set(command: tuple[bytes, ...]) -> bool:
    return command[0] == b"SET"


def test_a_put_disconnected_within_the_value_is_sent_again_from_the_source(
    single: EmbeddedStore, make_wide: MakeWide, link: LinkProxy
) -> None:
    transfers = make_wide(link.url)
    moves, source = Moves(transfers.plane), Pool(1)
    assert transfers.plane.wait_connected(PATIENCE_S)
    held = link.hold_at(is_set, after=3 * BLOCK)
    put = moves.put_later(source.views(3, 2, 1, 0))
    assert held.wait(PATIENCE_S)
    assert moves.calls == []
    link.cut()
    link.mend()
    marker = put().marker
    assert marker is not None
    assert moves.calls == ["copied", "done"]
    assert transfers.get(ONE, marker)[1] == source.content(3, 2, 1, 0)


def test_a_get_disconnected_within_the_value_is_received_again(
    single: EmbeddedStore, make_wide: MakeWide, link: LinkProxy
) -> None:
    moves = Moves(make_wide(link.url).plane)
    source, target = Pool(1), Pool(2)
    marker = moves.stored(source.views(0, 1, 2, 3))
    rest = target.others(0, 1, 2, 3)
    held = link.hold_replies(2 * BLOCK)
    get = moves.get_later(marker, target.views(0, 1, 2, 3))
    assert held.wait(PATIENCE_S)
    link.cut()
    link.mend()
    assert get().ok
    assert target.content(0, 1, 2, 3) == source.content(0, 1, 2, 3)
    assert target.others(0, 1, 2, 3) == rest


def test_a_get_that_misses_its_deadline_writes_nothing_after_it(
    single: EmbeddedStore, make_wide: MakeWide, link: LinkProxy
) -> None:
    source, target = Pool(1), Pool(2)
    marker = Moves(make_wide(*single.data_urls).plane).stored(source.views(0, 1, 2, 3))
    hasty = make_wide(link.url, tuning=SHORT_DEADLINES).plane
    assert hasty.wait_connected(PATIENCE_S)
    moves = Moves(hasty)
    link.hold_replies(2 * BLOCK)
    result = moves.get(marker, target.views(0, 1, 2, 3))
    assert (result.ok, result.gone) == (False, False)
    target.data[:] = bytes(len(target.data))  # as if another request used the blocks now
    link.mend()
    other = Pool(3)
    wait_until(lambda: moves.get(marker, other.views(0, 1, 2, 3)).ok, "the server to be used")
    assert other.content(0, 1, 2, 3) == source.content(0, 1, 2, 3)
    assert not any(target.data)


def test_blocks_are_transferred_over_tls(
    single: EmbeddedStore, make_wide: MakeWide, loop: WireLoop, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    source, target = Pool(1), Pool(2)
    rest = target.others(4, 0, 2)
    with tls_before(loop, single.data_urls[0], certificate) as place:
        transfers = make_wide(f"rediss://{place}?ssl_ca_certs={certificate}")
        moves = Moves(transfers.plane)
        marker = moves.stored(source.views(0, 1, 2, 3))
        first, second, third = target.views(4, 0, 2)
        assert moves.get(marker, [first, None, second, third]).ok
        transfers.plane.close()
    assert target.content(4, 0, 2) == source.content(0, 2, 3)
    assert target.others(4, 0, 2) == rest


# --- invalid arguments ----------------------------------------------------------------------------


def test_pieces_of_a_wrong_size_raise_value_error(
    single: EmbeddedStore, make_wide: MakeWide
) -> None:
    moves = Moves(make_wide(*single.data_urls).plane)
    marker = moves.stored(Pool(1).views(0, 1, 2, 3))
    for wrong in ([], Pool(1).views(0, 1, 2), [memoryview(bytearray(BLOCK - 1))] * 4):
        with pytest.raises(ValueError, match=f"equal size, {WIDE.chunk_bytes} bytes in total"):
            moves.put_later(wrong)
        with pytest.raises(ValueError, match=f"equal size, {WIDE.chunk_bytes} bytes in total"):
            moves.get(marker, wrong)


def test_direct_operations_are_refused_for_head_shards(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    sharded = msgspec.structs.replace(WIDE, kv_shards=2)
    moves = Moves(make_transfers(single.data_urls, layout=sharded).plane)
    with pytest.raises(ValueError, match="kv_shards is 2"):
        moves.put_later(Pool(1).views(0, 1, 2, 3))
