"""What a row of the KV fault matrix is, and the moments at which its fault strikes.

In: strikes (acts on a Stage) and bites (assertions that the fault was really met). Out: cells that
play both on a stage. Data and small plays only; the rows stand in the modules beside this one.

    stored      the prompt is in the store; a node is about to look it up
    publishing  in a hand-off: the first 3 chunks are stored and announced, the others are on their
                way into the store, and the decode node's fetches on their way out
    fetching    in the middle of the third value that a node fetches
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton_engine.sim.build import SimSettings
from baton_kvstore.connection.client import OPERATION_TIMEOUT_S
from baton_kvstore.data.data_plane import Tuning
from baton_node.engine.job import LoopOptions
from baton_protocol.ids import Epoch
from baton_protocol.layout import VALUE_HEADER_BYTES, KVLayout
from baton_protocol.link import RunJob
from tests.support.kv_faults.stage import CHUNKS, SMALL, Stage
from tests.support.stores.kvstore import wait_until

Act = Callable[[Stage], None]
PUBLISHED = 3  # chunks, at the moment "publishing"
CONNECTIONS = 8  # more than a node has to one server
TUNING = Tuning()
DESK = LoopOptions(epoch=Epoch(""))


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """How long a fault may keep a request, beside the machine's own work: what waits for what, one
    after the other."""

    transfers: int = 0  # Tuning.deadline_s() of one chunk
    connects: int = 0  # Tuning.connect_timeout_s
    index: int = 0  # OPERATION_TIMEOUT_S
    chunks: bool = False  # a parked request's patience with its prefill partner
    link_bytes_per_s: float = 0.0  # a prompt's values at this speed

    def seconds(self, layout: KVLayout) -> float:
        size = layout.kv_shards * (VALUE_HEADER_BYTES + layout.shard_bytes)
        total = self.transfers * TUNING.deadline_s(size)
        total += self.connects * TUNING.connect_timeout_s + self.index * OPERATION_TIMEOUT_S
        total += DESK.first_wait_s if self.chunks else 0.0
        if self.link_bytes_per_s:
            total += CHUNKS * size / self.link_bytes_per_s
        return total

    def __str__(self) -> str:
        """The formula in words."""
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
    """One play of a fault. `long`: only in `make test-long`."""

    case: str
    play: Act
    settings: SimSettings = SMALL
    instances: int = 1
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row: how it is done and when, what must be seen beside right tokens, and its cells."""

    name: str
    how: str
    seen: str
    deadline: Deadline
    cells: tuple[Cell, ...]


# --- the moments ----------------------------------------------------------------------------------


def stored(strike: Act, bites: Act) -> Act:
    def play(stage: Stage) -> None:
        stage.publish()
        stage.node("d0")
        stage.strike(strike)
        stage.run("d0")
        bites(stage)

    return play


def fetching(strike: Act, bites: Act, *, link_stays: bool = False) -> Act:
    """`link_stays`: what the strike did to the node's link lasts until the request's end."""

    def play(stage: Stage) -> None:
        stage.publish()
        node = stage.node("d0")
        value = VALUE_HEADER_BYTES + stage.layout.shard_bytes
        caught = stage.link("d0", "data0").hold_replies(5 * value // 2)
        node.take(RunJob(stage.request))
        stage.spin(caught.is_set, "the middle of a value")
        stage.strike(strike)
        if not link_stays:
            stage.link("d0", "data0").mend()
        stage.finish("d0", stage.request)
        assert node.fetched() + len(node.lost()) == CHUNKS
        bites(stage)

    return play


def publishing(strike: Act, bites: Act, server: str = "data0") -> Act:
    """The prefill node's commands are held on their way to `server`."""

    def play(stage: Stage) -> None:
        begin_publishing(stage, server)
        stage.strike(strike)
        for link in (stage.link("p0", server), stage.link("d0", "data0")):
            link.mend()
        stage.end_hand_off("p0", "d0")
        bites(stage)

    return play


def begin_publishing(stage: Stage, server: str) -> None:
    prefill, decode = stage.node("p0"), stage.node("d0")
    puts = hold(stage, "p0", "data0", stage.late_keys(PUBLISHED, index=False))
    gets = hold(stage, "d0", "data0", {b"GETEX"})
    stage.begin_hand_off("p0", "d0")
    stage.spin(lambda: caught(puts) and caught(gets), "a hand-off half way")
    stage.spin(lambda: prefill.published() == PUBLISHED, "its first chunks")
    if server == "index":
        # One connection is enough to keep markers back; the others go on.
        marks = hold(stage, "p0", "index", stage.late_keys(PUBLISHED, index=True), connections=1)
        stage.link("p0", "data0").mend()
        stage.spin(lambda: caught(marks), "the next marker")
    assert decode.fetched() == 0
    assert not all(stage.marked())


def hold(
    stage: Stage, node: str, server: str, words: set[bytes], connections: int = CONNECTIONS
) -> list[threading.Event]:
    """Commands with one of these names or keys come no further than the link."""
    link = stage.link(node, server)
    return [link.hold_at(lambda said: bool(words & set(said))) for _ in range(connections)]


def caught(traps: list[threading.Event]) -> bool:
    return any(trap.is_set() for trap in traps)


# --- what is seen ---------------------------------------------------------------------------------


def all_of(*acts: Act) -> Act:
    def act(stage: Stage) -> None:
        for each in acts:
            each(stage)

    return act


def nothing_fetched(stage: Stage) -> None:
    assert stage.node("d0").fetched() == 0


def some_lost(stage: Stage) -> None:
    node = stage.node("d0")
    assert node.lost()
    assert node.loop.counters.lost_chunks == len(node.lost())


def some_refused(stage: Stage, puts: int = CHUNKS) -> None:
    """Of so many puts. A put's own deadline may be later than the request's end."""
    node = stage.node("p0")
    stage.spin(lambda: bool(node.refused()) or node.published() == puts, "a refused put")
    assert node.refused()


def some_unmarked(stage: Stage) -> None:
    assert not all(stage.marked())


def everything_fetched(stage: Stage) -> None:
    """Each chunk came and was used."""
    node = stage.node("d0")
    assert (node.fetched(), node.lost()) == (CHUNKS, [])
    assert node.loop.counters.reused_chunks == CHUNKS


def lost(count: int, words: str) -> Act:
    """So many chunks were found wrong, for this reason; all others came and were used, and the
    markers of the wrong ones are dropped."""

    def act(stage: Stage) -> None:
        node = stage.node("d0")
        assert len(node.lost()) == count, node.lost()
        assert all(words in reason for reason in node.lost()), node.lost()
        counters = node.loop.counters
        assert (counters.lost_chunks, counters.fetched_chunks) == (count, CHUNKS - count)
        assert counters.reused_chunks == CHUNKS - count
        wait_until(lambda: stage.marked().count(False) == count, "wrong markers to be dropped")

    return act
