"""The simulated model with parameters that change logits, with prompt logprobs and with a poison
token."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import SettingsError
from baton_engine.interface import PenaltyCounts, Sample
from baton_engine.sim.build import SimSettings, build_sim
from baton_engine.sim.model import Vocabulary, _Logits
from baton_protocol.sampling import SamplingParams
from tests.support.engines.engine_core import Run, make_request, run_all

PROMPT = list(range(40, 53))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def sim(**changes: Any) -> EngineCore:
    return build_sim(SimSettings(block_size=4, chunk_blocks=2, **changes))


def run_one(prompt: Sequence[int] = PROMPT, engine: EngineCore | None = None, **params: Any) -> Run:
    return run_all(engine or sim(), [make_request("a", prompt, **{"max_tokens": 60} | params)])


def ids(**params: Any) -> list[int]:
    return run_one(**params).ids("a")


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"logit_bias": ((70, 4.0),)},
        {"allowed_token_ids": tuple(range(60, 90))},
        {"bad_words": tuple((id,) for id in range(60, 90))},
    ],
)
def test_each_parameter_changes_the_ids_deterministically(
    sampling: dict[str, Any], change: dict[str, Any]
) -> None:
    assert ids(**sampling, **change) != ids(**sampling)
    assert ids(**sampling, **change) == ids(**sampling, **change)


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_a_bias_of_100_forces_an_id_and_a_bias_of_minus_100_forbids_it(
    sampling: dict[str, Any],
) -> None:
    assert set(ids(logit_bias=((70, 100.0),), **sampling)) == {70}
    # Without a bias the sim never samples 200.
    assert set(ids(logit_bias=((200, 100.0),), **sampling)) == {200}
    plain = ids(**sampling)
    forbidden = tuple((id, -100.0) for id in set(plain[:5]))
    assert not set(ids(logit_bias=forbidden, **sampling)) & set(plain[:5])


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_only_allowed_ids_are_sampled_and_bad_words_never(sampling: dict[str, Any]) -> None:
    allowed = (3, 40, 60, 80, 100, 120, 200)
    sampled = ids(allowed_token_ids=allowed, **sampling)
    assert set(sampled) <= set(allowed)
    assert len(set(sampled)) > 3
    pairs = Counter(pairwise(sampled))
    word, count = pairs.most_common(1)[0]
    assert count > 2
    assert 100 in sampled
    without = ids(allowed_token_ids=allowed, bad_words=(word, (100,)), **sampling)
    assert word not in set(pairwise(without))
    assert 100 not in without
    assert len(without) == 60


def test_if_all_usual_ids_are_banned_the_lowest_allowed_id_is_sampled() -> None:
    words = tuple((id,) for id in (0, 1, 3, *range(32, 127)))
    assert set(ids(bad_words=words)) == {2}
    assert set(ids(bad_words=words, presence_penalty=1.0)) == {2}


def test_only_the_likeliest_ids_and_those_named_by_parameters_are_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated: list[int] = []
    of = _Logits.of

    def recording(self: _Logits, id: int) -> float:
        evaluated.append(id)
        return of(self, id)

    monkeypatch.setattr(_Logits, "of", recording)
    params = SamplingParams(temperature=0.0, frequency_penalty=-2.0, logit_bias=((7, 1.0),))
    sample = Sample(0, 9, params, penalty_counts=PenaltyCounts((), {123: 100_000}))
    assert Vocabulary(first=0, end=150_000).says(5, sample).id == 123  # likeliest by its penalty
    assert {7, 123} < set(evaluated)
    assert len(evaluated) < 50


def test_a_frequency_penalty_makes_the_ids_more_even() -> None:
    allowed = {"allowed_token_ids": tuple(range(60, 72))}
    plain = Counter(ids(**allowed)).values()
    spread = Counter(ids(**allowed, frequency_penalty=2.0)).values()
    assert max(plain) > 20
    assert (len(spread), min(spread) >= 3, max(spread) <= 7) == (12, True, True)  # of 60


def test_neutral_parameters_do_not_change_the_ids() -> None:
    neutral = {"logit_bias": (), "repetition_penalty": 1.0, "bad_words": ()}
    assert ids(**neutral) == ids()
    assert bytes(ids(max_tokens=12, **neutral)) == bytes(ids()[:12])


def test_a_bias_and_allowed_ids_can_prevent_the_eos_of_eos_every() -> None:
    """With eos_every=5, about each fifth token is EOS."""
    run = run_one(engine=sim(eos_every=5), ignore_eos=True)
    assert run.ids("a").count(257) > 5
    for change in ({"logit_bias": ((257, -100.0),)}, {"allowed_token_ids": tuple(range(60, 90))}):
        assert 257 not in run_one(engine=sim(eos_every=5), **change).ids("a")


def test_logprobs_ignore_parameters_that_change_logits() -> None:
    plain = run_one(logprobs=3, max_tokens=1).last("a")
    changed = run_one(logprobs=3, max_tokens=1, logit_bias=((70, 100.0),)).last("a")
    assert plain.logprobs is not None
    assert changed.logprobs is not None
    assert changed.id == changed.logprobs.sampled.id == 70
    assert changed.logprobs.top == plain.logprobs.top
    assert changed.logprobs.sampled.rank > 3
    assert changed.logprobs.sampled.logprob < plain.logprobs.top[-1].logprob


def test_outputs_have_the_same_logprobs_as_prompt_logprobs_of_a_later_request() -> None:
    """Also with another chunked prefill: logprobs depend only on the tokens."""
    run = run_one(logprobs=2, max_tokens=20)
    output_logprobs = [each.logprobs for each in run.tokens]
    known = [*PROMPT, *run.ids("a")]
    again = run_one(known, engine=sim(max_batched_tokens=5), prompt_logprobs=2, max_tokens=1)
    prompt_logprobs = again.prompt_logprobs("a")
    assert len(prompt_logprobs) == len(known) - 1
    assert list(prompt_logprobs[len(PROMPT) - 1 :]) == output_logprobs
    assert [each.sampled.id for each in prompt_logprobs] == known[1:]


def test_prompt_logprobs_include_a_prompt_token_among_the_top_if_its_rank_fits() -> None:
    for entry in run_one(prompt_logprobs=20).prompt_logprobs("a"):
        assert [each.rank for each in entry.top] == list(range(1, 21))
        mine = [each for each in entry.top if each.id == entry.sampled.id]
        assert mine == [entry.sampled] if entry.sampled.rank <= 20 else not mine


# --- poison token -------------------------------------------------------------------------------

POISONED = """
from baton_engine.sim.build import SimSettings, build_sim
from tests.support.engines.engine_core import make_request, run_all
engine = build_sim(SimSettings(poison_token=7, max_batched_tokens=4))
run = run_all(engine, [make_request("without", [1, 2, 3, 4, 5, 6, 8])])
print(len(run.ids("without")), flush=True)
engine.submit(make_request("a", [1, 2, 3, 4, 5, 6, {id}]))
print(engine.step().num_tokens, flush=True)
try:
    engine.step()
finally:
    print("alive", flush=True)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("id", "code", "output"), [(7, 70, ["4", "4"]), (9, 0, ["4", "4", "alive"])]
)
def test_a_poison_token_ends_the_process_in_the_step_that_would_compute_it(
    id: int, code: int, output: list[str]
) -> None:
    script = POISONED.replace("{id}", str(id))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout.split()) == (code, output), done.stderr


def test_the_poison_token_must_not_be_an_id_that_the_sim_samples() -> None:
    with pytest.raises(SettingsError, match=r"sim poison_token is 50; .* says, \[32, 127\)"):
        sim(poison_token=50)
    sim(poison_token=31)
    sim(poison_token=127)
