"""The ledger of a prefill job's chunks, under every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton_node.engine import publish_state
from baton_node.engine.publish_state import (
    Announce,
    Closed,
    Computed,
    End,
    LookedUp,
    Missing,
    Publish,
    PublishState,
    Settled,
)


@dataclass
class World:
    state: PublishState
    computed: int = 0
    stored: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    announced: list[int] = field(default_factory=list)
    failed: bool = False
    ended: bool = False

    def tell(self, event: publish_state.Event) -> None:
        match event:
            case LookedUp(chunks):
                self.stored |= {i for i in range(self.state.chunks) if chunks >> i & 1}
            case Computed(chunks):
                self.computed = max(self.computed, chunks)
            case Missing(chunk):
                self.stored.discard(chunk)
            case Settled(chunk, ok):
                self.flying.discard(chunk)
                self.failed |= not ok
                if ok:
                    self.stored.add(chunk)
                    self.announced.append(chunk)  # by who has put it
        self.state, actions = publish_state.step(self.state, event)
        for action in actions:
            assert not self.ended, "an action came after the end"
            match action:
                case Publish(chunk):
                    assert chunk < self.computed, "a put of blocks that are not filled"
                    assert chunk not in self.stored | self.flying, "a put for nothing"
                    assert not self.failed, "a put after the store had failed"
                    self.flying.add(chunk)
                case Announce(first, count):
                    assert count > 0
                    run = range(first, first + count)
                    assert self.stored.issuperset(run), "announced what is not there"
                    self.announced.extend(run)
                case End():
                    assert not self.flying, "ended with puts in flight"
                    self.ended = True


@given(st.data())
def test_every_order_ends_once_with_all_that_exists_announced(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 12))
    w = World(PublishState(chunks))
    looked_up = closed = False
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["lookup", "compute", "good", "bad", "missing", "close"])):
            case "lookup" if not looked_up:
                looked_up = True
                w.tell(LookedUp(data.draw(st.integers(0, (1 << chunks) - 1))))
            case "compute" if not closed:
                w.tell(Computed(data.draw(st.integers(0, chunks))))
            case "good" if w.flying:
                w.tell(Settled(data.draw(st.sampled_from(sorted(w.flying))), True))
            case "bad" if w.flying and data.draw(st.integers(0, 5)) == 0:
                w.tell(Settled(data.draw(st.sampled_from(sorted(w.flying))), False))
            case "missing" if w.computed == 0 and w.stored:
                w.tell(Missing(data.draw(st.sampled_from(sorted(w.stored)))))
            case "close" if looked_up and data.draw(st.integers(0, 9)) == 0:
                closed = True
                w.tell(Closed())
    if not looked_up:
        w.tell(LookedUp(0))
    w.tell(Computed(chunks))
    for chunk in sorted(w.flying):
        w.tell(Settled(chunk, True))
    w.tell(Closed())
    assert w.ended
    assert w.stored.issubset(w.announced)
    if not (closed or w.failed):
        assert w.stored == set(range(chunks))


def test_chunks_with_a_marker_are_announced_in_runs_before_anything_is_computed() -> None:
    state, actions = publish_state.step(PublishState(6), LookedUp(0b101101))
    assert actions == [Announce(0, 1), Announce(2, 2), Announce(5, 1)]
    _, actions = publish_state.step(state, Computed(6))
    assert actions == [Publish(1), Publish(4)]


def test_a_prompt_without_a_full_chunk_ends_at_once() -> None:
    assert publish_state.step(PublishState(0), LookedUp(0))[1] == [End()]


def test_a_failed_put_ends_the_job_when_the_others_have_settled() -> None:
    w = World(PublishState(4))
    w.tell(LookedUp(0))
    w.tell(Computed(2))
    w.tell(Settled(0, False))
    assert not w.ended
    w.tell(Computed(4))
    assert w.flying == {1}
    w.tell(Settled(1, True))
    assert w.ended
    assert w.announced == [1]


def test_a_chunk_that_was_not_there_after_all_is_put_again_and_announced_again() -> None:
    w = World(PublishState(2))
    w.tell(LookedUp(0b11))
    w.tell(Missing(1))
    w.tell(Computed(2))
    assert w.flying == {1}
    w.tell(Settled(1, True))
    assert w.announced == [0, 1, 1]
    assert w.ended


def test_an_aborted_job_ends_without_further_puts() -> None:
    w = World(PublishState(3))
    w.tell(LookedUp(0))
    w.tell(Computed(1))
    w.tell(Closed())
    w.tell(Settled(0, True))
    assert w.ended
    assert not w.flying
