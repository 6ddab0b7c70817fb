"""Rows of the KV fault matrix: requests that end while a transfer uses their pages.

In: nothing. Out: FAULTS. The race is forced: a transfer thread waits before it copies into (or out
of) pages whose request has ended. Only when another request, which needs nearly all pages, has
asked for them, the copy proceeds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import psutil

from baton_engine.interface import KVMemory
from baton_protocol.ids import BlockId
from baton_protocol.link import Abort, PrefillJob, RunJob
from baton_protocol.request import Request
from tests.faults.kv.cells import Action, Cell, Deadline, Fault
from tests.support.kv_faults.nodes import RecordingNode
from tests.support.kv_faults.testbed import BLOCK, SMALL, TURN_S, KVTestbed
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import NOBODY

ROUNDS = 1000
SOURCE_ROUNDS = 100
SHORT_ROUNDS = 24  # each way to end a request occurs at least twice
WARM_UP = 200  # rounds after which memory must not grow
MEASURE_EVERY = 100  # rounds between two measurements of memory
LATE_EVERY = 20  # one of this many rounds ends by a deadline
MAX_GROWN_BYTES = 16 << 20
CHUNKS = 3
# One request and its outputs fill the pool.
TIGHT = replace(SMALL, num_blocks=CHUNKS + 1, max_batched_tokens=256)
OUTPUTS = 3
PROMPTS = 8
TURNS = 3  # at most this many turns the other request wants the pages before the copy proceeds
HOUR_S = 3600.0
GATE_S = 120.0


class GatedMemory:
    """A block pool whose copies wait while the gate is shut."""

    def __init__(self, memory: KVMemory) -> None:
        self.layout = memory.layout
        self._memory = memory
        self._changed = threading.Condition()
        self._open = True
        self._waiting = 0

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        self._pass()
        self._memory.read(blocks, into, shard, group)

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        self._pass()
        self._memory.write(blocks, data, shard, group)

    def views(self, blocks: Sequence[BlockId]) -> None:
        """No direct access to pages: every copy must pass the gate."""

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self._memory.copy(sources, targets)

    @property
    def waiting(self) -> int:
        return self._waiting

    def shut(self) -> None:
        self._open = False

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def _pass(self) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._open, GATE_S)
            self._waiting -= 1


@dataclass(slots=True)
class Tally:
    """The results of a race. The counts are in rounds."""

    raced: int = 0  # the copy was still waiting after its request's end
    early: int = 0  # the other request ran before the copy had finished
    wrong: int = 0  # the other request's tokens or pages were wrong
    grown_bytes: int = 0


def prompt(seed: int) -> bytes:
    rng = random.Random(f"race {seed}")
    return bytes(rng.randrange(32, 127) for _ in range(CHUNKS * BLOCK + 5))


def request_of(name: str, seed: int) -> Request:
    return make_request(name, prompt(seed), max_tokens=OUTPUTS)


class Race:
    """A node whose transfers pass a gate. The other request waits for pages for at most `turns`
    turns of the node's loop, or until it runs."""

    def __init__(self, testbed: KVTestbed, turns: int) -> None:
        self.testbed = testbed
        self._turns = turns
        self.tally = Tally()
        self.node: RecordingNode = testbed.node("d0", wrap=self._wrap)
        self._rng = random.Random(1)
        self._base = 0

    def _wrap(self, memory: KVMemory) -> KVMemory:
        self.memory = GatedMemory(memory)
        return self.memory

    def round(self, number: int, first: Request, *, fetches: bool) -> None:
        testbed, node = self.testbed, self.node
        other = request_of(f"other-{number}", number % PROMPTS)
        expected = testbed.expected_ids(other)
        # If the machine stalls for a second, the node takes its store for lost.
        testbed.spin(node.connector.healthy, "a store that answers")
        self.memory.shut()
        node.take(RunJob(first) if fetches else PrefillJob(first, *NOBODY))
        testbed.spin(lambda: self.memory.waiting > 0, "a copy that waits at the gate")
        self._end(first, number)
        node.take(RunJob(other))
        for _ in range(self._rng.randint(0, self._turns)):
            node.loop.turn()
            time.sleep(TURN_S)
            if node.ids(other.id):
                break
        self.tally.raced += self.memory.waiting > 0 and not node.freed
        self.tally.early += bool(node.ids(other.id))
        self.memory.open()
        testbed.spin(lambda: len(node.ids(other.id)) == OUTPUTS, "the other request's end")
        testbed.settle()
        wrong = node.ids(other.id) != expected or bool(testbed.wrong_pages("d0", other))
        self.tally.wrong += wrong
        self._drop_records()
        self._measure_memory(number)

    def _end(self, request: Request, number: int) -> None:
        """End a request by an abort, by a newer attempt (which is then aborted), or at times by its
        deadline, which the loop checks every 0.1 s."""
        node, key = self.node, (request.id, request.attempt)
        if number % LATE_EVERY == 1 and request.time_left:
            node.clock_ahead_s += request.time_left + 1
            self.testbed.spin(lambda: bool(node.failures()), "the deadline")
            return
        if number % 2 == 0:
            node.take(RunJob(msgspec.structs.replace(request, attempt=2)))
            node.loop.turn()
            key = (request.id, 2)
        node.take(Abort(*key))
        node.loop.turn()

    def _drop_records(self) -> None:
        """Drop the recorded frames and events, which every round searches."""
        self.node.port.sent.clear()
        self.node.events.clear()

    def _measure_memory(self, number: int) -> None:
        if number == WARM_UP:
            self._base = resident_bytes()
        if self._base and number % MEASURE_EVERY == 0:
            self.tally.grown_bytes = resident_bytes() - self._base


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def destination_race(testbed: KVTestbed, rounds: int, turns: int = TURNS) -> Tally:
    """Race fetches into pages of requests that have ended, until a result is wrong."""
    testbed.request = request_of("stored", PROMPTS)
    testbed.publish()
    race = Race(testbed, turns)
    for number in range(rounds):
        if race.tally.wrong:
            break
        first = msgspec.structs.replace(request_of(f"first-{number}", PROMPTS), time_left=HOUR_S)
        race.round(number, first, fetches=True)
    return race.tally


