"""Drafts of next tokens: the same answers in fewer steps, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import TokenOut
from baton_engine.scheduling.sequence import Sequence as EngineSequence
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.proposer import Proposer
from baton_engine.speculation.step_clock import StepClock
from baton_protocol.ids import RequestId
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.tokenizer import Tokenizer
from tests.support.engines.engine_core import Run, drive, make_request, run_all, step_once
from tests.support.engines.landing import GROUPS, sim, watched_sim
from tests.support.engines.proposers import WRONG, Fixed, Guesses, drafter, sim_draft_model

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {"temperature_celsius": {"type": "integer", "maximum": 99, "minimum": 10}},
    "required": ["temperature_celsius"],
    "additionalProperties": False,
}


def drafting(made: Drafter, **changes: Any) -> EngineCore:
    return watched_sim(made, **changes)[0]


def run_of(engine: EngineCore, **params: Any) -> Run:
    return run_all(engine, [make_request("a", 9, **{"max_tokens": 24, "logprobs": 2} | params)])


def by_choice(run: Run) -> list[TokenOut]:
    return sorted(run.tokens, key=lambda token: (token.choice, token.offset))


def work(run: Run) -> int:
    """Steps that computed something after the prompt."""
    return sum(step.num_tokens > 0 for step in run.steps) - 1


def test_right_drafts_save_steps() -> None:
    alone = run_of(sim())
    engine = drafting(drafter(Guesses(alone.all_ids()), most=3))
    run = run_of(engine)
    assert run.tokens == alone.tokens
    # 23 tokens after the first: five steps of 4, and one of which the limit leaves 3.
    assert (work(alone), work(run)) == (23, 6)
    load = engine.load()
    assert (load.drafted_tokens_total, load.accepted_drafts_total) == (17, 17)
    assert load.generated_tokens_total == 24
    assert (load.drafted_rows_total, load.accepted_at_1_total, load.drafted_at_3_total) == (6, 6, 5)


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    alone = run_of(sim())
    right = alone.ids("a")
    answers = {("a", 0): [*right[:3], WRONG, *right[4:]]}
    engine = drafting(drafter(Guesses(answers), most=8))
    run = run_of(engine, max_tokens=9)
    assert run.ids("a") == right[:9]
    # After the first token: 1 and 2 are right and 3 is wrong; then from 4 on, all are.
    assert [(step.drafted, step.accepted) for step in run.steps[1:]] == [(7, 2), (4, 4)]


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "stop id": {"stop_token_ids": tuple(range(60, 70))},
    "min tokens": {"stop_token_ids": tuple(range(40, 90)), "min_tokens": 7},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "temperature": 1.0},
    "bad words": {"bad_words": tuple((id,) for id in range(40, 90, 2))},
    "two choices": {"n": 2, "temperature": 1.0},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}
PROPOSERS: dict[str, Sequence[int] | int | None] = {
    "a draft model": None,
    "all right": 10,
    "half right": 5,
    "always wrong": (WRONG,) * 4,
    "no ids of the vocabulary": (-1, 10**9),
    "EOS first": (EOS, EOS, EOS, EOS),
    "more than asked for": (70,) * 500,
    "nothing": (),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("drafts", PROPOSERS.values(), ids=PROPOSERS)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_no_drafts_change_a_token(
    params: dict[str, Any], drafts: Sequence[int] | int | None, overlap: bool
) -> None:
    alone = run_of(sim(eos_every=9), **params)
    proposer: Proposer
    if drafts is None:
        proposer = sim_draft_model(eos_every=9)
    else:
        proposer = Guesses(alone.all_ids(), drafts) if isinstance(drafts, int) else Fixed(drafts)
    engine = drafting(drafter(proposer), eos_every=9, overlap=overlap)
    run = run_of(engine, **params)
    assert by_choice(run) == by_choice(alone)
    assert engine.load().free_blocks == engine.info.num_blocks


FEW = {
    "num_blocks": 17,
    "max_model_len": 40,
}  # blocks of four sequences, but not of all their tokens
SECOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {}),
    "the target's blocks are short": (FEW, {}),
    "its own blocks are short": ({}, FEW),
    "it computes 12 tokens at a time": ({}, {"budget": 12}),
    "two groups of layers": ({"groups": GROUPS[2]}, {"groups": GROUPS[2]}),
    "it knows shorter sequences": ({}, {"max_model_len": 25}),
}


@pytest.mark.parametrize(("first", "second"), SECOND.values(), ids=SECOND)
def test_drafts_of_the_same_model_are_right_because_their_kv_is(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Whatever happens to the KV of either model: a simulated token depends on all of it."""
    requests = [
        make_request(name, length, max_tokens=14, temperature=1.0, seed=length, n=choices)
        for name, length, choices in (("a", 9, 1), ("b", 16, 2), ("c", 22, 1), ("d", 22, 1))
    ]
    alone = run_all(sim(**first), requests)
    model = sim_draft_model(**second)
    engine = drafting(drafter(model), **first)
    run = run_all(engine, requests)
    assert run.all_ids() == alone.all_ids()
    load = engine.load()
    assert load.drafted_tokens_total == load.accepted_drafts_total > 0
    assert (load.preemptions_total > 0) == (first is FEW)
    model.kv.check_integrity()
    assert model.kv.num_free == model.kv.num_blocks


