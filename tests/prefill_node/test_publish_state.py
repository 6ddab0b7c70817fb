"""The publish state machine of a prefill job, under every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton_prefill_node.publish_state import PublishActions, PublishState, PublishTransition


@dataclass
class Driver:
    """Drives a PublishState, records what happens to each chunk, and checks every action."""

    state: PublishState
    computed: int = 0
    stored: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    announced: list[int] = field(default_factory=list)
    failed: bool = False
    ended: bool = False

    @property
    def needed(self) -> set[int]:
        return {i for i in range(self.state.chunks) if not self.state.unneeded >> i & 1}

    def find(self, chunks: int) -> None:
        self.stored |= {i for i in range(self.state.chunks) if chunks >> i & 1}
        self._apply(self.state.find(chunks))

    def compute(self, chunks: int) -> None:
        self.computed = max(self.computed, chunks)
        self._apply(self.state.compute(chunks))

    def miss(self, chunk: int) -> None:
        self.stored.discard(chunk)
        self._apply(self.state.miss(chunk))

    def settle(self, chunk: int, ok: bool) -> None:
        self.flying.discard(chunk)
        self.failed |= not ok
        if ok:
            self.stored.add(chunk)
            self.announced.append(chunk)  # the connector announces a chunk that it has put
        self._apply(self.state.settle(chunk, ok))

    def close(self) -> None:
        self._apply(self.state.close())

    def _apply(self, outcome: PublishTransition) -> None:
        self.state, actions = outcome
        assert not self.ended or actions == PublishActions(), "an action came after the end"
        for first, count in actions.announce:
            assert count > 0
            run = range(first, first + count)
            assert self.stored.issuperset(run), "announced a chunk that is not stored"
            self.announced.extend(run)
        for chunk in actions.publish:
            assert chunk < self.computed, "a put of blocks that are not computed"
            assert chunk not in self.stored | self.flying, (
                "a put of a chunk that is stored or in flight"
            )
            assert not self.failed, "a put after the store had failed"
            assert chunk in self.needed, "a put of a chunk that nobody needs"
            self.flying.add(chunk)
        if actions.end:
            assert not self.flying, "ended with puts in flight"
            self.ended = True


@given(st.data())
def test_every_order_ends_once_and_announces_every_stored_chunk(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 12))
    driver = Driver(PublishState(chunks, data.draw(st.integers(0, (1 << chunks - 1) - 1))))
    looked_up = closed = False
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["lookup", "compute", "good", "bad", "missing", "close"])):
            case "lookup" if not looked_up:
                looked_up = True
                driver.find(data.draw(st.integers(0, (1 << chunks) - 1)))
            case "compute" if not closed:
                driver.compute(data.draw(st.integers(0, chunks)))
            case "good" if driver.flying:
                driver.settle(data.draw(st.sampled_from(sorted(driver.flying))), True)
            case "bad" if driver.flying and data.draw(st.integers(0, 5)) == 0:
                driver.settle(data.draw(st.sampled_from(sorted(driver.flying))), False)
            case "missing" if driver.computed == 0 and driver.stored:
                driver.miss(data.draw(st.sampled_from(sorted(driver.stored))))
            case "close" if looked_up and data.draw(st.integers(0, 9)) == 0:
                closed = True
                driver.close()
    if not looked_up:
        driver.find(0)
    driver.compute(chunks)
    for chunk in sorted(driver.flying):
        driver.settle(chunk, True)
    driver.close()
    assert driver.ended
    assert (driver.stored & driver.needed).issubset(driver.announced)
    assert driver.needed.issuperset(driver.announced)
    if not (closed or driver.failed):
        assert driver.stored >= driver.needed


def test_stored_chunks_are_announced_in_runs_before_the_prompt_is_computed() -> None:
    state, actions = PublishState(6).find(0b101101)
    assert actions.announce == ((0, 1), (2, 2), (5, 1))
    _, actions = state.compute(6)
    assert actions.publish == (1, 4)


def test_chunks_that_nobody_needs_are_neither_announced_nor_put_nor_awaited() -> None:
    state, actions = PublishState(6, unneeded=0b001111).find(0b010010)
    assert actions == PublishActions(announce=((4, 1),))
    state, actions = state.compute(6)
    assert actions.publish == (5,)
    _, actions = state.settle(5, True)
    assert actions.end


def test_a_prompt_without_a_full_chunk_ends_at_once() -> None:
    assert PublishState(0).find(0)[1] == PublishActions(end=True)


def test_a_failed_put_ends_the_job_when_the_other_puts_have_settled() -> None:
    driver = Driver(PublishState(4))
    driver.find(0)
    driver.compute(2)
    driver.settle(0, False)
    assert not driver.ended
    driver.compute(4)
    assert driver.flying == {1}
    driver.settle(1, True)
    assert driver.ended
    assert driver.announced == [1]


def test_a_chunk_that_the_store_has_lost_is_put_and_announced_again() -> None:
    driver = Driver(PublishState(2))
    driver.find(0b11)
    driver.miss(1)
    driver.compute(2)
    assert driver.flying == {1}
    driver.settle(1, True)
    assert driver.announced == [0, 1, 1]
    assert driver.ended


def test_an_aborted_job_ends_without_further_puts() -> None:
    driver = Driver(PublishState(3))
    driver.find(0)
    driver.compute(1)
    driver.close()
    driver.settle(0, True)
    assert driver.ended
    assert not driver.flying
