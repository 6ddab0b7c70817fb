"""The ledger of a prefill job's chunks, under every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton_prefill_node.publisher import Outcome, PublishActions, PublishState


@dataclass
class World:
    state: PublishState
    computed: int = 0
    stored: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    announced: list[int] = field(default_factory=list)
    failed: bool = False
    ended: bool = False

    def find(self, chunks: int) -> None:
        self.stored |= {i for i in range(self.state.chunks) if chunks >> i & 1}
        self._obey(self.state.find(chunks))

    def compute(self, chunks: int) -> None:
        self.computed = max(self.computed, chunks)
        self._obey(self.state.compute(chunks))

    def miss(self, chunk: int) -> None:
        self.stored.discard(chunk)
        self._obey(self.state.miss(chunk))

    def settle(self, chunk: int, ok: bool) -> None:
        self.flying.discard(chunk)
        self.failed |= not ok
        if ok:
            self.stored.add(chunk)
            self.announced.append(chunk)  # by who has put it
        self._obey(self.state.settle(chunk, ok))

    def close(self) -> None:
        self._obey(self.state.close())

    def _obey(self, outcome: Outcome) -> None:
        self.state, actions = outcome
        assert not self.ended or actions == PublishActions(), "an action came after the end"
        for first, count in actions.announce:
            assert count > 0
            run = range(first, first + count)
            assert self.stored.issuperset(run), "announced what is not there"
            self.announced.extend(run)
        for chunk in actions.publish:
            assert chunk < self.computed, "a put of blocks that are not filled"
            assert chunk not in self.stored | self.flying, "a put for nothing"
            assert not self.failed, "a put after the store had failed"
            self.flying.add(chunk)
        if actions.end:
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
                w.find(data.draw(st.integers(0, (1 << chunks) - 1)))
            case "compute" if not closed:
                w.compute(data.draw(st.integers(0, chunks)))
            case "good" if w.flying:
                w.settle(data.draw(st.sampled_from(sorted(w.flying))), True)
            case "bad" if w.flying and data.draw(st.integers(0, 5)) == 0:
                w.settle(data.draw(st.sampled_from(sorted(w.flying))), False)
            case "missing" if w.computed == 0 and w.stored:
                w.miss(data.draw(st.sampled_from(sorted(w.stored))))
            case "close" if looked_up and data.draw(st.integers(0, 9)) == 0:
                closed = True
                w.close()
    if not looked_up:
        w.find(0)
    w.compute(chunks)
    for chunk in sorted(w.flying):
        w.settle(chunk, True)
    w.close()
    assert w.ended
    assert w.stored.issubset(w.announced)
    if not (closed or w.failed):
        assert w.stored == set(range(chunks))


def test_chunks_with_a_marker_are_announced_in_runs_before_anything_is_computed() -> None:
    state, actions = PublishState(6).find(0b101101)
    assert actions.announce == ((0, 1), (2, 2), (5, 1))
    _, actions = state.compute(6)
    assert actions.publish == (1, 4)


def test_a_prompt_without_a_full_chunk_ends_at_once() -> None:
    assert PublishState(0).find(0)[1] == PublishActions(end=True)


def test_a_failed_put_ends_the_job_when_the_others_have_settled() -> None:
    w = World(PublishState(4))
    w.find(0)
    w.compute(2)
    w.settle(0, False)
    assert not w.ended
    w.compute(4)
    assert w.flying == {1}
    w.settle(1, True)
    assert w.ended
    assert w.announced == [1]


def test_a_chunk_that_was_not_there_after_all_is_put_again_and_announced_again() -> None:
    w = World(PublishState(2))
    w.find(0b11)
    w.miss(1)
    w.compute(2)
    assert w.flying == {1}
    w.settle(1, True)
    assert w.announced == [0, 1, 1]
    assert w.ended


def test_an_aborted_job_ends_without_further_puts() -> None:
    w = World(PublishState(3))
    w.find(0)
    w.compute(1)
    w.close()
    w.settle(0, True)
    assert w.ended
    assert not w.flying
