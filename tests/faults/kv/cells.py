"""Rows and cells of the KV fault matrix, and the moments at which a fault is injected.

In: actions on a KVTestbed: one injects a fault, one checks that it had its effect. Out: cells that
run both. The modules beside this one define the rows.

    stored      the prompt is in the store, and a node is about to look it up
    publishing  during a hand-off: the first 3 chunks are stored and announced; the other puts, and
                the decode node's fetches, are in flight
    fetching    in the middle of the third value that a node fetches
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton_kvstore.connection.client import OPERATION_TIMEOUT_S
from baton_kvstore.data.tuning import Tuning
from baton_node.engine.loop_context import LoopOptions
from baton_protocol.ids import Epoch
from baton_protocol.layout import VALUE_HEADER_BYTES, KVLayout
from baton_protocol.link import RunJob
from tests.support.kv_faults.kinds import KINDS, EngineSettings
from tests.support.kv_faults.testbed import CHUNKS, SMALL, KVTestbed
from tests.support.stores.kvstore import wait_until

Action = Callable[[KVTestbed], None]
PUBLISHED = 3  # chunks, at the moment "publishing"
CONNECTIONS = 8  # more than a node opens to one server
TUNING = Tuning()
LOOP_OPTIONS = LoopOptions(epoch=Epoch(""))


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The longest time that a fault may delay a request, as a sum of waits, without the machine's
    own work."""

    transfers: int = 0  # number of Tuning.deadline_s() of one chunk
    connects: int = 0  # number of Tuning.connect_timeout_s
    index: int = 0  # number of OPERATION_TIMEOUT_S
    chunks: bool = False  # the wait of a parked request for its prefill node
    link_bytes_per_s: float = 0.0  # the transfer of a prompt's values at this speed

    def seconds(self, layout: KVLayout) -> float:
        size = layout.kv_shards * (VALUE_HEADER_BYTES + layout.shard_bytes)
        total = self.transfers * TUNING.deadline_s(size)
        total += self.connects * TUNING.connect_timeout_s + self.index * OPERATION_TIMEOUT_S
        total += LOOP_OPTIONS.first_wait_s if self.chunks else 0.0
        if self.link_bytes_per_s:
            total += CHUNKS * size / self.link_bytes_per_s
        return total

    def __str__(self) -> str:
        """The sum as the table shows it."""
        parts = [
            _times(self.transfers, "transfer"),
            _times(self.connects, "connect"),
            _times(self.index, "index"),
            "partner" if self.chunks else "",
            "bytes / rate" if self.link_bytes_per_s else "",
        ]
        return " + ".join(part for part in parts if part) or "no wait"


def _times(count: int, word: str) -> str:
    return word if count == 1 else f"{count} {word}" if count else ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant of a fault. `long` cells run only in `make test-long`."""

    case: str
    run: Action
    settings: EngineSettings = SMALL
    instances: int = 1
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row: how and when the fault is injected, what is checked besides the tokens, and its
    cells."""

    name: str
    how: str
    checks: str
    deadline: Deadline
    cells: tuple[Cell, ...]


def of_each_kind(case: str, run: Action) -> tuple[Cell, ...]:
    """The case with each kind of KV."""
    return tuple(
        Cell(case=f"{case}, {kind}", run=run, settings=settings, long=True)
        for kind, settings in KINDS.items()
    )


# --- moments --------------------------------------------------------------------------------------


def stored(inject: Action, check: Action) -> Action:
    def run(testbed: KVTestbed) -> None:
        testbed.publish()
        testbed.node("d0")
        testbed.inject(inject)
        testbed.run("d0")
        check(testbed)

    return run


