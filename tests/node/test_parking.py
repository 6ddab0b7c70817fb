"""The parked request's state machine, under every order of events hypothesis can think of."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_node import parking
from baton_node.parking import (
    Abort,
    Admit,
    Announced,
    Ended,
    Fetch,
    FirstKnown,
    Forget,
    GiveBack,
    Landed,
    Lost,
    Parked,
    Release,
    Reserved,
    Timeout,
)

CHUNK_BLOCKS = 2
KINDS = ["announce", "end", "grant", "land", "lose", "first", "time", "back", "abort"]


@dataclass
class World:
    """Drives one machine, keeps what really happened, and checks every action against it."""

    state: Parked
    exists: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    cached: int = 0
    held: bool = False
    aborted: bool = False
    first: bool = False
    outcome: Admit | Forget | None = None

    def begin(self) -> None:
        self.state, actions = parking.start(self.state)
        self._obey(actions)

    def tell(self, event: parking.Event) -> None:
        if isinstance(event, Announced):
            self.exists |= {i for i in range(self.state.chunks) if event.chunks >> i & 1}
        if isinstance(event, Reserved):
            assert self.state.wants_blocks
            self.held, self.cached, self.landed = True, event.cached, set()
        if isinstance(event, Landed | Lost):
            self.flying.discard(event.chunk)
        if isinstance(event, Landed):
            self.landed.add(event.chunk)
        self.aborted |= isinstance(event, Abort)
        self.first |= isinstance(event, FirstKnown)
        over = self.outcome is not None
        self.state, actions = parking.step(self.state, event)
        assert not (over and actions), "an action came after the end"
        self._obey(actions)

    def _obey(self, actions: list[parking.Action]) -> None:
        for action in actions:
            assert self.outcome is None, "an action came after the end"
            match action:
                case Fetch(chunk):
                    assert self.held, "a fetch without blocks"
                    assert not self.aborted, "a fetch for an aborted request"
                    assert chunk in self.exists, "a fetch of what nobody announced"
                    assert chunk not in self.flying | self.landed, "a chunk fetched twice"
                    assert chunk >= self.cached // CHUNK_BLOCKS, "a fetch over shared blocks"
                    self.flying.add(chunk)
                    assert len(self.flying) <= parking.WINDOW
                case Release():
                    assert self.held
                    assert not self.flying, "blocks released under a fetch"
                    self.held, self.landed = False, set()
                case Admit(blocks, chunks):
                    self._check_admission(blocks, chunks)
                    self.outcome = action
                case Forget():
                    assert self.aborted
                    assert not self.held
                    self.outcome = action

    def _check_admission(self, blocks: int, chunks: int) -> None:
        assert not self.aborted
        assert not self.flying
        assert self.first, "ran before the router's word"
        if not self.held:
            assert (blocks, chunks) == (0, 0)
            return
        own = self.cached // CHUNK_BLOCKS
        run = own
        while run in self.landed:
            run += 1
        assert blocks == max(self.cached, run * CHUNK_BLOCKS), "not the contiguous prefix"
        assert chunks == run - own


def world(chunks: int, *, await_first: bool, cached: int = 0) -> World:
    state = parking.park(chunks, CHUNK_BLOCKS, await_first=await_first, cached=cached)
    made = World(state, first=not await_first)
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
    for _ in range(2 * w.state.chunks + 2):
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
    assert w.outcome == Admit(chunks * CHUNK_BLOCKS, chunks - cached // CHUNK_BLOCKS)


def test_a_prompt_without_a_full_chunk_runs_on_the_routers_word() -> None:
    w = world(0, await_first=True)
    assert w.outcome is None
    w.tell(FirstKnown())
    assert w.outcome == Admit(0, 0)


def test_a_request_without_a_partner_and_without_chunks_runs_at_once() -> None:
    assert world(0, await_first=False).outcome == Admit(0, 0)


def test_blocks_are_wanted_only_when_a_fetch_could_start() -> None:
    w = world(3, await_first=True)
    assert not w.state.wants_blocks
    w.tell(Announced(0b001))
    assert w.state.wants_blocks


def test_chunks_in_the_own_cache_want_no_blocks() -> None:
    w = world(2, await_first=True, cached=2)
    w.tell(Announced(0b01))
    assert not w.state.wants_blocks
    w.tell(Announced(0b10))
    assert w.state.wants_blocks


def test_a_chunk_lost_in_the_middle_keeps_what_lies_before_it() -> None:
    w = world(3, await_first=True)
    w.tell(Announced(0b111))
    w.tell(Reserved(0))
    w.tell(Landed(2))
    w.tell(Lost(1))
    w.tell(Landed(0))
    w.tell(FirstKnown())
    assert w.outcome is None  # the partner may put it again
    w.tell(Ended())
    assert w.outcome == Admit(CHUNK_BLOCKS, 1)


def test_a_lost_chunk_announced_again_is_fetched_again() -> None:
    w = world(2, await_first=True)
    w.tell(Announced(0b11))
    w.tell(Reserved(0))
    w.tell(Lost(0))
    w.tell(Landed(1))
    assert not w.flying
    w.tell(Announced(0b01))
    assert w.flying == {0}
    w.tell(Landed(0))
    w.tell(FirstKnown())
    assert w.outcome == Admit(2 * CHUNK_BLOCKS, 2)


def test_after_the_end_chunks_behind_a_hole_are_not_fetched() -> None:
    w = world(3, await_first=True)
    w.tell(Announced(0b101))
    w.tell(Ended())
    w.tell(Reserved(0))
    assert w.flying == {0}


def test_an_abort_in_mid_fetch_holds_the_blocks_until_the_fetch_has_settled() -> None:
    w = world(2, await_first=True)
    w.tell(Announced(0b11))
    w.tell(Reserved(0))
    w.tell(Abort())
    w.tell(Lost(0))
    assert w.held
    w.tell(Landed(1))
    assert not w.held
    assert w.outcome == Forget()


def test_blocks_given_back_are_wanted_again_and_their_chunks_fetched_anew() -> None:
    w = world(2, await_first=True)
    w.tell(Announced(0b11))
    w.tell(Reserved(0))
    w.tell(Landed(0))
    w.tell(GiveBack())
    assert w.held  # chunk 1 is still in flight
    w.tell(Landed(1))
    assert not w.held
    assert w.state.wants_blocks
    w.tell(Reserved(0))
    assert w.flying == {0, 1}


def test_a_deadline_after_the_first_token_runs_with_what_has_landed() -> None:
    w = world(3, await_first=True)
    w.tell(Announced(0b001))
    w.tell(Reserved(0))
    w.tell(Landed(0))
    w.tell(Timeout())
    assert w.outcome is None  # only the router ends the wait for the first token
    w.tell(FirstKnown())
    w.tell(Timeout())
    assert w.outcome == Admit(CHUNK_BLOCKS, 1)


@pytest.mark.parametrize("cached", [1, 3])
def test_a_partly_cached_chunk_counts_at_least_its_cached_blocks(cached: int) -> None:
    w = world(2, await_first=False)
    w.tell(Announced(0b11))
    w.tell(Reserved(cached))
    for chunk in sorted(w.flying):
        w.tell(Lost(chunk))
    w.tell(Ended())
    assert w.outcome == Admit(cached, 0)