def test_an_ended_choice_gives_the_blocks_of_a_draft_model_back() -> None:
    model = sim_draft_model()
    engine = drafting(drafter(model))
    for name in "abc":
        engine.submit(make_request(name, 9, max_tokens=20, n=2))
    for _ in range(4):
        engine.step()
    held = model.kv.num_blocks - model.kv.num_free
    engine.finish_choice(RequestId("a"), 1)
    engine.abort(RequestId("b"))
    assert model.kv.num_blocks - model.kv.num_free < held
    drive(engine)
    assert model.kv.num_free == model.kv.num_blocks


def test_drafts_never_preempt() -> None:
    """Four sequences fill a pool of ten blocks; drafts get only blocks that are free."""
    requests = [make_request(name, 8, max_tokens=8) for name in "abcd"]
    alone = run_all(sim(), requests)
    engine = drafting(drafter(Guesses(alone.all_ids()), most=8), num_blocks=17)
    run = run_all(engine, requests)
    assert run.all_ids() == alone.all_ids()
    assert engine.load().preemptions_total == 0
    assert engine.load().accepted_drafts_total > 0


def test_drafts_share_the_budget_of_a_step() -> None:
    requests = [make_request(name, 8, max_tokens=8) for name in "abcd"]
    alone = run_all(sim(), requests)
    engine = drafting(drafter(Guesses(alone.all_ids()), most=8), max_batched_tokens=6)
    run = run_all(engine, requests)  # checks each step's number of tokens
    assert run.all_ids() == alone.all_ids()
    assert engine.load().accepted_drafts_total > 0


def test_a_resumed_answer_reports_the_progress_of_its_tokens() -> None:
    alone = run_of(sim(), max_tokens=12)
    ids = alone.ids("a")
    engine = drafting(drafter(Guesses(alone.all_ids())))
    request = make_request("a", 9, (tuple(ids[:4]),), max_tokens=12, logprobs=2)
    engine.submit(request, track=True, report_filled=True)
    run = drive(engine)
    assert [token.id for token in run.tokens] == ids[4:]
    assert run.progress[-1].computed == 9 + 4


@dataclass
class LateGuesses:
    """The known answer, from some number of outputs on; nothing before. Counts its calls."""

    answer: Sequence[int]
    begins_at: int
    asked: int = 0

    def propose(
        self, sequences: Sequence[EngineSequence], most: Sequence[int]
    ) -> list[Sequence[int]]:
        self.asked += len(sequences)
        return [
            self.answer[sequence.num_outputs :][:length]
            if sequence.num_outputs >= self.begins_at
            else ()
            for sequence, length in zip(sequences, most, strict=True)
        ]

    def forget(self, sequence: EngineSequence) -> None:
        """Nothing is kept."""


def test_with_overlap_a_sequence_without_guesses_is_launched_ahead_until_there_are_some() -> None:
    request = make_request("a", 9, max_tokens=160)
    answer = run_all(sim(max_model_len=256), [request]).ids("a")
    guesses = LateGuesses(answer, begins_at=100)
    made = Drafter(
        guesses, 4, 259, overlap=True, clock=StepClock(lambda: 0.0)
    )  # drafts cost no time
    engine, _ = watched_sim(made, max_model_len=256, overlap=True)
    engine.submit(request)
    run, ahead = Run(), 0
    while len(run.tokens) < 100:
        step_once(engine, run)
        ahead += len(engine._in_flight)
    assert guesses.asked < 12
    assert ahead > len(run.steps) - 12
    drive(engine, into=run)
    assert run.ids("a") == answer
    assert engine.load().accepted_drafts_total > 20


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_tokens_that_a_grammar_forces_are_drafted(overlap: bool) -> None:
    grammar = grammar_of("json", SCHEMA)
    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()))

    def answer(made: Drafter | None) -> Run:
        engine, _ = watched_sim(made, max_model_len=120, overlap=overlap)
        structured = StructuredOutput(grammar)
        request = make_request("a", 9, max_tokens=100, structured=structured, logprobs=1)
        engine.submit(request, matcher=grammars.matcher(grammar))
        return drive(engine)

    alone, run = answer(None), answer(drafter(None, most=8))
    assert run.tokens == alone.tokens
    assert b'"temperature_celsius"' in bytes(run.ids("a")[:-1])
    assert len(run.steps) < len(alone.steps) / 2
    assert sum(step.accepted for step in run.steps) > 15
