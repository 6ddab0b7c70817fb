"""The parked request's state machine, under every order of events hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_node.engine import fetch_state
from baton_node.engine.fetch_state import (
    Abort,
    Admit,
    Announced,
    Ended,
    Fetch,
    FetchState,
    FirstKnown,
    Forget,
    GiveBack,
    Landed,
    Lost,
    Release,
    Reserved,
    Timeout,
)

CHUNK_BLOCKS = 2
KINDS = ["announce", "end", "grant", "land", "lose", "first", "time", "back", "abort"]


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
    outcome: Admit | Forget | None = None

    @property
    def there(self) -> set[int]:
        """Chunks that exist, as far as anybody here can know, and are not in the own cache."""
        found = {chunk for chunk in self.puts if self.puts[chunk] > self.gone.get(chunk, 0)}
        return found - set(range(self.cached // CHUNK_BLOCKS))

    def begin(self) -> None:
        self.state, actions = fetch_state.start(self.state)
        self._obey(actions)

    def tell(self, event: fetch_state.Event) -> None:
        self._notice(event)
        over = self.outcome is not None
        self.state, actions = fetch_state.step(self.state, event)
        assert not (over and actions), "an action came after the end"
        self._obey(actions)
        if self.outcome is None:
            self._check_patience()

    def _notice(self, event: fetch_state.Event) -> None:
        match event:
            case Announced(chunks):
                self.puts.update(i for i in range(self.state.chunks) if chunks >> i & 1)
            case Reserved(cached):
                assert self.state.wants_blocks
                self.held, self.cached, self.landed = True, cached, set()
            case Landed(chunk):
                self.flying.discard(chunk)
                self.landed.add(chunk)
            case Lost(chunk) if chunk in self.flying:
                self.flying.discard(chunk)
                self.gone[chunk] = self.begun[chunk]
            case Timeout():
                self.expired |= self.first
            case _:
                self.ended |= isinstance(event, Ended)
                self.aborted |= isinstance(event, Abort)
                self.first |= isinstance(event, FirstKnown)

    def _obey(self, actions: list[fetch_state.Action]) -> None:
        for action in actions:
            assert self.outcome is None, "an action came after the end"
            match action:
                case Fetch(chunk):
                    self._check_fetch(chunk)
                    self.flying.add(chunk)
                    self.begun[chunk] = self.puts[chunk]
                    assert len(self.flying) <= fetch_state.WINDOW
                case Release():
                    assert self.held
                    assert not self.flying, "blocks released under a fetch"
                    self.held, self.landed = False, set()
                case Admit(runs, chunks):
                    self._check_admission(runs, chunks)
                    self.outcome = action
                case Forget():
                    assert self.aborted
                    assert not self.held
                    self.outcome = action

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
    state = fetch_state.park(chunks, CHUNK_BLOCKS, await_first=await_first, cached=cached)
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
                w.tell(Announced(data.draw(st.integers(0, (1 << chunks + 2) - 1))))
            case "end":
                w.tell(Ended())
            case "grant" if w.state.wants_blocks:
                w.tell(Reserved(data.draw(cached)))
            case "land" if w.flying:
                w.tell(Landed(data.draw(st.sampled_from(sorted(w.flying)))))
            case "lose" if w.flying:
                w.tell(Lost(data.draw(st.sampled_from(sorted(w.flying)))))
            case "first":
                w.tell(FirstKnown())
            case "time":
                w.tell(Timeout())
            case "back":
                w.tell(GiveBack())
            case "abort" if data.draw(st.integers(0, 9)) == 0:
                w.tell(Abort())
    _let_the_world_finish(w, lose=data.draw(st.booleans()))
    assert w.outcome is not None
    for late in (Announced(1), Ended(), Landed(0), FirstKnown(), Timeout(), GiveBack(), Abort()):
        w.tell(late)


def _let_the_world_finish(w: World, *, lose: bool) -> None:
    """What always comes in the end: the router's word, settled fetches, blocks, the deadline."""
    w.tell(FirstKnown())
    for _ in range(4 * w.state.chunks + 4):
        if w.outcome is not None:
            return
        if w.state.wants_blocks:
            w.tell(Reserved(0))
        elif w.flying:
            chunk = min(w.flying)
            w.tell(Lost(chunk) if lose else Landed(chunk))
        else:
            w.tell(Timeout())


@given(chunks=st.integers(1, 50), cached=st.integers(0, 20), order=st.randoms())
def test_with_all_chunks_there_all_of_them_are_used(
    chunks: int, cached: int, order: object
) -> None:
    w = world(chunks, await_first=True)
    w.tell(Announced((1 << chunks) - 1))
    cached = min(cached, chunks * CHUNK_BLOCKS)
    w.tell(Reserved(cached))
    while w.flying:
        w.tell(Landed(order.choice(sorted(w.flying))))  # type: ignore[attr-defined]
    assert w.outcome is None
    w.tell(FirstKnown())
    end = chunks * CHUNK_BLOCKS
    assert w.outcome == Admit(
        ((cached, end),) if cached < end else (), chunks - cached // CHUNK_BLOCKS
    )


