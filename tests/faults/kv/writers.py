"""Rows of the KV fault matrix: a writer that is killed at each step of the write order.

In: nothing. Out: FAULTS. The writer is a process. Its links can hold each command before the server
gets it, so the writer dies exactly between two commands.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton_kvstore.keys import marker_key
from baton_node.store.base import ChunkFetched
from baton_protocol.layout import VALUE_HEADER_BYTES
from baton_protocol.link import NoFirstTokens, PrefillJob, RunJob
from tests.faults.kv.cells import CONNECTIONS, Action, Cell, Deadline, Fault, of_each_kind
from tests.faults.kv.values import SHARDED
from tests.faults.kv.writer_process import EngineChoice, WriterSettings
from tests.support.kv_faults.testbed import KVTestbed

ROOT = Path(__file__).resolve().parents[3]
EXIT_S = 20.0
Step = Callable[[KVTestbed], threading.Event]


def in_value(shard: int) -> Step:
    """Half of a shard's SET has been sent."""

    def hold(testbed: KVTestbed) -> threading.Event:
        key, half = (
            testbed.key(testbed.target, shard),
            (VALUE_HEADER_BYTES + testbed.layout.shard_bytes) // 2,
        )
        return testbed.link("w0", "data0").hold_at(lambda words: words[-1] == key, half)

    return hold


def before_value(shard: int) -> Step:
    """All shards before this one are acknowledged; this one is not sent."""

    def hold(testbed: KVTestbed) -> threading.Event:
        key = testbed.key(testbed.target, shard)
        return testbed.link("w0", "data0").hold_at(lambda words: words[-1] == key)

    return hold


def before_marker(testbed: KVTestbed) -> threading.Event:
    """All shards are acknowledged."""
    key = marker_key(testbed.fingerprint, testbed.names()[testbed.target])
    return testbed.link("w0", "index").hold_at(lambda words: words[-1] == key)


def before_inbox(testbed: KVTestbed) -> threading.Event:
    """The marker is written; later announcements are not."""
    key, passed = (
        marker_key(testbed.fingerprint, testbed.names()[testbed.target]),
        threading.Event(),
    )

    def fits(words: tuple[bytes, ...]) -> bool:
        if words[-1] == key:
            passed.set()
        return passed.is_set() and words[0] in (b"MULTI", b"XADD")

    return testbed.link("w0", "index").hold_at(fits)


def after_announcement(testbed: KVTestbed) -> threading.Event:
    """All chunks up to this one are announced; the next one's put is in flight."""
    key = testbed.key(testbed.target + 1)
    return testbed.link("w0", "data0").hold_at(lambda words: words[-1] == key)


def killed(
    step: Step, *, shards: int, marked: bool, announced: bool, placed_again: bool = True
) -> Action:
    """Kill the writer at a step. The store then holds `shards` of the chunk's values, and its
    marker if `marked`; the decode node knows of the chunk if `announced`. With `placed_again`, the
    router then places the request again."""

    def run(testbed: KVTestbed) -> None:
        target, travelling = testbed.target, testbed.travelling()
        caught = step(testbed)
        hold_later_chunks(testbed)
        decode = testbed.node("d0")
        decode.take(RunJob(testbed.request, await_first=True))
        writer = start_writer(testbed)
        try:
            testbed.spin(
                lambda: caught.is_set() and is_at_step(testbed, shards, marked), "the step"
            )
            if announced:
                testbed.spin(lambda: target in fetched(testbed), "the announcement")
        finally:
            writer.kill()
            assert writer.wait(EXIT_S) == -9
        testbed.inject(cut_links)
        assert is_at_step(testbed, shards, marked)
        before = testbed.marked()
        assert testbed.is_marked(target) == marked
        assert before.count(True) <= travelling.index(target) + 1
        if placed_again:
            place_again(testbed, before)
        else:
            decode.take(
                NoFirstTokens(testbed.request.id, testbed.request.attempt, "its node was lost")
            )
            testbed.finish("d0", testbed.request)
            assert (target in fetched(testbed)) == announced
            announced_at_most = {i for i, known in zip(travelling, before, strict=True) if known}
            assert set(fetched(testbed)) <= announced_at_most
        assert decode.lost() == []

    return run


