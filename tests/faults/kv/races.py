"""Rows of the KV fault matrix: pages that change hands while a transfer is under way.

In: nothing. Out: FAULTS. The race is forced: a transfer thread stands in front of the copy into (or
out of) pages whose request has ended, while another request, which needs nearly all pages, wants
them at once. Only then may it go on.
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
from tests.faults.kv.cells import Act, Cell, Deadline, Fault
from tests.support.kv_faults.nodes import StageNode
from tests.support.kv_faults.stage import BLOCK, NOBODY, SMALL, TURN_S, Stage
from tests.support.nodes.processes import make_request

ROUNDS = 1000
SOURCE_ROUNDS = 100
SHORT_ROUNDS = 24  # each way to end a request comes at least twice
WARM_UP = 200  # rounds after which memory is level
WEIGH_EVERY = 100
LATE_EVERY = 20  # rounds
SPARE_BYTES = 16 << 20
CHUNKS = 3
# One request and its outputs fill the pool.
TIGHT = replace(SMALL, num_blocks=CHUNKS + 1, max_batched_tokens=256)
OUTPUTS = 3
PROMPTS = 8
TURNS = 3  # at most, in which the other request wants the pages before the copy goes on
HOUR_S = 3600.0
GATE_S = 120.0


class GatedMemory:
    """A pool whose copies wait in front of a gate."""

    def __init__(self, memory: KVMemory) -> None:
        self.layout = memory.layout
        self._memory = memory
        self._changed = threading.Condition()
        self._open = True
        self._waiting = 0

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None:
        self._pass()
        self._memory.read(blocks, into, shard)

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None:
        self._pass()
        self._memory.write(blocks, data, shard)

    def views(self, blocks: Sequence[BlockId]) -> None:
        """All copies pass the gate."""

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
    """What a race came to. `met`: rounds in which the copy came after its request's end, while
    another wanted the pages."""

    met: int = 0
    early: int = 0  # rounds in which the other ran before the copy was over
    wrong: int = 0  # other tokens, or other bytes in a page
    grown_bytes: int = 0


def prompt(seed: int) -> bytes:
    rng = random.Random(f"race {seed}")
    return bytes(rng.randrange(32, 127) for _ in range(CHUNKS * BLOCK + 5))


def ask(name: str, seed: int) -> Request:
    return make_request(name, prompt(seed), max_tokens=OUTPUTS)


class Race:
    """One node, one gate. The other request wants pages for `turns` turns of the node's loop at
    most, unless it runs."""

    def __init__(self, stage: Stage, turns: int) -> None:
        self.stage = stage
        self._turns = turns
        self.tally = Tally()
        self.node: StageNode = stage.node("d0", wrap=self._wrap)
        self._rng = random.Random(1)
        self._base = 0

    def _wrap(self, memory: KVMemory) -> KVMemory:
        self.memory = GatedMemory(memory)
        return self.memory

    def round(self, number: int, first: Request, *, fetches: bool) -> None:
        stage, node = self.stage, self.node
        other = ask(f"other-{number}", number % PROMPTS)
        truth = stage.truth(other)
        # A machine that stands still for a second makes a node think that its store is away.
        stage.spin(node.connector.healthy, "a store that answers")
        self.memory.shut()
        node.take(RunJob(first) if fetches else PrefillJob(first, *NOBODY))
        stage.spin(lambda: self.memory.waiting > 0, "a copy in front of the gate")
        self._end(first, number)
        node.take(RunJob(other))
        for _ in range(self._rng.randint(0, self._turns)):
            node.loop.turn()
            time.sleep(TURN_S)
            if node.ids(other.id):
                break
        self.tally.met += self.memory.waiting > 0 and not node.freed
        self.tally.early += bool(node.ids(other.id))
        self.memory.open()
        stage.spin(lambda: len(node.ids(other.id)) == OUTPUTS, "the other's end")
        stage.settle()
        wrong = node.ids(other.id) != truth or bool(stage.wrong_pages("d0", other))
        self.tally.wrong += wrong
        self._forget()
        self._weigh(number)

    def _end(self, request: Request, number: int) -> None:
        """An abort, a newer attempt (aborted in its turn), and now and then a deadline that passes:
        these are looked at every 0.1 s."""
        node, key = self.node, (request.id, request.attempt)
        if number % LATE_EVERY == 1 and request.time_left:
            node.clock_ahead_s += request.time_left + 1
            self.stage.spin(lambda: bool(node.failures()), "the deadline")
            return
        if number % 2 == 0:
            node.take(RunJob(msgspec.structs.replace(request, attempt=2)))
            node.loop.turn()
            key = (request.id, 2)
        node.take(Abort(*key))
        node.loop.turn()

    def _forget(self) -> None:
        """What the node said would be read over and over."""
        self.node.port.sent.clear()
        self.node.events.clear()

    def _weigh(self, number: int) -> None:
        if number == WARM_UP:
            self._base = resident_bytes()
        if self._base and number % WEIGH_EVERY == 0:
            self.tally.grown_bytes = resident_bytes() - self._base


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def destination_race(stage: Stage, rounds: int, turns: int = TURNS) -> Tally:
    """Fetches into pages of requests that have ended; until something is wrong."""
    stage.request = ask("stored", PROMPTS)
    stage.publish()
    race = Race(stage, turns)
    for number in range(rounds):
        if race.tally.wrong:
            break
        first = msgspec.structs.replace(ask(f"first-{number}", PROMPTS), time_left=HOUR_S)
        race.round(number, first, fetches=True)
    return race.tally


def source_race(stage: Stage, rounds: int, turns: int = TURNS) -> Tally:
    """Puts out of pages of requests that have ended: what is stored is right, or is not there;
    until something is wrong."""
    stage.request = ask("stored", PROMPTS)
    race = Race(stage, turns)
    for number in range(rounds):
        if race.tally.wrong:
            break
        first = ask(f"first-{number}", PROMPTS + number)
        race.round(number, first, fetches=False)
        race.tally.wrong += wrong_values(stage, first)
    return race.tally


def wrong_values(stage: Stage, request: Request) -> int:
    """Stored chunks of the prompt that are not what an undisturbed engine computes."""
    found = 0
    wanted = stage.expected_pages(request)
    for chunk, (name, there) in enumerate(
        zip(stage.names(request), stage.marked(request), strict=True)
    ):
        if there:
            value = stage.value(stage.key(chunk, 0, request))
            found += value[-stage.layout.shard_bytes :] != wanted[name]
    return found


def raced(race: Callable[[Stage, int], Tally], rounds: int) -> Act:
    def play(stage: Stage) -> None:
        tally = race(stage, rounds)
        assert (tally.early, tally.wrong) == (0, 0), tally
        # A machine that stands still for long lets a copy end before its time.
        assert tally.met > 0.9 * rounds, tally
        assert tally.grown_bytes < SPARE_BYTES, tally

    return play


def _cells(race: Callable[[Stage, int], Tally], rounds: int) -> tuple[Cell, Cell]:
    """A few rounds in every run, many in `make test-long`."""
    few, many = (
        Cell(case=f"{count} rounds", play=raced(race, count), settings=TIGHT, long=count == rounds)
        for count in (SHORT_ROUNDS, rounds)
    )
    return few, many


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="aborted with a fetch in flight",
        how=f"{ROUNDS:,} rounds: a verified value stands in front of its pages when its request is "
        "aborted, late or placed again; another request wants all pages at once",
        seen="in each round the pages stay held until the copy is over; then tokens and pages of "
        "the other are right; memory stays level",
        deadline=Deadline(),
        cells=_cells(destination_race, ROUNDS),
    ),
    Fault(
        name="aborted with a put in flight",
        how=f"{SOURCE_ROUNDS} rounds: the same on the writing side; pages wait to be copied out",
        seen="the pages stay held until they are copied; what is stored has the right bytes",
        deadline=Deadline(),
        cells=_cells(source_race, SOURCE_ROUNDS),
    ),
)