def fetching(inject: Action, check: Action, *, link_stays: bool = False) -> Action:
    """With `link_stays`, a fault of the node's link lasts until the request's end."""

    def run(testbed: KVTestbed) -> None:
        testbed.publish()
        node = testbed.node("d0")
        value = VALUE_HEADER_BYTES + testbed.layout.shard_bytes
        caught = testbed.link("d0", "data0").hold_replies(5 * value // 2)
        node.take(RunJob(testbed.request))
        testbed.spin(caught.is_set, "the middle of a value")
        testbed.inject(inject)
        if not link_stays:
            testbed.link("d0", "data0").mend()
        testbed.finish("d0", testbed.request)
        assert node.fetched() + len(node.lost()) == len(testbed.travelling())
        check(testbed)

    return run


def publishing(inject: Action, check: Action, server: str = "data0") -> Action:
    """The prefill node's commands to `server` are held."""

    def run(testbed: KVTestbed) -> None:
        begin_publishing(testbed, server)
        testbed.inject(inject)
        for link in (testbed.link("p0", server), testbed.link("d0", "data0")):
            link.mend()
        testbed.end_hand_off("p0", "d0")
        check(testbed)

    return run


def begin_publishing(testbed: KVTestbed, server: str) -> None:
    prefill, decode = testbed.node("p0"), testbed.node("d0")
    travelling = testbed.travelling()
    published = min(PUBLISHED, len(travelling) // 2)
    late = travelling[published]
    puts = hold(testbed, "p0", "data0", testbed.late_keys(late, index=False))
    gets = hold(testbed, "d0", "data0", {b"GETEX"})
    testbed.begin_hand_off("p0", "d0")
    testbed.spin(lambda: caught(puts) and caught(gets), "the middle of a hand-off")
    testbed.spin(lambda: prefill.published() == published, "its first chunks")
    if server == "index":
        # Holding one connection keeps markers back.
        marks = hold(testbed, "p0", "index", testbed.late_keys(late, index=True), connections=1)
        testbed.link("p0", "data0").mend()
        testbed.spin(lambda: caught(marks), "the next marker")
    assert decode.fetched() == 0
    assert not all(testbed.marked())


def hold(
    testbed: KVTestbed, node: str, server: str, words: set[bytes], connections: int = CONNECTIONS
) -> list[threading.Event]:
    """Hold commands with one of these names or keys in the link."""
    link = testbed.link(node, server)
    return [link.hold_at(lambda command: bool(words & set(command))) for _ in range(connections)]


def caught(traps: list[threading.Event]) -> bool:
    return any(trap.is_set() for trap in traps)


# --- checks ---------------------------------------------------------------------------------------


def all_of(*actions: Action) -> Action:
    def act(testbed: KVTestbed) -> None:
        for each in actions:
            each(testbed)

    return act


def nothing_fetched(testbed: KVTestbed) -> None:
    assert testbed.node("d0").fetched() == 0


def some_lost(testbed: KVTestbed) -> None:
    node = testbed.node("d0")
    assert node.lost()
    assert node.loop.counters["lost_chunks"] == len(node.lost())


def some_refused(testbed: KVTestbed, prompts: int = 1) -> None:
    """Assert that some of the puts of this number of prompts were refused. A put's deadline may be
    after the request's end, so wait for it."""
    node, puts = testbed.node("p0"), prompts * len(testbed.travelling())
    testbed.spin(lambda: bool(node.refused()) or node.published() == puts, "a refused put")
    assert node.refused()


def some_unmarked(testbed: KVTestbed) -> None:
    assert not all(testbed.marked())


def all_fetched(testbed: KVTestbed) -> None:
    """Assert that each chunk was fetched and used."""
    node, chunks = testbed.node("d0"), len(testbed.travelling())
    assert (node.fetched(), node.lost()) == (chunks, [])
    assert node.loop.counters["reused_chunks"] == chunks


def lost(count: int, reason: str) -> Action:
    """Assert that `count` fetches failed for this reason and their markers were dropped, and that
    all other chunks were fetched and used."""

    def act(testbed: KVTestbed) -> None:
        node = testbed.node("d0")
        assert len(node.lost()) == count, node.lost()
        assert all(reason in each for each in node.lost()), node.lost()
        counters, others = node.loop.counters, len(testbed.travelling()) - count
        assert (counters["lost_chunks"], counters["fetched_chunks"]) == (count, others)
        assert counters["reused_chunks"] == others
        wait_until(lambda: testbed.marked().count(False) == count, "wrong markers to be dropped")

    return act