def hold_later_chunks(testbed: KVTestbed) -> None:
    """Hold the puts of all chunks after this one: the job must be unfinished when its writer
    dies."""
    later = testbed.late_keys(testbed.target + 1, index=False)
    for _ in range(CONNECTIONS):
        testbed.link("w0", "data0").hold_at(lambda words: words[-1] in later)


def start_writer(testbed: KVTestbed) -> subprocess.Popen[bytes]:
    decode = testbed.node("d0")
    settings = WriterSettings(
        index_url=testbed.link("w0", "index").url,
        data_urls=(testbed.link("w0", "data0").url,),
        engine=EngineChoice.of(testbed.settings),
        request=testbed.request,
        inbox=(decode.name, decode.epoch),
    )
    command = [
        sys.executable,
        "-m",
        "tests.faults.kv.writer_process",
        msgspec.json.encode(settings).decode(),
    ]
    return subprocess.Popen(command, cwd=ROOT)


def is_at_step(testbed: KVTestbed, shards: int, marked: bool) -> bool:
    """Return whether exactly `shards` of the chunk's values exist, and whether its marker exists as
    `marked` says."""
    with testbed.client("data0") as client:
        stored = [
            client.exists(testbed.key(testbed.target, s)) for s in range(testbed.layout.kv_shards)
        ]
    return sum(stored) == shards and testbed.is_marked(testbed.target) == marked


def cut_links(testbed: KVTestbed) -> None:
    """Drop the dead writer's bytes that its links still hold."""
    for server in ("data0", "index"):
        testbed.link("w0", server).cut()
        testbed.link("w0", server).mend()


def fetched(testbed: KVTestbed) -> list[int]:
    events = testbed.node("d0").events
    return [event.chunk.index for event in events if isinstance(event, ChunkFetched) and event.ok]


def place_again(testbed: KVTestbed, before: list[bool]) -> None:
    """Place the request again with another prefill node, which puts the chunks without a marker."""
    testbed.request = msgspec.structs.replace(testbed.request, attempt=2)
    decode, prefill = testbed.node("d0"), testbed.node("p1")
    decode.take(RunJob(testbed.request, await_first=True))
    prefill.take(PrefillJob(testbed.request, decode.name, decode.epoch))
    testbed.end_hand_off("p1", "d0")
    assert prefill.published() == before.count(False)
    assert prefill.loop.counters["announced_chunks"] == before.count(True)
    assert all(testbed.marked())


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="writer killed",
        how="SIGKILL to a prefill node at each step of the write order: in a value, after "
        "each shard, after all values, after the marker, after the inbox entry",
        checks="exactly the values, marker and announcement of that step exist; when the request "
        "is placed again, another node puts exactly the chunks without a marker",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(
                case="in a value",
                run=killed(in_value(0), shards=0, marked=False, announced=False),
                long=True,
            ),
            Cell(
                case="before the marker",
                run=killed(before_marker, shards=1, marked=False, announced=False),
            ),
            Cell(
                case="before the inbox entry",
                run=killed(before_inbox, shards=1, marked=True, announced=False),
            ),
            Cell(
                case="after the inbox entry, not placed again",
                run=killed(
                    after_announcement, shards=1, marked=True, announced=True, placed_again=False
                ),
            ),
            Cell(
                case="before the inbox entry, not placed again",
                run=killed(
                    before_inbox, shards=1, marked=True, announced=False, placed_again=False
                ),
                long=True,
            ),
            *of_each_kind(
                "before the marker", killed(before_marker, shards=1, marked=False, announced=False)
            ),
            *of_each_kind(
                "after the inbox entry, not placed again",
                killed(
                    after_announcement, shards=1, marked=True, announced=True, placed_again=False
                ),
            ),
            Cell(
                case="before the first of two shards",
                run=killed(before_value(0), shards=0, marked=False, announced=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="between two shards",
                run=killed(before_value(1), shards=1, marked=False, announced=False),
                settings=SHARDED,
            ),
            Cell(
                case="in the second of two shards",
                run=killed(in_value(1), shards=1, marked=False, announced=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="two shards, before the marker",
                run=killed(before_marker, shards=2, marked=False, announced=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="two shards, before the inbox entry",
                run=killed(before_inbox, shards=2, marked=True, announced=False),
                settings=SHARDED,
                long=True,
            ),
        ),
    ),
)
