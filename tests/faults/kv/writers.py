"""Rows of the KV fault matrix: a writer that is killed at each step of the write order.

In: nothing. Out: FAULTS. The writer is a process; its links show each command before it reaches the
server, so that it dies exactly between two of them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton_kvstore.keys import marker_key
from baton_node.store.base import Fetched
from baton_protocol.layout import VALUE_HEADER_BYTES
from baton_protocol.link import NoFirstTokens, PrefillJob, RunJob
from tests.faults.kv.cells import CONNECTIONS, Act, Cell, Deadline, Fault
from tests.faults.kv.values import HIT, SHARDED
from tests.faults.kv.writer_process import Writing
from tests.support.kv_faults.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
END_S = 20.0
Step = Callable[[Stage], threading.Event]


def in_value(shard: int) -> Step:
    """Half of a shard's SET has been sent."""

    def hold(stage: Stage) -> threading.Event:
        key, half = stage.key(HIT, shard), (VALUE_HEADER_BYTES + stage.layout.shard_bytes) // 2
        return stage.link("w0", "data0").hold_at(lambda words: words[-1] == key, half)

    return hold


def before_value(shard: int) -> Step:
    """The shards before this one are acknowledged, it is not sent."""

    def hold(stage: Stage) -> threading.Event:
        key = stage.key(HIT, shard)
        return stage.link("w0", "data0").hold_at(lambda words: words[-1] == key)

    return hold


def before_marker(stage: Stage) -> threading.Event:
    """All shards are acknowledged."""
    key = marker_key(stage.fingerprint, stage.names()[HIT])
    return stage.link("w0", "index").hold_at(lambda words: words[-1] == key)


def before_inbox(stage: Stage) -> threading.Event:
    """The marker is written; whatever would be announced from here on is not."""
    key, passed = marker_key(stage.fingerprint, stage.names()[HIT]), threading.Event()

    def fits(words: tuple[bytes, ...]) -> bool:
        if words[-1] == key:
            passed.set()
        return passed.is_set() and words[0] in (b"MULTI", b"XADD")

    return stage.link("w0", "index").hold_at(fits)


def announced(stage: Stage) -> threading.Event:
    """Everything up to this chunk is announced; the next one is on its way."""
    key = stage.key(HIT + 1)
    return stage.link("w0", "data0").hold_at(lambda words: words[-1] == key)


def killed(step: Step, *, shards: int, marked: bool, told: bool, placed_again: bool = True) -> Act:
    """`shards` of the chunk's values are there when the writer dies, its marker if `marked`, and
    the decode node was told of it if `told`."""

    def play(stage: Stage) -> None:
        caught = step(stage)
        keep_back(stage)
        decode = stage.node("d0")
        decode.take(RunJob(stage.request, await_first=True))
        writer = start_writer(stage)
        try:
            stage.spin(lambda: caught.is_set() and as_far_as(stage, shards, marked), "the step")
            if told:
                stage.spin(lambda: HIT in fetched(stage), "the announcement")
        finally:
            writer.kill()
            assert writer.wait(END_S) == -9
        stage.strike(cut_links)
        assert as_far_as(stage, shards, marked)
        before = stage.marked()
        assert before[HIT] == marked
        assert before.count(True) <= HIT + 1
        if placed_again:
            place_again(stage, before)
        else:
            decode.take(NoFirstTokens(stage.request.id, stage.request.attempt, "its node was lost"))
            stage.finish("d0", stage.request)
            assert (HIT in fetched(stage)) == told
            assert set(fetched(stage)) <= {i for i, there in enumerate(before) if there}
        assert decode.lost() == []

    return play


def keep_back(stage: Stage) -> None:
    """No chunk behind this one is put: the job is under way when its writer dies."""
    later = stage.late_keys(HIT + 1, index=False)
    for _ in range(CONNECTIONS):
        stage.link("w0", "data0").hold_at(lambda words: words[-1] in later)


def start_writer(stage: Stage) -> subprocess.Popen[bytes]:
    decode = stage.node("d0")
    writing = Writing(
        index_url=stage.link("w0", "index").url,
        data_urls=(stage.link("w0", "data0").url,),
        settings=stage.settings,
        request=stage.request,
        inbox=(decode.name, decode.epoch),
    )
    words = [
        sys.executable,
        "-m",
        "tests.faults.kv.writer_process",
        msgspec.json.encode(writing).decode(),
    ]
    return subprocess.Popen(words, cwd=ROOT)


def as_far_as(stage: Stage, shards: int, marked: bool) -> bool:
    """Exactly so many of the chunk's values exist, and its marker, or not."""
    with stage.client("data0") as client:
        there = [client.exists(stage.key(HIT, s)) for s in range(stage.layout.kv_shards)]
    return sum(there) == shards and stage.marked()[HIT] == marked


def cut_links(stage: Stage) -> None:
    """What the dead writer had sent and the link still holds never arrives."""
    for server in ("data0", "index"):
        stage.link("w0", server).cut()
        stage.link("w0", server).mend()


def fetched(stage: Stage) -> list[int]:
    events = stage.node("d0").events
    return [event.chunk.index for event in events if isinstance(event, Fetched) and event.ok]


def place_again(stage: Stage, before: list[bool]) -> None:
    """The router's next attempt, with another prefill node: it puts what has no marker."""
    stage.request = msgspec.structs.replace(stage.request, attempt=2)
    decode, prefill = stage.node("d0"), stage.node("p1")
    decode.take(RunJob(stage.request, await_first=True))
    prefill.take(PrefillJob(stage.request, decode.name, decode.epoch))
    stage.end_hand_off("p1", "d0")
    assert prefill.published() == before.count(False)
    assert prefill.loop.counters.announced_chunks == before.count(True)
    assert all(stage.marked())


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="writer killed",
        how="SIGKILL to a prefill node at each step of the write order: in a value, after "
        "each shard, after all values, after the marker, after the inbox entry",
        seen="exactly the values, marker and announcement of that step exist, nothing half is "
        "visible; placed again, another node puts just what has no marker",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(
                case="in a value",
                play=killed(in_value(0), shards=0, marked=False, told=False),
                long=True,
            ),
            Cell(
                case="before the marker",
                play=killed(before_marker, shards=1, marked=False, told=False),
            ),
            Cell(
                case="before the inbox entry",
                play=killed(before_inbox, shards=1, marked=True, told=False),
            ),
            Cell(
                case="after the inbox entry, computed from there",
                play=killed(announced, shards=1, marked=True, told=True, placed_again=False),
            ),
            Cell(
                case="before the inbox entry, computed from there",
                play=killed(before_inbox, shards=1, marked=True, told=False, placed_again=False),
                long=True,
            ),
            Cell(
                case="before the first of two shards",
                play=killed(before_value(0), shards=0, marked=False, told=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="between two shards",
                play=killed(before_value(1), shards=1, marked=False, told=False),
                settings=SHARDED,
            ),
            Cell(
                case="in the second of two shards",
                play=killed(in_value(1), shards=1, marked=False, told=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="two shards, before the marker",
                play=killed(before_marker, shards=2, marked=False, told=False),
                settings=SHARDED,
                long=True,
            ),
            Cell(
                case="two shards, before the inbox entry",
                play=killed(before_inbox, shards=2, marked=True, told=False),
                settings=SHARDED,
                long=True,
            ),
        ),
    ),
)
