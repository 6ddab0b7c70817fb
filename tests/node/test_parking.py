"""The parked request's state machine, under every order of events hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

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
    """Drives one machine, keeps what really happened, and checks every action against it.

    `puts` counts how often each chunk was announced, `begun` which of these a fetch was of, and
    `gone` up to which a chunk is known to be lost."""

    state: Parked
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
        self.state, actions = parking.start(self.state)
        self._obey(actions)

    def tell(self, event: parking.Event) -> None:
        self._notice(event)
        over = self.outcome is not None
        self.state, actions = parking.step(self.state, event)
        assert not (over and actions), "an action came after the end"
        self._obey(actions)
        if self.outcome is None:
            self._check_patience()

    def _notice(self, event: parking.Event) -> None:
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

    def _obey(self, actions: list[parking.Action]) -> None:
        for action in actions:
            assert self.outcome is None, "an action came after the end"
            match action:
                case Fetch(chunk):
                    self._check_fetch(chunk)
                    self.flying.add(chunk)
                    self.begun[chunk] = self.puts[chunk]
                    assert len(self.flying) <= parking.WINDOW
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
    state = parking.park(chunks, CHUNK_BLOCKS, await_first=await_first, cached=cached)
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


def test_a_prompt_without_a_full_chunk_runs_on_the_routers_word() -> None:
    w = world(0, await_first=True)
    assert w.outcome is None
    w.tell(FirstKnown())
    assert w.outcome == Admit()


def test_a_request_without_a_partner_and_without_chunks_runs_at_once() -> None:
    assert world(0, await_first=False).outcome == Admit()


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


def test_a_chunk_lost_in_the_middle_is_a_hole_and_nobody_waits_for_it() -> None:
    w = world(4, await_first=True)
    w.tell(Announced(0b1111))
    w.tell(Reserved(0))
    for chunk in (0, 2, 3):
        w.tell(Landed(chunk))
    w.tell(Lost(1))
    w.tell(FirstKnown())
    assert w.outcome == Admit(((0, 2), (4, 8)), 3)


def test_a_chunk_that_was_not_announced_is_waited_for_until_the_partners_end() -> None:
    w = world(3, await_first=True)
    w.tell(Announced(0b101))
    w.tell(Reserved(0))
    w.tell(Landed(0))
    w.tell(Landed(2))
    w.tell(FirstKnown())
    assert w.outcome is None
    w.tell(Ended())
    assert w.outcome == Admit(((0, 2), (4, 6)), 2)


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
    assert w.outcome == Admit(((0, 4),), 2)


def test_a_chunk_put_again_while_its_lost_bytes_are_on_their_way_is_fetched_again() -> None:
    w = world(1, await_first=True)
    w.tell(Announced(0b1))
    w.tell(Reserved(0))
    w.tell(Announced(0b1))
    w.tell(Lost(0))
    assert w.flying == {0}
    w.tell(Lost(0))
    assert not w.flying  # nobody has put it a third time


def test_after_the_end_chunks_behind_a_hole_are_fetched_too() -> None:
    w = world(3, await_first=True)
    w.tell(Announced(0b101))
    w.tell(Ended())
    w.tell(Reserved(0))
    assert w.flying == {0, 2}


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
    assert w.outcome == Admit(((0, 2),), 1)


def test_a_deadline_in_mid_fetch_waits_until_the_fetch_has_settled() -> None:
    w = world(2, await_first=False)
    w.tell(Announced(0b11))
    w.tell(Reserved(0))
    w.tell(Landed(0))
    w.tell(Timeout())
    assert w.outcome is None
    assert w.held
    w.tell(Landed(1))
    assert w.outcome == Admit(((0, 4),), 2)


def test_of_a_partly_cached_chunk_only_the_rest_has_landed() -> None:
    w = world(3, await_first=False)
    w.tell(Announced(0b111))
    w.tell(Reserved(3))
    assert w.flying == {1, 2}
    w.tell(Landed(1))
    w.tell(Landed(2))
    w.tell(Ended())
    assert w.outcome == Admit(((3, 6),), 2)


def test_a_partly_cached_chunk_that_is_lost_keeps_its_cached_blocks() -> None:
    w = world(2, await_first=False)
    w.tell(Announced(0b11))
    w.tell(Reserved(1))
    w.tell(Lost(0))
    w.tell(Lost(1))
    w.tell(Ended())
    assert w.outcome == Admit()
    assert w.state.cached_blocks == 1
