"""Rows of the KV fault matrix: damaged, swapped and missing values and markers.

In: nothing. Out: FAULTS. Each fault is injected between the last marker and the lookup. The checks
are exact: how many chunks are lost, for which reason, and that all others are fetched and used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from baton_engine.sim.build import SimSettings
from baton_kvstore.keys import marker_key
from baton_protocol.layout import VALUE_HEADER_BYTES
from baton_protocol.link import RunJob
from baton_protocol.store import Marker
from baton_protocol.wire import Codec
from tests.faults.kv.cells import Action, Cell, Deadline, Fault, lost, of_each_kind, stored
from tests.support.kv_faults.testbed import CHUNKS, OTHER, SMALL, TARGET, KVTestbed
from tests.support.stores.kvstore import Transfers

Change = Callable[[bytes], bytes]
SHARDED = replace(SMALL, kv_shards=2)
QUICK = Deadline()
# Offsets of the header's fields (kvstore/baton_kvstore/data/chunk_format.py).
FIELDS = {
    **{"magic": 0, "layout version": 4, "shard": 6, "tokens": 8, "reserved": 12},
    **{"payload bytes": 16, "fingerprint": 24, "chunk hash": 40, "writer epoch": 56},
    **{"reserved end": 79, "checksum": 80, "checksum end": 95},
}
FIRST = VALUE_HEADER_BYTES


def change(edit: Change, chunks: Sequence[int] | None = None, shard: int = 0) -> Action:
    """Change the values of these chunks, or of the testbed's target."""

    def inject(testbed: KVTestbed) -> None:
        for chunk in chunks or (testbed.target,):
            key = testbed.key(chunk, shard)
            testbed.overwrite(key, edit(testbed.value(key)))

    return inject


def flip(position: int, bit: int = 0) -> Change:
    def flipped(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[position] ^= 1 << bit
        return bytes(changed)

    return flipped


def swap(pairs: Callable[[KVTestbed], list[tuple[bytes, bytes]]]) -> Action:
    """Exchange the values of keys; keep their TTLs."""

    def inject(testbed: KVTestbed) -> None:
        for one, other in pairs(testbed):
            first, second = testbed.value(one), testbed.value(other)
            testbed.overwrite(one, second)
            testbed.overwrite(other, first)

    return inject


def swap_across_prompts(chunks: Sequence[int]) -> Action:
    """Swap the same chunks of two prompts, and run requests with both prompts."""

    def run(testbed: KVTestbed) -> None:
        other = testbed.make_request("other", OTHER)
        testbed.publish(other)
        pairs = [(chunk, 0, None) for chunk in chunks], [(chunk, 0, other) for chunk in chunks]

        def inject(testbed: KVTestbed) -> None:
            keys = [[testbed.key(*place) for place in places] for places in pairs]
            swap(lambda _: list(zip(*keys, strict=True)))(testbed)

        stored(inject, lost(len(chunks), "chunk hash"))(testbed)
        testbed.run("d1", other)
        assert len(testbed.node("d1").lost()) == len(chunks)
        testbed.compare_pages("d1", other)

    return run


def delete_value(shard: int = 0) -> Action:
    def inject(testbed: KVTestbed) -> None:
        key = testbed.key(testbed.target, shard)
        with testbed.holder(key) as client:
            client.delete(key)

    return inject


def delete_marker(testbed: KVTestbed) -> None:
    with testbed.client("index") as client:
        assert client.delete(marker_key(testbed.fingerprint, testbed.names()[TARGET]))


def one_not_found(testbed: KVTestbed) -> None:
    """Assert that one chunk was not found and all others were fetched and used."""
    node = testbed.node("d0")
    assert (node.fetched(), node.lost()) == (CHUNKS - 1, [])
    assert node.loop.counters["reused_chunks"] == CHUNKS - 1
    stats = node.prompted(testbed.request.id).stats
    assert stats.fetched_tokens == (CHUNKS - 1) * testbed.layout.chunk_tokens


def change_marker(**fields: object) -> Action:
    """Change fields of the marker, as an older or another pool may have written them."""

    def inject(testbed: KVTestbed) -> None:
        codec: Codec[Marker] = Codec(Marker)
        key = marker_key(testbed.fingerprint, testbed.names()[TARGET])
        with testbed.client("index") as client:
            raw = client.get(key)
            assert isinstance(raw, bytes)
            marker = msgspec.structs.replace(codec.decode(raw), **fields)
            client.set(key, codec.encode(marker), keepttl=True)

    return inject


def overwrite_marker(testbed: KVTestbed) -> None:
    key = marker_key(testbed.fingerprint, testbed.names()[TARGET])
    with testbed.client("index") as client:
        client.set(key, b"\xff not a marker", keepttl=True)


def evict(testbed: KVTestbed) -> None:
    """Fill the data server until it evicts a chunk in mid-prefix, which expires first."""
    with testbed.client("data0") as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory-samples", 64)
        client.pexpire(testbed.key(TARGET), 600_000)
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + (64 << 10))
        for number in range(10_000):
            if client.info("stats")["evicted_keys"]:
                break
            client.set(f"junk:{number}", bytes(4096), ex=36_000)
        assert not client.exists(testbed.key(TARGET))


