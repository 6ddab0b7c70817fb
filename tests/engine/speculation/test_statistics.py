"""How many tokens a step yields, by how many of its drafts are right: published outcomes, and the
expected numbers for drafts that are each right with a known probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.scheduling.acceptance import Acceptance
from baton_engine.scheduling.sequence import Sequence as EngineSequence
from baton_engine.speculation.step_cost import StepCost
from baton_protocol.request import Request
from tests.support.engines.engine_core import drive, make_request, run_all
from tests.support.engines.landing import sim, watched_sim
from tests.support.engines.proposers import WRONG, Guesses, drafter

# Drafts per step, probability that each is right, drafts expected to be accepted, tokens per step,
# and how many times as fast that is if a draft costs a tenth of a step of one token.
EXPECTED = [
    (3, 0.5, 0.8750, 1.8750, 1.4423),
    (3, 0.7, 1.5330, 2.5330, 1.9485),
    (3, 0.8, 1.9520, 2.9520, 2.2708),
    (3, 0.9, 2.4390, 3.4390, 2.6454),
    (5, 0.5, 0.9688, 1.9688, 1.3125),
    (5, 0.7, 1.9412, 2.9412, 1.9608),
    (5, 0.8, 2.6893, 3.6893, 2.4595),
    (5, 0.9, 3.6856, 4.6856, 3.1237),
    (8, 0.8, 3.3289, 4.3289, 2.4050),
]
TOKENS = 3000


@dataclass(frozen=True)
class OneWrong:
    """Drafts a known answer, with draft number `wrong` of each step (from 1) wrong; 0: none."""

    answer: Sequence[int]
    wrong: int

    def propose(
        self, sequences: Sequence[EngineSequence], most: Sequence[int]
    ) -> list[Sequence[int]]:
        return [
            [
                WRONG if number == self.wrong else id
                for number, id in enumerate(self.answer[sequence.num_outputs :][:length], start=1)
            ]
            for sequence, length in zip(sequences, most, strict=True)
        ]

    def forget(self, sequence: EngineSequence) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("wrong", range(6))
def test_a_step_yields_the_right_drafts_and_one_token_of_the_target(wrong: int) -> None:
    """With 5 drafts: i tokens if draft i is the first wrong one, 6 if none is."""
    request = make_request("a", 9, max_tokens=13)
    answer = run_all(sim(), [request]).ids("a")
    engine, _ = watched_sim(drafter(OneWrong(answer, wrong), most=5))
    run = run_all(engine, [request])
    assert run.ids("a") == answer
    first = run.steps[1]  # after the prompt
    assert [token.id for token in first.tokens] == answer[1 : 1 + (wrong or 6)]
    assert (first.drafted, first.accepted) == (5, wrong - 1 if wrong else 5)


def test_tokens_of_a_step_come_by_sequence_and_position() -> None:
    """Of three sequences, none, one and two drafts are right."""
    requests = [make_request(name, 8, max_tokens=8) for name in "abc"]
    answers = run_all(sim(), requests).all_ids()
    drafts = {
        (name, 0): [*answers[name, 0][: 1 + right], WRONG, *answers[name, 0][2 + right :]]
        for right, name in enumerate("abc")
    }
    engine, _ = watched_sim(drafter(Guesses(drafts), most=3))
    step = run_all(engine, requests).steps[1]
    assert [(token.request, token.offset) for token in step.tokens] == [
        *(("a", 1), ("b", 1), ("b", 2), ("c", 1), ("c", 2), ("c", 3)),
    ]


@pytest.mark.parametrize("room", range(1, 7))
def test_drafts_stay_within_the_longest_sequence(room: int) -> None:
    request = make_request("a", 9, max_tokens=20)
    answer = run_all(sim(), [request]).ids("a")
    engine, _ = watched_sim(drafter(OneWrong(answer, 0), most=5), max_model_len=9 + room)
    run = run_all(engine, [request])  # checks the blocks and bytes of each step
    assert run.ids("a") == answer[:room]
    assert all(step.drafted <= max(0, room - 2) for step in run.steps)


def drafting(request: Request, most: int, rate: float) -> EngineCore:
    answers = run_all(sim(max_model_len=4096, num_blocks=1100), [request]).all_ids()
    made = drafter(Guesses(answers, round(10 * rate)), most=most)
    return watched_sim(made, max_model_len=4096, num_blocks=1100)[0]


@pytest.mark.long
@pytest.mark.parametrize(("most", "rate", "accepted", "tokens", "speed"), EXPECTED)
def test_drafts_of_a_known_accuracy_yield_the_expected_tokens(
    most: int, rate: float, accepted: float, tokens: float, speed: float
) -> None:
    assert sum(rate**place for place in range(1, most + 1)) == pytest.approx(accepted, abs=5e-5)
    request = make_request("a", 9, max_tokens=TOKENS)
    engine = drafting(request, most, rate)
    engine.submit(request)
    full = [row for step in drive(engine, TOKENS).steps for row in step.drafts][:-most]
    assert all(row.drafted == most for row in full)
    found = sum(row.accepted for row in full) / len(full)
    assert 1 + found == pytest.approx(tokens, rel=0.05)
    load, positions = engine.load(), min(most, 4)
    by_position = [getattr(load, f"accepted_at_{place}_total") for place in range(1, positions + 1)]
    expected = [load.drafted_rows_total * rate**place for place in range(1, positions + 1)]
    assert by_position == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("most", "rate", "accepted", "tokens", "speed"), EXPECTED)
def test_the_time_won_is_that_of_the_formula(
    most: int, rate: float, accepted: float, tokens: float, speed: float
) -> None:
    """Steps that take 9 ms and 1 ms per token: a draft costs a tenth of a step of one token."""
    cost = StepCost()
    for size in (1, 4, 6, 9) * 10:
        cost.note(size, 0.009 + 0.001 * size)
    steps = 10_000
    won = cost.seconds_won(1, steps * most, round(steps * accepted))
    alone = steps * tokens * 0.010
    assert alone / (alone - won) == pytest.approx(speed, abs=1e-3)


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