def source_race(testbed: KVTestbed, rounds: int, turns: int = TURNS) -> Tally:
    """Race puts from pages of requests that have ended, until a result is wrong. A stored value
    must be right; it may be missing."""
    testbed.request = request_of("stored", PROMPTS)
    race = Race(testbed, turns)
    for number in range(rounds):
        if race.tally.wrong:
            break
        first = request_of(f"first-{number}", PROMPTS + number)
        race.round(number, first, fetches=False)
        race.tally.wrong += wrong_values(testbed, first)
    return race.tally


def wrong_values(testbed: KVTestbed, request: Request) -> int:
    """Return the number of the prompt's stored chunks that differ from those of an undisturbed
    engine."""
    wrong = 0
    expected = testbed.expected_pages(request)
    for chunk, (name, is_stored) in enumerate(
        zip(testbed.names(request), testbed.marked(request), strict=True)
    ):
        if is_stored:
            value = testbed.value(testbed.key(chunk, 0, request))
            wrong += value[-testbed.layout.shard_bytes :] != expected[name]
    return wrong


def raced(race: Callable[[KVTestbed, int], Tally], rounds: int) -> Action:
    def run(testbed: KVTestbed) -> None:
        tally = race(testbed, rounds)
        assert (tally.early, tally.wrong) == (0, 0), tally
        # If the machine stalls for long, a copy may pass the gate too early.
        assert tally.raced > 0.9 * rounds, tally
        assert tally.grown_bytes < MAX_GROWN_BYTES, tally

    return run


def _cells(race: Callable[[KVTestbed, int], Tally], rounds: int) -> tuple[Cell, Cell]:
    """Return a cell with a few rounds, and one with `rounds` rounds for `make test-long`."""
    few, many = (
        Cell(case=f"{count} rounds", run=raced(race, count), settings=TIGHT, long=count == rounds)
        for count in (SHORT_ROUNDS, rounds)
    )
    return few, many


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="aborted with a fetch in flight",
        how=f"{ROUNDS:,} rounds: a verified value waits to be copied into its pages when its "
        "request is aborted, late or placed again; another request needs all pages at once",
        checks="in each round the pages stay held until the copy has finished; then the other "
        "request's tokens and pages are right; memory does not grow",
        deadline=Deadline(),
        cells=_cells(destination_race, ROUNDS),
    ),
    Fault(
        name="aborted with a put in flight",
        how=f"{SOURCE_ROUNDS} rounds: the same for a put, whose pages wait to be copied out",
        checks="the pages stay held until they are copied; stored values have the right bytes",
        deadline=Deadline(),
        cells=_cells(source_race, SOURCE_ROUNDS),
    ),
)
