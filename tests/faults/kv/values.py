"""Rows of the KV fault matrix: what befalls stored values and their markers.

In: nothing. Out: FAULTS. Each strikes between the last marker and the lookup; what must be seen is
exact: so many chunks lost for this reason, all others fetched and used.
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
from tests.faults.kv.cells import Act, Cell, Deadline, Fault, lost, stored
from tests.support.kv_faults.stage import CHUNKS, OTHER, SMALL, Stage
from tests.support.stores.kvstore import Transfers

Change = Callable[[bytes], bytes]
HIT = 5  # a chunk in mid-prefix
SHARDED = replace(SMALL, kv_shards=2)
QUICK = Deadline()
# Offsets of the header's fields (kvstore/baton_kvstore/data/chunk_format.py).
FIELDS = {
    **{"magic": 0, "layout version": 4, "shard": 6, "tokens": 8, "reserved": 12},
    **{"payload bytes": 16, "fingerprint": 24, "chunk hash": 40, "writer epoch": 56},
    **{"reserved end": 79, "checksum": 80, "checksum end": 95},
}
FIRST = VALUE_HEADER_BYTES


def change(what: Change, chunks: Sequence[int] = (HIT,), shard: int = 0) -> Act:
    def strike(stage: Stage) -> None:
        for chunk in chunks:
            key = stage.key(chunk, shard)
            stage.overwrite(key, what(stage.value(key)))

    return strike


def flip(position: int, bit: int = 0) -> Change:
    def flipped(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[position] ^= 1 << bit
        return bytes(changed)

    return flipped


def swap(pairs: Callable[[Stage], list[tuple[bytes, bytes]]]) -> Act:
    """Exchange the values of keys; their lifetimes stay."""

    def strike(stage: Stage) -> None:
        for one, other in pairs(stage):
            first, second = stage.value(one), stage.value(other)
            stage.overwrite(one, second)
            stage.overwrite(other, first)

    return strike


def across(chunks: Sequence[int]) -> Act:
    """The same chunks of two prompts change places; both prompts are asked for."""

    def play(stage: Stage) -> None:
        other = stage.ask("other", OTHER)
        stage.publish(other)
        pairs = [(chunk, 0, None) for chunk in chunks], [(chunk, 0, other) for chunk in chunks]

        def strike(stage: Stage) -> None:
            keys = [[stage.key(*place) for place in places] for places in pairs]
            swap(lambda _: list(zip(*keys, strict=True)))(stage)

        stored(strike, lost(len(chunks), "chunk hash"))(stage)
        stage.run("d1", other)
        assert len(stage.node("d1").lost()) == len(chunks)
        stage.compare_pages("d1", other)

    return play


def delete_value(shard: int = 0, chunk: int = HIT) -> Act:
    def strike(stage: Stage) -> None:
        key = stage.key(chunk, shard)
        with stage.holder(key) as client:
            client.delete(key)

    return strike


def delete_marker(stage: Stage) -> None:
    with stage.client("index") as client:
        assert client.delete(marker_key(stage.fingerprint, stage.names()[HIT]))


def one_not_found(stage: Stage) -> None:
    """The hole was computed; both of its sides came."""
    node = stage.node("d0")
    assert (node.fetched(), node.lost()) == (CHUNKS - 1, [])
    assert node.loop.counters.reused_chunks == CHUNKS - 1
    use = node.prompted(stage.request.id).stats
    assert use.fetched_tokens == (CHUNKS - 1) * stage.layout.chunk_tokens


def lie(**fields: object) -> Act:
    """Another marker, as an older or a foreign pool might have left it."""

    def strike(stage: Stage) -> None:
        codec: Codec[Marker] = Codec(Marker)
        key = marker_key(stage.fingerprint, stage.names()[HIT])
        with stage.client("index") as client:
            raw = client.get(key)
            assert isinstance(raw, bytes)
            marker = msgspec.structs.replace(codec.decode(raw), **fields)
            client.set(key, codec.encode(marker), keepttl=True)

    return strike


def garble(stage: Stage) -> None:
    key = marker_key(stage.fingerprint, stage.names()[HIT])
    with stage.client("index") as client:
        client.set(key, b"\xff not a marker", keepttl=True)


def evict(stage: Stage) -> None:
    """The server itself takes a chunk in mid-prefix: the first to expire, when room is wanted."""
    with stage.client("data0") as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory-samples", 64)
        client.pexpire(stage.key(HIT), 600_000)
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + (64 << 10))
        for number in range(10_000):
            if client.info("stats")["evicted_keys"]:
                break
            client.set(f"junk:{number}", bytes(4096), ex=36_000)
        assert not client.exists(stage.key(HIT))


def some_evicted(stage: Stage) -> None:
    node = stage.node("d0")
    assert 1 <= len(node.lost()) < CHUNKS / 2
    assert set(node.lost()) == {"missing"}
    assert node.fetched() == CHUNKS - len(node.lost())
    assert node.loop.counters.reused_chunks == node.fetched()


def every_bit(positions: Callable[[int], Sequence[int]], bits: Sequence[int]) -> Act:
    """One value, flipped at each of these places in turn, and asked for each time: no byte of any
    of them is handed out."""

    def play(stage: Stage) -> None:
        stage.publish()
        node = stage.node("d0")
        transfers = Transfers(node.connector.plane, stage.layout)
        name, key = stage.names()[HIT], stage.key(HIT)
        marker, value = stage.marker(HIT), stage.value(key)
        for position in positions(len(value)):
            for bit in bits:
                stage.overwrite(key, flip(position, bit)(value))
                result, payload = transfers.get(name, marker, HIT)
                found = (result.ok, result.gone, payload)
                assert found == (False, True, b""), f"byte {position}, bit {bit}"
        stage.overwrite(key, value)
        node.take(RunJob(stage.request))
        stage.finish("d0", stage.request)
        assert node.fetched() == CHUNKS

    return play


def scattered(size: int) -> list[int]:
    return random.Random(size).sample(range(FIRST, size), 200)


def _cells(
    cases: dict[str, Act],
    bites: Act,
    settings: SimSettings = SMALL,
    short: Sequence[str] | None = None,
) -> tuple[Cell, ...]:
    """One for each act; those that `short` names are for every run, all where it names none."""
    return tuple(
        Cell(
            case=case,
            play=stored(act, bites),
            settings=settings,
            long=short is not None and case not in short,
        )
        for case, act in cases.items()
    )


TRUNCATED: dict[str, Act] = {
    "one byte short": change(lambda value: value[:-1]),
    "half": change(lambda value: value[: len(value) // 2]),
    "the header alone": change(lambda value: value[:FIRST]),
    "half a header": change(lambda value: value[: FIRST // 2]),
    "nothing": change(lambda value: b""),
    "one byte more": change(lambda value: value + b"\0"),
    "twice": change(lambda value: value + value),
    "zeroes behind the header": change(lambda value: value[:FIRST] + bytes(len(value) - FIRST)),
}
FLIPPED: dict[str, Act] = {name: change(flip(at)) for name, at in FIELDS.items()} | {
    "first payload byte": change(flip(FIRST)),
    "middle": change(lambda value: flip(len(value) // 2, 7)(value)),
    "last byte": change(flip(-1, 3)),
    "every chunk": change(flip(FIRST + 1), range(CHUNKS)),
}
SHORT_FLIPS = ("writer epoch", "last byte")
SHORT_CUTS = ("one byte short", "zeroes behind the header")

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="truncated value",
        how="one chunk's value is cut or lengthened in place: 7 lengths, and zeroes for a payload",
        seen="that chunk is counted lost as corrupt, its marker dropped; its neighbours are used",
        deadline=QUICK,
        cells=_cells(TRUNCATED, lost(1, "corrupt"), short=SHORT_CUTS),
    ),
    Fault(
        name="flipped byte",
        how="one bit: in each header field, the checksum, the first, middle and last payload byte; "
        "then each bit of the header and of scattered payload bytes, asked for each time",
        seen="lost as corrupt; no byte of it is handed out",
        deadline=QUICK,
        cells=(
            *_cells(
                {name: act for name, act in FLIPPED.items() if name != "every chunk"},
                lost(1, "corrupt"),
                short=SHORT_FLIPS,
            ),
            *_cells({"every chunk": FLIPPED["every chunk"]}, lost(CHUNKS, "corrupt")),
            *_cells({"of shard 1": change(flip(FIRST), shard=1)}, lost(1, "corrupt"), SHARDED),
            Cell(case="each bit of the header", play=every_bit(lambda _: range(FIRST), range(8))),
            Cell(case="scattered payload bits", play=every_bit(scattered, (0, 7)), long=True),
            Cell(
                case="each byte of a value",
                play=every_bit(range, (4,)),
                long=True,
            ),
        ),
    ),
    Fault(
        name="values swapped within a prompt",
        how="two chunks' values change places; the whole prompt is turned round; two shards of one "
        "chunk change places",
        seen="each is lost: the header names another chunk, or another shard",
        deadline=QUICK,
        cells=(
            Cell(
                case="two chunks",
                play=stored(
                    swap(lambda stage: [(stage.key(3), stage.key(7))]), lost(2, "chunk hash")
                ),
            ),
            Cell(
                case="turned round",
                play=stored(
                    swap(lambda s: [(s.key(i), s.key(CHUNKS - 1 - i)) for i in range(CHUNKS // 2)]),
                    lost(CHUNKS, "chunk hash"),
                ),
                long=True,
            ),
            Cell(
                case="two shards",
                play=stored(
                    swap(lambda stage: [(stage.key(HIT, 0), stage.key(HIT, 1))]), lost(1, "shard")
                ),
                settings=SHARDED,
            ),
        ),
    ),
    Fault(
        name="values swapped across prompts",
        how="the same chunk, or all chunks, of two prompts change places; both are asked for",
        seen="lost in both; pages of both compared",
        deadline=QUICK,
        cells=(
            Cell(case="one chunk", play=across((HIT,))),
            Cell(case="all chunks", play=across(range(CHUNKS)), long=True),
        ),
    ),
    Fault(
        name="missing marker",
        how="the marker of a chunk in mid-prefix is deleted; the value lives",
        seen="the hole is computed, both sides of it are fetched and used",
        deadline=QUICK,
        cells=_cells({"one": delete_marker}, one_not_found),
    ),
    Fault(
        name="marker without value",
        how="the value of a chunk in mid-prefix is deleted, or one of its two shards",
        seen="lost as missing, its marker dropped; half a chunk is no chunk",
        deadline=QUICK,
        cells=(
            *_cells({"whole": delete_value()}, lost(1, "missing")),
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
        how="maxmemory, volatile-ttl, and other keys that want room: the server evicts a chunk in "
        "the middle",
        seen="evicted_keys of the server; lost as missing; what is behind it is fetched and used",
        deadline=QUICK,
        cells=_cells({"volatile-ttl": evict}, some_evicted),
    ),
    Fault(
        name="a marker that lies",
        how="another instance, size, number of shards or run id; bytes that are no marker",
        seen="that chunk is not fetched, whatever its value says; all others are",
        deadline=QUICK,
        cells=(
            Cell(case="instance", play=stored(lie(instance=7), one_not_found), long=True),
            Cell(case="run id", play=stored(lie(run_id="0" * 40), one_not_found)),
            Cell(case="size", play=stored(lie(payload_bytes=1), lost(1, "stored"))),
            Cell(case="shards", play=stored(lie(shards=3), lost(1, "stored")), long=True),
            Cell(case="no marker", play=stored(garble, one_not_found), long=True),
        ),
    ),
)
