"""The state machine of a parked request, under random orders of events and in fixed scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_decode_node.fetch_state import (
    WINDOW,
    FetchActions,
    FetchState,
    FetchTransition,
    LandedChunks,
)
from baton_node.engine.chunk_sets import chunks_of, first_chunks

CHUNK_BLOCKS = 2
KINDS = ["announce", "end", "grant", "land", "lose", "first", "time", "back", "abort"]


@dataclass(frozen=True)
class Event:
    """A call of one of the machine's methods, with its arguments if it has any."""

    method: str
    chunks: int | None = None
    unneeded: int = 0

    def apply(self, state: FetchState) -> FetchTransition:
        method: Callable[..., FetchTransition] = getattr(state, self.method)
        if self.unneeded:
            return method(self.chunks, self.unneeded)
        return method() if self.chunks is None else method(self.chunks)


FORGET = "forget"


@dataclass
class Driver:
    """Drives one machine, records what happened, and checks every action against it.

    `puts` is the number of times that each chunk was announced. `begun` is the value of `puts` at
    the start of the chunk's last fetch, and `gone` that value for its last lost fetch."""

    state: FetchState
    cached: int = 0
    unneeded: set[int] = field(default_factory=set)
    puts: Counter[int] = field(default_factory=Counter)
    begun: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)
    flying: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    held: bool = False
    ended: bool = False
    aborted: bool = False
    first: bool = False
    expired: bool = False
    outcome: LandedChunks | str | None = None

    @property
    def available(self) -> set[int]:
        """Chunks that exist as far as the node knows, and that its own cache does not hold."""
        existing = {chunk for chunk in self.puts if self.puts[chunk] > self.gone.get(chunk, 0)}
        return existing - set(range(self.cached // CHUNK_BLOCKS)) - self.unneeded

    def start(self) -> None:
        self.state, actions = self.state.start()
        self._apply(actions)

    def call(self, method: str, chunks: int | None = None, unneeded: int = 0) -> None:
        event = Event(method, chunks, unneeded)
        self._record(event)
        has_ended = self.outcome is not None
        self.state, actions = event.apply(self.state)
        assert not has_ended or actions == FetchActions(), "an action came after the end"
        self._apply(actions)
        if self.outcome is None:
            self._check_wait()

    def _record(self, event: Event) -> None:
        match event:
            case Event("announce", int(chunks)):
                self.unneeded |= {i for i in range(self.state.chunks) if event.unneeded >> i & 1}
                self.puts.update(i for i in range(self.state.chunks) if chunks >> i & 1)
            case Event("reserve", int(cached)):
                assert self.state.wants_blocks
                self.held, self.cached, self.landed = True, cached, set()
            case Event("land", int(chunk)):
                self.flying.discard(chunk)
                self.landed.add(chunk)
            case Event("lose", int(chunk)) if chunk in self.flying:
                self.flying.discard(chunk)
                self.gone[chunk] = self.begun[chunk]
            case Event("time_out"):
                self.expired |= self.first
            case _:
                self.ended |= event.method == "end"
                self.aborted |= event.method == "abort"
                self.first |= event.method == "know_first"

    def _apply(self, actions: FetchActions) -> None:
        if actions.release:
            assert self.held
            assert not self.flying, "blocks released under a fetch"
            self.held, self.landed = False, set()
        for chunk in actions.fetch:
            self._check_fetch(chunk)
            self.flying.add(chunk)
            self.begun[chunk] = self.puts[chunk]
            assert len(self.flying) <= WINDOW
        if actions.admit is not None:
            self._check_admission(actions.admit.runs, actions.admit.chunks)
            self.outcome = actions.admit
        if actions.forget:
            assert self.outcome is None, "forgotten after the end"
            assert self.aborted
            assert not self.held
            self.outcome = FORGET

    def _check_fetch(self, chunk: int) -> None:
        assert self.held, "a fetch without blocks"
        assert not self.aborted, "a fetch for an aborted request"
        assert not self.expired, "a fetch after the deadline"
        assert chunk in self.available, "a fetch of a chunk that does not exist or is cached"
        assert chunk not in self.flying | self.landed, "a chunk fetched twice"

    def _check_admission(self, runs: tuple[tuple[int, int], ...], chunks: int) -> None:
        assert not self.aborted
        assert not self.flying, "blocks handed over under a fetch"
        assert self.first, "ran before the router's frame about first tokens"
        assert all(start < end for start, end in runs)
        assert all(end < start for (_, end), (start, _) in pairwise(runs)), "adjacent runs"
        named = [block for start, end in runs for block in range(start, end)]
        ready = self.landed | self.unneeded if self.landed else set()
        held = [c * CHUNK_BLOCKS + i for c in sorted(ready) for i in range(CHUNK_BLOCKS)]
        assert named == [block for block in held if block >= self.cached], "not the landed chunks"
        assert chunks == len(self.landed)
        if not self.expired:
            assert self.available <= self.landed, "ran without an available chunk"

    def _check_wait(self) -> None:
        """A request waits only for something that can still arrive, and never for a lost chunk."""
        if self.first and not self.aborted and not self.flying:
            wants_blocks = not self.held and bool(self.available)
            own = self.cached // CHUNK_BLOCKS
            known = self.puts.keys() | set(range(own)) | self.unneeded
            unannounced = self.state.chunks > len(known)
            assert not self.expired
            assert wants_blocks or (unannounced and not self.ended), (
                "waits although nothing can arrive"
            )


def make_driver(chunks: int, *, await_first: bool, cached: int = 0, unneeded: int = 0) -> Driver:
    state = FetchState(
        chunks, CHUNK_BLOCKS, awaits_first=await_first, cached_blocks=cached, unneeded=unneeded
    )
    driver = Driver(state, cached, set(chunks_of(unneeded)), first=not await_first)
    driver.start()
    return driver


@given(st.data())
def test_every_order_of_events_ends_in_an_admission_or_a_release(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, 40), "chunks")
    most = chunks * CHUNK_BLOCKS + 1
    cached = st.integers(0, most)
    # Without a group without a window, no KV of the first chunks is needed.
    unneeded = first_chunks(max(0, data.draw(st.integers(-20, chunks - 1), "unneeded")))
    driver = make_driver(
        chunks, await_first=data.draw(st.booleans()), cached=data.draw(cached), unneeded=unneeded
    )
    for _ in range(data.draw(st.integers(0, 60), "events")):
        if driver.outcome is not None:
            break
        kind = data.draw(st.sampled_from(KINDS))
        match kind:
            case "announce":
                found = data.draw(st.integers(0, (1 << chunks + 2) - 1))
                driver.call("announce", found, data.draw(st.sampled_from([0, 0, unneeded])))
            case "end":
                driver.call("end")
            case "grant" if driver.state.wants_blocks:
                driver.call("reserve", data.draw(cached))
            case "land" if driver.flying:
                driver.call("land", data.draw(st.sampled_from(sorted(driver.flying))))
            case "lose" if driver.flying:
                driver.call("lose", data.draw(st.sampled_from(sorted(driver.flying))))
            case "first":
                driver.call("know_first")
            case "time":
                driver.call("time_out")
            case "back":
                driver.call("give_back")
            case "abort" if data.draw(st.integers(0, 9)) == 0:
                driver.call("abort")
    _let_it_finish(driver, lose=data.draw(st.booleans()))
    assert driver.outcome is not None
    driver.call("announce", 1)
    driver.call("land", 0)
    for late in ("end", "know_first", "time_out", "give_back", "abort"):
        driver.call(late)


def _let_it_finish(driver: Driver, *, lose: bool) -> None:
    """Send the events that always come in the end: first tokens, blocks, results of fetches, and
    the deadline."""
    driver.call("know_first")
    for _ in range(4 * driver.state.chunks + 4):
        if driver.outcome is not None:
            return
        if driver.state.wants_blocks:
            driver.call("reserve", 0)
        elif driver.flying:
            chunk = min(driver.flying)
            driver.call("lose" if lose else "land", chunk)
        else:
            driver.call("time_out")


@given(chunks=st.integers(1, 50), cached=st.integers(0, 20), order=st.randoms())
def test_if_all_chunks_exist_all_are_used(chunks: int, cached: int, order: object) -> None:
    driver = make_driver(chunks, await_first=True)
    driver.call("announce", (1 << chunks) - 1)
    cached = min(cached, chunks * CHUNK_BLOCKS)
    driver.call("reserve", cached)
    while driver.flying:
        driver.call("land", order.choice(sorted(driver.flying)))  # type: ignore[attr-defined]
    assert driver.outcome is None
    driver.call("know_first")
    end = chunks * CHUNK_BLOCKS
    assert driver.outcome == LandedChunks(
        ((cached, end),) if cached < end else (), chunks - cached // CHUNK_BLOCKS
    )


# --- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expect:
    """The expected state between two events. None means any."""

    flying: set[int] | None = None
    held: bool | None = None
    wants_blocks: bool | None = None
    outcome: LandedChunks | str | None = None


@dataclass(frozen=True)
class Script:
    """A prompt of `chunks` chunks, the events of its request, and the expected outcome."""

    chunks: int
    events: list[Event | Expect]
    outcome: LandedChunks | str | None = None
    await_first: bool = True
    cached: int = 0
    unneeded: int = 0


STILL_WAITS = Expect()

SCRIPTS: dict[str, Script] = {
    "a prompt without a full chunk runs once its first tokens are known": Script(
        0, [STILL_WAITS, Event("know_first")], LandedChunks()
    ),
    "a whole request without chunks runs at once": Script(0, [], LandedChunks(), await_first=False),
    "blocks are wanted only when a fetch can start": Script(
        3, [Expect(wants_blocks=False), Event("announce", 0b001), Expect(wants_blocks=True)]
    ),
    "chunks in the own cache want no blocks": Script(
        2,
        [
            Event("announce", 0b01),
            Expect(wants_blocks=False),
            Event("announce", 0b10),
            Expect(wants_blocks=True),
        ],
        cached=2,
    ),
    "a chunk lost in the middle is a hole that the request does not wait for": Script(
        4,
        [
            Event("announce", 0b1111),
            Event("reserve", 0),
            *(Event("land", chunk) for chunk in (0, 2, 3)),
            Event("lose", 1),
            Event("know_first"),
        ],
        LandedChunks(((0, 2), (4, 8)), 3),
    ),
    "an unannounced chunk is waited for until the prefill node's end": Script(
        3,
        [
            Event("announce", 0b101),
            Event("reserve", 0),
            Event("land", 0),
            Event("land", 2),
            Event("know_first"),
            STILL_WAITS,
            Event("end"),
        ],
        LandedChunks(((0, 2), (4, 6)), 2),
    ),
    "a lost chunk that is announced again is fetched again": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("lose", 0),
            Event("land", 1),
            Expect(flying=set()),
            Event("announce", 0b01),
            Expect(flying={0}),
            Event("land", 0),
            Event("know_first"),
        ],
        LandedChunks(((0, 4),), 2),
    ),
    "a chunk announced again during a fetch that fails is fetched again": Script(
        1,
        [
            Event("announce", 0b1),
            Event("reserve", 0),
            Event("announce", 0b1),
            Event("lose", 0),
            Expect(flying={0}),
            Event("lose", 0),
            Expect(flying=set()),  # it was not announced a third time
        ],
    ),
    "after the end chunks after a hole are fetched": Script(
        3, [Event("announce", 0b101), Event("end"), Event("reserve", 0), Expect(flying={0, 2})]
    ),
    "after an abort the blocks are held until the fetches have settled": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("abort"),
            Event("lose", 0),
            Expect(held=True),
            Event("land", 1),
            Expect(held=False, outcome=FORGET),
        ],
        FORGET,
    ),
    "after a release the blocks are wanted again and the chunks fetched again": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("land", 0),
            Event("give_back"),
            Expect(held=True),  # chunk 1 is still in flight
            Event("land", 1),
            Expect(held=False, wants_blocks=True),
            Event("reserve", 0),
            Expect(flying={0, 1}),
        ],
    ),
    "at a deadline after the first token the request runs with the landed chunks": Script(
        3,
        [
            Event("announce", 0b001),
            Event("reserve", 0),
            Event("land", 0),
            Event("time_out"),
            STILL_WAITS,  # only the router ends the wait for first tokens
            Event("know_first"),
            Event("time_out"),
        ],
        LandedChunks(((0, 2),), 1),
    ),
    "at a deadline the request waits for the fetches in flight": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("land", 0),
            Event("time_out"),
            Expect(held=True),
            Event("land", 1),
        ],
        LandedChunks(((0, 4),), 2),
        await_first=False,
    ),
    "only the uncached blocks of a partly cached chunk count as landed": Script(
        3,
        [
            Event("announce", 0b111),
            Event("reserve", 3),
            Expect(flying={1, 2}),
            Event("land", 1),
            Event("land", 2),
            Event("end"),
        ],
        LandedChunks(((3, 6),), 2),
        await_first=False,
    ),
    "a partly cached chunk that is lost keeps its cached blocks": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 1),
            Event("lose", 0),
            Event("lose", 1),
            Event("end"),
        ],
        LandedChunks(),
        await_first=False,
    ),
    "unneeded chunks are neither awaited nor fetched, and the engine need not compute them": Script(
        4,
        [
            Event("announce", 0b1000),
            Event("reserve", 0),
            Expect(flying={3}),
            Event("land", 3),
            STILL_WAITS,
            Event("announce", 0b0111),
            Expect(flying={2}),
            Event("land", 2),
            Event("know_first"),
        ],
        LandedChunks(((0, 8),), 2),
        unneeded=0b0011,
    ),
    "if nothing lands, the unneeded chunks are computed, too": Script(
        2,
        [Event("announce", 0b10), Event("reserve", 0), Event("lose", 1), Event("know_first")],
        LandedChunks(),
        unneeded=0b01,
    ),
    "cached blocks of unneeded chunks are not named again": Script(
        4,
        [Event("announce", 0b1000), Event("reserve", 3), Event("land", 3), Event("know_first")],
        LandedChunks(((3, 8),), 1),
        unneeded=0b0111,
    ),
    "a lookup tells which chunks are unneeded": Script(
        3,
        [
            Event("announce", 0b100, unneeded=0b011),
            Event("reserve", 0),
            Event("land", 2),
        ],
        LandedChunks(((0, 6),), 1),
        await_first=False,
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_parked_request_follows_the_script(script: Script) -> None:
    driver = make_driver(
        script.chunks,
        await_first=script.await_first,
        cached=script.cached,
        unneeded=script.unneeded,
    )
    for event in script.events:
        if isinstance(event, Expect):
            assert driver.outcome == event.outcome
            assert event.flying in (None, driver.flying)
            assert event.held in (None, driver.held)
            assert event.wants_blocks in (None, driver.state.wants_blocks)
        else:
            driver.call(event.method, event.chunks, event.unneeded)
    assert driver.outcome == script.outcome
    if isinstance(script.outcome, LandedChunks):
        assert driver.state.cached_blocks == driver.cached
