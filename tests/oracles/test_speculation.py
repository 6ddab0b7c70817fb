"""Tokens of steps with drafts (O-SPD): published outcomes, and the expected numbers for drafts that
are each right with a known probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.scheduling.sequence import Sequence as EngineSequence
from baton_engine.speculation.lookup import PromptLookup
from baton_engine.speculation.proposer import Proposer
from baton_engine.speculation.step_cost import StepCost
from baton_protocol.request import Request
from tests.support.engines.engine_core import EOS, drive, make_request, run_all, scripted
from tests.support.engines.landing import sim, watched_sim
from tests.support.engines.proposers import WRONG, Fixed, Guesses, drafter

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
# Drafts, the target's samples after the known tokens and after each draft, and the step's tokens.
OUTCOMES = [
    pytest.param((2, 3, 4), (2, 3, 14, 50), [2, 3, 14], id="O-SPD-1"),
    pytest.param((7, 8, 9), (7, 8, 5, 4), [7, 8, 5], id="O-SPD-2b"),
    pytest.param((7, 8, 9), (7, 8, 9, 4), [7, 8, 9, 4], id="O-SPD-2c-all"),
    pytest.param((7, 8, 9), (6, 50, 51, 52), [6], id="O-SPD-2c-none"),
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


@pytest.mark.parametrize(("drafts", "samples", "tokens"), OUTCOMES)
def test_a_step_with_drafts_yields_the_expected_tokens_O_SPD_1_O_SPD_2b_O_SPD_2c(
    drafts: Sequence[int], samples: Sequence[int], tokens: Sequence[int]
) -> None:
    prompt = (20, 21, 22)
    script = (30, *samples, *(EOS,) * 8)  # 30 is sampled with the prompt
    engine, runner = scripted(
        lambda sample: script[sample.position - len(prompt)],
        drafter=drafter(Fixed(drafts), most=3, vocab_size=100),
    )
    step = run_all(engine, [make_request("a", prompt, max_tokens=6)]).steps[1]
    assert list(runner.steps[1][0].tokens) == [30, *drafts]
    assert [token.id for token in step.tokens] == tokens


@pytest.mark.parametrize("wrong", range(6))
def test_a_step_yields_the_right_drafts_and_one_token_of_the_target_O_SPD_2(wrong: int) -> None:
    """With 5 drafts: i tokens if draft i is the first wrong one, 6 if none is."""
    request = make_request("a", 9, max_tokens=13)
    answer = run_all(sim(), [request]).ids("a")
    engine, _ = watched_sim(drafter(OneWrong(answer, wrong), most=5))
    run = run_all(engine, [request])
    assert run.ids("a") == answer
    first = run.steps[1]  # after the prompt
    assert [token.id for token in first.tokens] == answer[1 : 1 + (wrong or 6)]
    assert (first.drafted, first.accepted) == (5, wrong - 1 if wrong else 5)


def test_tokens_of_a_step_come_by_sequence_and_position_O_SPD_3() -> None:
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
def test_drafts_stay_within_the_longest_sequence_O_SPD_6b(room: int) -> None:
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
def test_drafts_of_a_known_accuracy_yield_the_expected_tokens_O_SPD_4(
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
def test_the_time_won_is_that_of_the_formula_O_SPD_4(
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


def test_the_last_three_tokens_are_looked_up_O_SPD_8() -> None:
    history = np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    assert PromptLookup(3, 5).after(history, 3) == [4, 5, 1]
    assert PromptLookup(4, 5).after(history, 3) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [0, 5, 10, None])
def test_no_proposer_changes_a_token_O_SPD_9(temperature: float, right: int | None) -> None:
    """Drafts that are always, half the time or never right, or looked up."""
    requests = [
        make_request(name, 8, max_tokens=24, temperature=temperature, seed=5) for name in "ab"
    ]
    answers = run_all(sim(), requests).all_ids()
    proposer: Proposer = PromptLookup(1, 3) if right is None else Guesses(answers, right)
    engine, _ = watched_sim(drafter(proposer))
    run = run_all(engine, requests)
    assert run.all_ids() == answers
    assert any(step.drafted for step in run.steps)
