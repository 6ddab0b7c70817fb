"""What the simulated model says when requests change its logits or ask about their prompt."""

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


@pytest.mark.parametrize("how", [{}, SAMPLED])
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
def test_each_way_of_changing_logits_changes_ids_the_same_way_each_time(
    how: dict[str, Any], change: dict[str, Any]
) -> None:
    assert ids(**how, **change) != ids(**how)
    assert ids(**how, **change) == ids(**how, **change)


@pytest.mark.parametrize("how", [{}, SAMPLED])
def test_the_largest_bias_decides_and_the_smallest_forbids(how: dict[str, Any]) -> None:
    assert set(ids(logit_bias=((70, 100.0),), **how)) == {70}
    assert set(ids(logit_bias=((200, 100.0),), **how)) == {200}  # it never says so by itself
    plain = ids(**how)
    forbidden = tuple((id, -100.0) for id in set(plain[:5]))
    assert not set(ids(logit_bias=forbidden, **how)) & set(plain[:5])


@pytest.mark.parametrize("how", [{}, SAMPLED])
def test_only_allowed_ids_are_said_and_bad_words_never(how: dict[str, Any]) -> None:
    allowed = (3, 40, 60, 80, 100, 120, 200)
    said = ids(allowed_token_ids=allowed, **how)
    assert set(said) <= set(allowed)
    assert len(set(said)) > 3
    pairs = Counter(pairwise(said))
    word, count = pairs.most_common(1)[0]
    assert count > 2
    assert 100 in said
    without = ids(allowed_token_ids=allowed, bad_words=(word, (100,)), **how)
    assert word not in set(pairwise(without))
    assert 100 not in without
    assert len(without) == 60


def test_where_all_that_it_says_is_banned_it_says_the_lowest_id_that_is_not() -> None:
    words = tuple((id,) for id in (0, 1, 3, *range(32, 127)))
    assert set(ids(bad_words=words)) == {2}
    assert set(ids(bad_words=words, presence_penalty=1.0)) == {2}


def test_of_a_large_vocabulary_only_the_likeliest_and_what_is_said_of_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    of = _Logits.of

    def counted(self: _Logits, id: int) -> float:
        looked.append(id)
        return of(self, id)

    monkeypatch.setattr(_Logits, "of", counted)
    params = SamplingParams(temperature=0.0, frequency_penalty=-2.0, logit_bias=((7, 1.0),))
    said = Sample(0, 9, params, seen=PenaltyCounts((), {123: 100_000}))
    assert Vocabulary(first=0, end=150_000).says(5, said).id == 123  # unlikely before the penalty
    assert {7, 123} < set(looked)
    assert len(looked) < 50


def test_a_frequency_penalty_spreads_what_is_said() -> None:
    allowed = {"allowed_token_ids": tuple(range(60, 72))}
    plain = Counter(ids(**allowed)).values()
    spread = Counter(ids(**allowed, frequency_penalty=2.0)).values()
    assert max(plain) > 20
    assert (len(spread), min(spread) >= 3, max(spread) <= 7) == (12, True, True)  # of 60


def test_a_request_that_says_nothing_about_logits_is_as_ever() -> None:
    neutral = {"logit_bias": (), "repetition_penalty": 1.0, "bad_words": ()}
    assert ids(**neutral) == ids()
    assert bytes(ids(max_tokens=12, **neutral)) == bytes(ids()[:12])


def test_an_eos_that_is_due_obeys_too() -> None:
    """About each fifth token is one."""
    run = run_one(engine=sim(eos_every=5), ignore_eos=True)
    assert run.ids("a").count(257) > 5
    for change in ({"logit_bias": ((257, -100.0),)}, {"allowed_token_ids": tuple(range(60, 90))}):
        assert 257 not in run_one(engine=sim(eos_every=5), **change).ids("a")


def test_logprobs_are_those_before_the_changes() -> None:
    plain = run_one(logprobs=3, max_tokens=1).last("a")
    changed = run_one(logprobs=3, max_tokens=1, logit_bias=((70, 100.0),)).last("a")
    assert plain.logprobs is not None
    assert changed.logprobs is not None
    assert changed.id == changed.logprobs.sampled.id == 70
    assert changed.logprobs.top == plain.logprobs.top
    assert changed.logprobs.sampled.rank > 3
    assert changed.logprobs.sampled.logprob < plain.logprobs.top[-1].logprob


def test_what_it_said_is_as_likely_as_a_prompt_as_it_was_when_it_was_said() -> None:
    """Also in another process's pieces, so what it tells depends on the tokens alone."""
    run = run_one(logprobs=2, max_tokens=20)
    said = [each.logprobs for each in run.tokens]
    known = [*PROMPT, *run.ids("a")]
    again = run_one(known, engine=sim(max_batched_tokens=5), prompt_logprobs=2, max_tokens=1)
    told = again.prompt_logprobs("a")
    assert len(told) == len(known) - 1
    assert list(told[len(PROMPT) - 1 :]) == said
    assert [each.sampled.id for each in told] == known[1:]


def test_a_prompts_tokens_are_ranked_among_the_likeliest() -> None:
    for entry in run_one(prompt_logprobs=20).prompt_logprobs("a"):
        assert [each.rank for each in entry.top] == list(range(1, 21))
        mine = [each for each in entry.top if each.id == entry.sampled.id]
        assert mine == [entry.sampled] if entry.sampled.rank <= 20 else not mine


# --- poison -------------------------------------------------------------------------------------

POISONED = """
from baton_engine.sim.build import SimSettings, build_sim
from tests.support.engines.engine_core import make_request, run_all
engine = build_sim(SimSettings(poison_token=7, max_batched_tokens=4))
run = run_all(engine, [make_request("innocent", [1, 2, 3, 4, 5, 6, 8])])
print(len(run.ids("innocent")), flush=True)
engine.submit(make_request("a", [1, 2, 3, 4, 5, 6, {id}]))
print(engine.step().num_tokens, flush=True)
try:
    engine.step()
finally:
    print("alive", flush=True)
"""


@pytest.mark.integration
@pytest.mark.parametrize(("id", "code", "said"), [(7, 70, ["4", "4"]), (9, 0, ["4", "4", "alive"])])
def test_poison_ends_the_process_at_once_when_it_is_to_be_computed(
    id: int, code: int, said: list[str]
) -> None:
    script = POISONED.replace("{id}", str(id))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout.split()) == (code, said), done.stderr


def test_poison_may_not_be_an_id_that_it_says_itself() -> None:
    with pytest.raises(SettingsError, match=r"sim poison_token is 50; .* says, \[32, 127\)"):
        sim(poison_token=50)
    sim(poison_token=31)
    sim(poison_token=127)
