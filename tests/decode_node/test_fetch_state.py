"""The parked request's state machine, under every order of events hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_decode_node.fetch_state import WINDOW, Admission, FetchActions, FetchState, Outcome

CHUNK_BLOCKS = 2
KINDS = ["announce", "end", "grant", "land", "lose", "first", "time", "back", "abort"]


@dataclass(frozen=True)
class Event:
    """A method of the machine, and what it is told, if anything."""

    method: str
    chunks: int | None = None

    def happens_to(self, state: FetchState) -> Outcome:
        method: Callable[..., Outcome] = getattr(state, self.method)
        return method() if self.chunks is None else method(self.chunks)


FORGET = "forget"


@dataclass
class World:
    """Drives one machine, keeps what really happened, and checks every action against it.

    `puts` counts how often each chunk was announced, `begun` which of these a fetch was of, and
    `gone` up to which a chunk is known to be lost."""

    state: FetchState
    cached: int = 0
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
    outcome: Admission | str | None = None

    @property
    def there(self) -> set[int]:
        """Chunks that exist, as far as anybody here can know, and are not in the own cache."""
        found = {chunk for chunk in self.puts if self.puts[chunk] > self.gone.get(chunk, 0)}
        return found - set(range(self.cached // CHUNK_BLOCKS))

    def begin(self) -> None:
        self.state, actions = self.state.start()
        self._obey(actions)

    def tell(self, method: str, chunks: int | None = None) -> None:
        event = Event(method, chunks)
        self._notice(event)
        over = self.outcome is not None
        self.state, actions = event.happens_to(self.state)
        assert not over or actions == FetchActions(), "an action came after the end"
        self._obey(actions)
        if self.outcome is None:
            self._check_patience()

    def _notice(self, event: Event) -> None:
        match event:
            case Event("announce", int(chunks)):
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

    def _obey(self, actions: FetchActions) -> None:
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
        assert not self.expired, "a fetch after the time for it"
        assert chunk in self.there, "a fetch of what is not there, or is in the own cache"
        assert chunk not in self.flying | self.landed, "a chunk fetched twice"

    def _check_admission(self, runs: tuple[tuple[int, int], ...], chunks: int) -> None:
        assert not self.aborted
        assert not self.flying, "blocks handed over under a fetch"
        assert self.first, "ran before the router's word"
        assert all(start < end for start, end in runs)
        assert all(end < start for (_, end), (start, _) in pairwise(runs)), "runs not apart"
        named = [block for start, end in runs for block in range(start, end)]
        held = [c * CHUNK_BLOCKS + i for c in sorted(self.landed) for i in range(CHUNK_BLOCKS)]
        assert named == [block for block in held if block >= self.cached], "not what has landed"
        assert chunks == len(self.landed)
        if not self.expired:
            assert self.there <= self.landed, "ran without what was there"

    def _check_patience(self) -> None:
        """Who waits waits for something that can still come, and never for a lost chunk."""
        if self.first and not self.aborted and not self.flying:
            wants_blocks = not self.held and bool(self.there)
            own = self.cached // CHUNK_BLOCKS
            unheard = self.state.chunks > len(self.puts.keys() | set(range(own)))
            assert not self.expired
            assert wants_blocks or (unheard and not self.ended), "waits for nothing"


def world(chunks: int, *, await_first: bool, cached: int = 0) -> World:
    state = FetchState(chunks, CHUNK_BLOCKS, awaits_first=await_first, cached_blocks=cached)
    made = World(state, cached, first=not await_first)
    made.begin()
    return made


@given(st.data())
def test_every_interleaving_ends_in_admission_or_release(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, 40), "chunks")
    most = chunks * CHUNK_BLOCKS + 1
    cached = st.integers(0, most)
    w = world(chunks, await_first=data.draw(st.booleans()), cached=data.draw(cached))
    for _ in range(data.draw(st.integers(0, 60), "events")):
        if w.outcome is not None:
            break
        kind = data.draw(st.sampled_from(KINDS))
        match kind:
            case "announce":
                w.tell("announce", data.draw(st.integers(0, (1 << chunks + 2) - 1)))
            case "end":
                w.tell("end")
            case "grant" if w.state.wants_blocks:
                w.tell("reserve", data.draw(cached))
            case "land" if w.flying:
                w.tell("land", data.draw(st.sampled_from(sorted(w.flying))))
            case "lose" if w.flying:
                w.tell("lose", data.draw(st.sampled_from(sorted(w.flying))))
            case "first":
                w.tell("know_first")
            case "time":
                w.tell("time_out")
            case "back":
                w.tell("give_back")
            case "abort" if data.draw(st.integers(0, 9)) == 0:
                w.tell("abort")
    _let_the_world_finish(w, lose=data.draw(st.booleans()))
    assert w.outcome is not None
    w.tell("announce", 1)
    w.tell("land", 0)
    for late in ("end", "know_first", "time_out", "give_back", "abort"):
        w.tell(late)


def _let_the_world_finish(w: World, *, lose: bool) -> None:
    """What always comes in the end: the router's word, settled fetches, blocks, the deadline."""
    w.tell("know_first")
    for _ in range(4 * w.state.chunks + 4):
        if w.outcome is not None:
            return
        if w.state.wants_blocks:
            w.tell("reserve", 0)
        elif w.flying:
            chunk = min(w.flying)
            w.tell("lose" if lose else "land", chunk)
        else:
            w.tell("time_out")