# --- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class See:
    """What is so between two events; None: whatever it is."""

    flying: set[int] | None = None
    held: bool | None = None
    wants_blocks: bool | None = None
    outcome: Admit | Forget | None = None


@dataclass(frozen=True)
class Script:
    """A prompt of so many chunks, and what happens to its request."""

    chunks: int
    says: list[fetch_state.Event | See]
    ends: Admit | Forget | None = None
    await_first: bool = True
    cached: int = 0


WAITS = See()

SCRIPTS: dict[str, Script] = {
    "a prompt without a full chunk runs on the router's word": Script(
        0, [WAITS, FirstKnown()], Admit()
    ),
    "a request without a partner and without chunks runs at once": Script(
        0, [], Admit(), await_first=False
    ),
    "blocks are wanted only when a fetch could start": Script(
        3, [See(wants_blocks=False), Announced(0b001), See(wants_blocks=True)]
    ),
    "chunks in the own cache want no blocks": Script(
        2,
        [Announced(0b01), See(wants_blocks=False), Announced(0b10), See(wants_blocks=True)],
        cached=2,
    ),
    "a chunk lost in the middle is a hole and nobody waits for it": Script(
        4,
        [
            Announced(0b1111),
            Reserved(0),
            *(Landed(chunk) for chunk in (0, 2, 3)),
            Lost(1),
            FirstKnown(),
        ],
        Admit(((0, 2), (4, 8)), 3),
    ),
    "a chunk that was not announced is waited for until the partner's end": Script(
        3,
        [Announced(0b101), Reserved(0), Landed(0), Landed(2), FirstKnown(), WAITS, Ended()],
        Admit(((0, 2), (4, 6)), 2),
    ),
    "a lost chunk announced again is fetched again": Script(
        2,
        [
            Announced(0b11),
            Reserved(0),
            Lost(0),
            Landed(1),
            See(flying=set()),
            Announced(0b01),
            See(flying={0}),
            Landed(0),
            FirstKnown(),
        ],
        Admit(((0, 4),), 2),
    ),
    "a chunk put again while its lost bytes are on their way is fetched again": Script(
        1,
        [
            Announced(0b1),
            Reserved(0),
            Announced(0b1),
            Lost(0),
            See(flying={0}),
            Lost(0),
            See(flying=set()),  # nobody has put it a third time
        ],
    ),
    "after the end chunks behind a hole are fetched too": Script(
        3, [Announced(0b101), Ended(), Reserved(0), See(flying={0, 2})]
    ),
    "an abort in mid-fetch holds the blocks until the fetch has settled": Script(
        2,
        [
            Announced(0b11),
            Reserved(0),
            Abort(),
            Lost(0),
            See(held=True),
            Landed(1),
            See(held=False, outcome=Forget()),
        ],
        Forget(),
    ),
    "blocks given back are wanted again and their chunks fetched anew": Script(
        2,
        [
            Announced(0b11),
            Reserved(0),
            Landed(0),
            GiveBack(),
            See(held=True),  # chunk 1 is still in flight
            Landed(1),
            See(held=False, wants_blocks=True),
            Reserved(0),
            See(flying={0, 1}),
        ],
    ),
    "a deadline after the first token runs with what has landed": Script(
        3,
        [
            Announced(0b001),
            Reserved(0),
            Landed(0),
            Timeout(),
            WAITS,  # only the router ends the wait for the first token
            FirstKnown(),
            Timeout(),
        ],
        Admit(((0, 2),), 1),
    ),
    "a deadline in mid-fetch waits until the fetch has settled": Script(
        2,
        [Announced(0b11), Reserved(0), Landed(0), Timeout(), See(held=True), Landed(1)],
        Admit(((0, 4),), 2),
        await_first=False,
    ),
    "of a partly cached chunk only the rest has landed": Script(
        3,
        [Announced(0b111), Reserved(3), See(flying={1, 2}), Landed(1), Landed(2), Ended()],
        Admit(((3, 6),), 2),
        await_first=False,
    ),
    "a partly cached chunk that is lost keeps its cached blocks": Script(
        2,
        [Announced(0b11), Reserved(1), Lost(0), Lost(1), Ended()],
        Admit(),
        await_first=False,
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_happens_to_a_parked_request(script: Script) -> None:
    w = world(script.chunks, await_first=script.await_first, cached=script.cached)
    for said in script.says:
        if isinstance(said, See):
            assert w.outcome == said.outcome
            assert said.flying in (None, w.flying)
            assert said.held in (None, w.held)
            assert said.wants_blocks in (None, w.state.wants_blocks)
        else:
            w.tell(said)
    assert w.outcome == script.ends
    if isinstance(script.ends, Admit):
        assert w.state.cached_blocks == w.cached
