"""How many drafts a sequence gets: more where they are right, none where they cost more time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest

from baton_engine.scheduling.acceptance import LEAST_PAUSE, PATIENCE, Acceptance
from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.loss_limit import MOST_S, SHARE, LossLimit
from baton_engine.speculation.step_clock import StepClock
from baton_engine.speculation.step_cost import StepCost
from tests.support.engines.engine_core import make_request
from tests.support.engines.landing import watched_sim


def after(steps: int, drafted: int, accepted: int) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(steps):
        acceptance.note(drafted, accepted)
    return acceptance


def test_right_drafts_are_followed_by_as_many_as_permitted() -> None:
    acceptance = after(20, 4, 4)
    assert acceptance.rate > 0.9
    assert acceptance.length(8, 0.3, known=100) == 8
    assert (acceptance.drafted, acceptance.accepted) == (80, 80)


def test_fewer_drafts_where_a_token_costs_more() -> None:
    lengths = [after(8, 4, 2).length(8, cost, known=100) for cost in (0.05, 0.2, 0.5)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] > 0


def test_wrong_drafts_pause_and_are_tried_again() -> None:
    acceptance = after(20, 4, 0)
    assert acceptance.length(8, 0.3, known=100) == 0
    assert acceptance.length(8, 0.3, known=100 + LEAST_PAUSE - 1) == 0
    assert acceptance.length(8, 0.3, known=100 + LEAST_PAUSE) == 1
    acceptance.note(1, 0)
    assert acceptance.length(8, 0.3, known=100 + LEAST_PAUSE + 2) == 0
    assert acceptance.length(8, 0.3, known=100 + 2 * LEAST_PAUSE + 2) == 0  # twice as long a pause


def test_tokens_that_a_grammar_forces_say_nothing_about_guesses() -> None:
    acceptance = after(20, 4, 2)
    rate, acceptance.forced = acceptance.rate, True
    acceptance.note(8, 8)
    assert acceptance.rate == rate
    assert (acceptance.drafted, acceptance.accepted) == (88, 48)


def test_sequences_without_a_guess_pause_longer_and_longer() -> None:
    acceptance, known, pauses = Acceptance(), 100, []
    for _ in range(PATIENCE + 4):
        acceptance.note_no_guess(known)
        pauses.append(max(0, acceptance.resumes_at - known))
        known = max(known + 1, acceptance.resumes_at)
    assert pauses == [0] * (PATIENCE - 1) + [8, 16, 32, 32, 32]
    acceptance.note(4, 4)
    acceptance.note_no_guess(known)
    assert acceptance.resumes_at <= known


@pytest.mark.parametrize("sequences", [1, 8])
def test_the_cost_of_a_token_is_measured(sequences: int) -> None:
    """Steps that take 10 ms and 1 ms per token."""
    cost = StepCost()
    for tokens in (1, 5, 2, 8, 12) * 20:
        cost.note(tokens, 0.010 + 0.001 * tokens)
    expected = sequences * 0.001 / (0.010 + 0.001 * sequences)
    assert cost.least_rate(sequences) == pytest.approx(expected, rel=1e-6)


def test_drafts_beside_better_ones_must_be_more_probable() -> None:
    """Steps that take 10 ms and 2 ms per token. Beside drafts of another sequence that are always
    right, a token of a step takes less time, and a further draft costs more than it yields."""
    cost = StepCost()
    for tokens in (1, 5, 2, 8, 12) * 20:
        cost.note(tokens, 0.010 + 0.002 * tokens)
    alone, beside = cost.least_rate(2), cost.least_rate(2, [1.0] * 8)
    assert alone == pytest.approx(2 * 0.002 / 0.014, rel=1e-6)
    assert beside == pytest.approx(10 * 0.002 / 0.030, rel=1e-6)
    assert cost.least_rate(2, [alone / 2] * 8) == alone
    acceptance = after(8, 4, 2)
    assert acceptance.length(8, alone, 100, beside) < acceptance.length(8, alone, 100)
    assert after(20, 4, 2).length(8, 0.3, 100, 0.99) == 0
    assert acceptance.resumes_at == 0  # it goes on when the others have ended


def test_a_token_costs_something_before_steps_of_two_sizes_were_measured() -> None:
    cost = StepCost()
    assert 0 < cost.least_rate(1) < cost.least_rate(32) <= 1
    for _ in range(10):
        cost.note(4, 0.02)
    assert 0 < cost.least_rate(1) < cost.least_rate(32) <= 1


def test_the_cost_of_a_token_is_kept_while_steps_have_the_same_size() -> None:
    """Steps that take 10 ms and 5 ms per token. At last all steps have one token, and earlier ones
    lose their weight."""
    cost = StepCost()
    for tokens in (1, 5) * 20 + (1,) * 600:
        cost.note(tokens, 0.010 + 0.005 * tokens)
    assert cost.least_rate(1) == pytest.approx(1 / 3, rel=1e-3)


def test_drafts_may_lose_a_small_share_of_the_time() -> None:
    limit = LossLimit()
    limit.note_won(-MOST_S)
    assert limit.reached
    limit.note_step(1.0)
    assert not limit.reached
    limit.note_won(-SHARE)
    assert limit.reached
    limit.note_won(100.0)  # what was won long ago is no reason to lose as much now
    limit.note_won(-1.1 * MOST_S)
    assert limit.reached


@dataclass
class Slow:
    """A proposer of wrong drafts that catches up for some seconds first."""

    clock: StepClock
    now: list[float]
    asked: int = 0

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        self.asked += 1
        with self.clock.stopped():
            self.now[0] += 0.05
        return [(1,) for _ in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def test_a_proposer_whose_catching_up_loses_time_is_not_asked() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    slow = Slow(clock, now)
    made = Drafter(slow, 4, 259, clock=clock, limit=LossLimit())
    engine, _ = watched_sim(made, max_model_len=400)
    engine.submit(make_request("a", 9, max_tokens=300))
    while engine.has_work():
        engine.step()
        now[0] += 0.001
    assert MOST_S / 0.05 <= slow.asked <= MOST_S / 0.05 + 2
    load = engine.load()
    assert load.draft_seconds_lost_total >= 0.05 * (slow.asked - 1)


def test_nothing_is_won_or_lost_before_a_step_was_measured() -> None:
    assert StepCost().seconds_won(1, 8, 4) == 0.0


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 0.9])
def test_the_estimated_rate_approaches_the_accuracy(rate: float) -> None:
    """Rows of 5 drafts whose outcomes have the probabilities of that accuracy, in turn."""
    acceptance, due = Acceptance(), [0.0] * 6
    for _ in range(200):
        chances = [rate**place * (1 - rate) for place in range(5)] + [rate**5]
        due = [sum(pair) for pair in zip(due, chances, strict=True)]
        outcome = max(range(6), key=due.__getitem__)
        due[outcome] -= 1
        acceptance.note(5, outcome)
    assert acceptance.rate == pytest.approx(rate, abs=0.12)