def some_evicted(testbed: KVTestbed) -> None:
    node = testbed.node("d0")
    assert 1 <= len(node.lost()) < CHUNKS / 2
    assert set(node.lost()) == {"missing"}
    assert node.fetched() == CHUNKS - len(node.lost())
    assert node.loop.counters["reused_chunks"] == node.fetched()


def every_bit(positions: Callable[[int], Sequence[int]], bits: Sequence[int]) -> Action:
    """Flip each of these bits of one value in turn, and get it each time: no byte may be
    returned."""

    def run(testbed: KVTestbed) -> None:
        testbed.publish()
        node = testbed.node("d0")
        transfers = Transfers(node.connector.plane, testbed.layout)
        name, key = testbed.names()[TARGET], testbed.key(TARGET)
        marker, value = testbed.marker(TARGET), testbed.value(key)
        for position in positions(len(value)):
            for bit in bits:
                testbed.overwrite(key, flip(position, bit)(value))
                result, payload = transfers.get(name, marker, TARGET)
                outcome = (result.ok, result.gone, payload)
                assert outcome == (False, True, b""), f"byte {position}, bit {bit}"
        testbed.overwrite(key, value)
        node.take(RunJob(testbed.request))
        testbed.finish("d0", testbed.request)
        assert node.fetched() == CHUNKS

    return run


def random_positions(size: int) -> list[int]:
    return random.Random(size).sample(range(FIRST, size), 200)


def _cells(
    cases: dict[str, Action],
    check: Action,
    settings: SimSettings = SMALL,
    short: Sequence[str] | None = None,
) -> tuple[Cell, ...]:
    """Return a cell for each case. Those in `short` run always, the others only in `make
    test-long`; without `short` all run always."""
    return tuple(
        Cell(
            case=case,
            run=stored(inject, check),
            settings=settings,
            long=short is not None and case not in short,
        )
        for case, inject in cases.items()
    )