@given(chunks=st.integers(1, 50), cached=st.integers(0, 20), order=st.randoms())
def test_with_all_chunks_there_all_of_them_are_used(
    chunks: int, cached: int, order: object
) -> None:
    w = world(chunks, await_first=True)
    w.tell("announce", (1 << chunks) - 1)
    cached = min(cached, chunks * CHUNK_BLOCKS)
    w.tell("reserve", cached)
    while w.flying:
        w.tell("land", order.choice(sorted(w.flying)))  # type: ignore[attr-defined]
    assert w.outcome is None
    w.tell("know_first")
    end = chunks * CHUNK_BLOCKS
    assert w.outcome == Admission(
        ((cached, end),) if cached < end else (), chunks - cached // CHUNK_BLOCKS
    )


# --- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class See:
    """What is so between two events; None: whatever it is."""

    flying: set[int] | None = None
    held: bool | None = None
    wants_blocks: bool | None = None
    outcome: Admission | str | None = None


@dataclass(frozen=True)
class Script:
    """A prompt of so many chunks, and what happens to its request."""

    chunks: int
    events: list[Event | See]
    ends: Admission | str | None = None
    await_first: bool = True
    cached: int = 0


WAITS = See()

SCRIPTS: dict[str, Script] = {
    "a prompt without a full chunk runs on the router's word": Script(
        0, [WAITS, Event("know_first")], Admission()
    ),
    "a request without a partner and without chunks runs at once": Script(
        0, [], Admission(), await_first=False
    ),
    "blocks are wanted only when a fetch could start": Script(
        3, [See(wants_blocks=False), Event("announce", 0b001), See(wants_blocks=True)]
    ),
    "chunks in the own cache want no blocks": Script(
        2,
        [
            Event("announce", 0b01),
            See(wants_blocks=False),
            Event("announce", 0b10),
            See(wants_blocks=True),
        ],
        cached=2,
    ),
    "a chunk lost in the middle is a hole and nobody waits for it": Script(
        4,
        [
            Event("announce", 0b1111),
            Event("reserve", 0),
            *(Event("land", chunk) for chunk in (0, 2, 3)),
            Event("lose", 1),
            Event("know_first"),
        ],
        Admission(((0, 2), (4, 8)), 3),
    ),
    "a chunk that was not announced is waited for until the partner's end": Script(
        3,
        [
            Event("announce", 0b101),
            Event("reserve", 0),
            Event("land", 0),
            Event("land", 2),
            Event("know_first"),
            WAITS,
            Event("end"),
        ],
        Admission(((0, 2), (4, 6)), 2),
    ),
    "a lost chunk announced again is fetched again": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("lose", 0),
            Event("land", 1),
            See(flying=set()),
            Event("announce", 0b01),
            See(flying={0}),
            Event("land", 0),
            Event("know_first"),
        ],
        Admission(((0, 4),), 2),
    ),
    "a chunk put again while its lost bytes are on their way is fetched again": Script(
        1,
        [
            Event("announce", 0b1),
            Event("reserve", 0),
            Event("announce", 0b1),
            Event("lose", 0),
            See(flying={0}),
            Event("lose", 0),
            See(flying=set()),  # nobody has put it a third time
        ],
    ),
    "after the end chunks behind a hole are fetched too": Script(
        3, [Event("announce", 0b101), Event("end"), Event("reserve", 0), See(flying={0, 2})]
    ),
    "an abort in mid-fetch holds the blocks until the fetch has settled": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("abort"),
            Event("lose", 0),
            See(held=True),
            Event("land", 1),
            See(held=False, outcome=FORGET),
        ],
        FORGET,
    ),
    "blocks given back are wanted again and their chunks fetched anew": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("land", 0),
            Event("give_back"),
            See(held=True),  # chunk 1 is still in flight
            Event("land", 1),
            See(held=False, wants_blocks=True),
            Event("reserve", 0),
            See(flying={0, 1}),
        ],
    ),
    "a deadline after the first token runs with what has landed": Script(
        3,
        [
            Event("announce", 0b001),
            Event("reserve", 0),
            Event("land", 0),
            Event("time_out"),
            WAITS,  # only the router ends the wait for the first token
            Event("know_first"),
            Event("time_out"),
        ],
        Admission(((0, 2),), 1),
    ),
    "a deadline in mid-fetch waits until the fetch has settled": Script(
        2,
        [
            Event("announce", 0b11),
            Event("reserve", 0),
            Event("land", 0),
            Event("time_out"),
            See(held=True),
            Event("land", 1),
        ],
        Admission(((0, 4),), 2),
        await_first=False,
    ),
    "of a partly cached chunk only the rest has landed": Script(
        3,
        [
            Event("announce", 0b111),
            Event("reserve", 3),
            See(flying={1, 2}),
            Event("land", 1),
            Event("land", 2),
            Event("end"),
        ],
        Admission(((3, 6),), 2),
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
        Admission(),
        await_first=False,
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_happens_to_a_parked_request(script: Script) -> None:
    w = world(script.chunks, await_first=script.await_first, cached=script.cached)
    for event in script.events:
        if isinstance(event, See):
            assert w.outcome == event.outcome
            assert event.flying in (None, w.flying)
            assert event.held in (None, w.held)
            assert event.wants_blocks in (None, w.state.wants_blocks)
        else:
            w.tell(event.method, event.chunks)
    assert w.outcome == script.ends
    if isinstance(script.ends, Admission):
        assert w.state.cached_blocks == w.cached