TRUNCATED: dict[str, Action] = {
    "one byte short": change(lambda value: value[:-1]),
    "half": change(lambda value: value[: len(value) // 2]),
    "the header alone": change(lambda value: value[:FIRST]),
    "half a header": change(lambda value: value[: FIRST // 2]),
    "nothing": change(lambda value: b""),
    "one byte more": change(lambda value: value + b"\0"),
    "twice": change(lambda value: value + value),
    "zeroes after the header": change(lambda value: value[:FIRST] + bytes(len(value) - FIRST)),
}
FLIPPED: dict[str, Action] = {name: change(flip(at)) for name, at in FIELDS.items()} | {
    "first payload byte": change(flip(FIRST)),
    "middle": change(lambda value: flip(len(value) // 2, 7)(value)),
    "last byte": change(flip(-1, 3)),
    "every chunk": change(flip(FIRST + 1), range(CHUNKS)),
}
SHORT_FLIPS = ("writer epoch", "last byte")
SHORT_CUTS = ("one byte short", "zeroes after the header")

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="truncated value",
        how="one chunk's value gets another length: 7 cases, and a payload of zeroes",
        checks="the chunk is counted lost as corrupt and its marker dropped; all others are used",
        deadline=QUICK,
        cells=(
            *_cells(TRUNCATED, lost(1, "corrupt"), short=SHORT_CUTS),
            *of_each_kind("half", stored(TRUNCATED["half"], lost(1, "corrupt"))),
        ),
    ),
    Fault(
        name="flipped byte",
        how="one bit: in each header field, the checksum, the first, middle and last payload byte; "
        "then each bit of the header and of random payload bytes, with a get each",
        checks="the chunk is lost as corrupt; no byte of it is returned",
        deadline=QUICK,
        cells=(
            *_cells(
                {name: inject for name, inject in FLIPPED.items() if name != "every chunk"},
                lost(1, "corrupt"),
                short=SHORT_FLIPS,
            ),
            *_cells({"every chunk": FLIPPED["every chunk"]}, lost(CHUNKS, "corrupt")),
            *_cells({"of shard 1": change(flip(FIRST), shard=1)}, lost(1, "corrupt"), SHARDED),
            *of_each_kind("last byte", stored(FLIPPED["last byte"], lost(1, "corrupt"))),
            Cell(case="each bit of the header", run=every_bit(lambda _: range(FIRST), range(8))),
            Cell(case="random payload bits", run=every_bit(random_positions, (0, 7)), long=True),
            Cell(
                case="each byte of a value",
                run=every_bit(range, (4,)),
                long=True,
            ),
        ),
    ),
    Fault(
        name="values swapped within a prompt",
        how="two chunks' values are swapped; the order of all values is reversed; two shards of "
        "one chunk are swapped",
        checks="each is lost: its header names another chunk or another shard",
        deadline=QUICK,
        cells=(
            Cell(
                case="two chunks",
                run=stored(
                    swap(lambda testbed: [(testbed.key(3), testbed.key(7))]), lost(2, "chunk hash")
                ),
            ),
            Cell(
                case="all reversed",
                run=stored(
                    swap(lambda s: [(s.key(i), s.key(CHUNKS - 1 - i)) for i in range(CHUNKS // 2)]),
                    lost(CHUNKS, "chunk hash"),
                ),
                long=True,
            ),
            Cell(
                case="two shards",
                run=stored(
                    swap(lambda testbed: [(testbed.key(TARGET, 0), testbed.key(TARGET, 1))]),
                    lost(1, "shard"),
                ),
                settings=SHARDED,
            ),
        ),
    ),
    Fault(
        name="values swapped across prompts",
        how="one chunk or all chunks of two prompts are swapped; requests with both prompts follow",
        checks="the chunks are lost for both; the pages of both are right",
        deadline=QUICK,
        cells=(
            Cell(case="one chunk", run=swap_across_prompts((TARGET,))),
            Cell(case="all chunks", run=swap_across_prompts(range(CHUNKS)), long=True),
        ),
    ),
    Fault(
        name="missing marker",
        how="the marker of a chunk in mid-prefix is deleted; its value stays",
        checks="the chunk is computed; all others are fetched and used",
        deadline=QUICK,
        cells=_cells({"one": delete_marker}, one_not_found),
    ),
    Fault(
        name="marker without value",
        how="the value of a chunk in mid-prefix is deleted, or one of its two shards",
        checks="the chunk is lost as missing and its marker dropped; one of two shards is not used",
        deadline=QUICK,
        cells=(
            *_cells({"whole": delete_value()}, lost(1, "missing")),
            *of_each_kind("whole", stored(delete_value(), lost(1, "missing"))),
            *_cells(
                {f"shard {n}": delete_value(n) for n in (0, 1)},
                lost(1, "missing"),
                SHARDED,
                short=("shard 1",),
            ),
        ),
    ),
    Fault(
        name="evicted in mid-prefix",
        how="maxmemory with volatile-ttl, and other keys that need room: the server evicts a "
        "chunk in mid-prefix",
        checks="the server counts evicted keys; the chunk is lost as missing; later ones are used",
        deadline=QUICK,
        cells=_cells({"volatile-ttl": evict}, some_evicted),
    ),
    Fault(
        name="wrong marker",
        how="another instance, size, number of shards or run id; bytes that are not a marker",
        checks="the chunk is not used, although its value is right; all others are",
        deadline=QUICK,
        cells=(
            Cell(case="instance", run=stored(change_marker(instance=7), one_not_found), long=True),
            Cell(case="run id", run=stored(change_marker(run_id="0" * 40), one_not_found)),
            Cell(case="size", run=stored(change_marker(payload_bytes=1), lost(1, "1 bytes"))),
            Cell(
                case="shards", run=stored(change_marker(shards=3), lost(1, "3 shards")), long=True
            ),
            Cell(case="no marker", run=stored(overwrite_marker, one_not_found), long=True),
        ),
    ),
)
