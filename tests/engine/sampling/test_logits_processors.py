"""Request parameters that change logits: each alone, their order, batches, and all together against
a slow reference."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton_engine.interface import ListedIds, PenaltyCounts, Sample
from baton_engine.sampling.gumbel import gumbel
from baton_engine.sampling.logits_processors import change_logits
from baton_engine.scheduling.stop_conditions import BannedTokens
from baton_protocol.sampling import SamplingParams
from tests.support.engines.matchers import ListedMatcher
from tests.support.engines.sampling import noise_keys, sample

INF = math.inf


def seen(prompt: Sequence[int], outputs: Sequence[int]) -> PenaltyCounts:
    return PenaltyCounts(array("q", sorted(set(prompt))), Counter(outputs))


def changed(
    logits: list[float],
    *,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> list[float]:
    """The logits of one row after the changes."""
    values = SamplingParams(**params)
    known = seen(prompt, outputs) if values.penalized else None
    row = Sample(0, len(prompt) + len(outputs), values, banned, known)
    actual: list[float] = change_logits(torch.tensor([logits]), [row])[0].tolist()
    return actual


@pytest.mark.parametrize("width", [2, 3, 8])
def test_a_matchers_mask_removes_other_ids_from_its_own_row_only(width: int) -> None:
    """The other rows and the raw logits stay unchanged."""
    raw_SV = torch.arange(3 * 21, dtype=torch.float32).reshape(3, 21)
    ids = [0, 7, 9, 20] if width > 2 else [0, 7, 9]
    params = SamplingParams()
    masked = Sample(0, 4, params, banned=(7,), matcher=ListedMatcher(ids, width))
    actual_SV = change_logits(raw_SV.clone(), [Sample(0, 4, params), masked, Sample(0, 4, params)])
    assert actual_SV[[0, 2]].equal(raw_SV[[0, 2]])
    remaining = actual_SV[1].isfinite().nonzero().flatten().tolist()
    assert remaining == [id for id in ids if id != 7]
    assert actual_SV[1, remaining].equal(raw_SV[1, remaining])
    assert raw_SV.isfinite().all()


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    actual = changed([2.5, -0.5, 2.5, -0.5], outputs=[0, 1], repetition_penalty=1.2)
    assert actual == pytest.approx([2.083333, -0.6, 2.5, -0.5], abs=1e-6)


def test_a_repetition_penalty_counts_an_id_of_prompt_and_outputs_once() -> None:
    actual = changed(
        [2.0, 2.0, 2.0, 2.0], prompt=[0, 0, 1], outputs=[1, 2, 2], repetition_penalty=2
    )
    assert actual == [1.0, 1.0, 1.0, 2.0]


def test_a_frequency_penalty_grows_with_the_count() -> None:
    actual = changed([2.5, 2.5, 2.5], outputs=[0, 0, 0, 1], frequency_penalty=0.5)
    assert actual == [1.0, 2.0, 2.5]


def test_a_presence_penalty_does_not_grow_with_the_count() -> None:
    actual = changed([2.5, 2.5, 2.5], outputs=[0, 0, 0, 1], presence_penalty=0.5)
    assert actual == [2.0, 2.0, 2.5]


def test_all_three_penalties_are_applied_in_order() -> None:
    actual = changed(
        [2.5],
        outputs=[0, 0, 0],
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    assert actual == pytest.approx([0.083333], abs=1e-6)


def test_frequency_and_presence_penalties_ignore_the_prompt() -> None:
    actual = changed([1.0, 1.0], prompt=[0], outputs=[], frequency_penalty=2, presence_penalty=2)
    assert actual == [1.0, 1.0]


def test_negative_penalties_and_a_repetition_penalty_below_1_favour_earlier_outputs() -> None:
    assert changed([1.0, 1.0], outputs=[0], presence_penalty=-0.5) == [1.5, 1.0]
    assert changed([1.0, -1.0], outputs=[0, 1], repetition_penalty=0.5) == [2.0, -0.5]


def test_biases_are_added_and_several_biases_of_one_id_add_up() -> None:
    assert changed([1.0, 1.0, 1.0], logit_bias=((0, -3.0), (2, 1.5), (2, 1.0))) == [-2.0, 1.0, 3.5]


def test_a_bias_is_applied_before_the_penalties() -> None:
    """-1 + 3 is positive, so the penalty divides it."""
    assert changed([-1.0], outputs=[0], logit_bias=((0, 3.0),), repetition_penalty=2.0) == [1.0]


def test_allowed_token_ids_remove_all_other_ids() -> None:
    assert changed([1.0, 2.0, 3.0, 4.0], allowed_token_ids=(2, 0)) == [1.0, -INF, 3.0, -INF]


def test_a_bias_or_a_penalty_does_not_restore_a_removed_or_banned_id() -> None:
    actual = changed(
        [1.0, 2.0, 3.0],
        outputs=[0, 1, 2],
        banned=(0,),
        allowed_token_ids=(0, 2),
        logit_bias=((0, 100.0), (1, 100.0)),
        repetition_penalty=0.5,
        frequency_penalty=-2.0,
    )
    assert actual == [-INF, -INF, 8.0]


def test_logits_are_changed_in_place_and_only_by_parameters_that_change_them() -> None:
    logits = torch.randn(3, 10)
    samples = [Sample(0, index, SamplingParams(seed=1, top_k=2)) for index in range(3)]
    before = logits.clone()
    assert change_logits(logits, samples) is logits
    assert logits.equal(before)


def test_logprobs_are_computed_from_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((0, -50.0),))
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    [actual] = sample(logits, [0], [Sample(0, 0, params)])
    assert actual.id == 1
    assert actual.logprobs is not None
    expected = logits.log_softmax(-1)[0].tolist()
    assert actual.logprobs.sampled.logprob == pytest.approx(expected[1])
    assert actual.logprobs.sampled.rank == 2
    assert [each.id for each in actual.logprobs.top] == [0, 1]
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


def test_each_row_of_a_batch_is_changed_by_its_own_parameters() -> None:
    logits = torch.ones(6, 4)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25)
    samples = [
        Sample(0, 0, SamplingParams()),
        Sample(0, 0, params, penalty_counts=seen([3], [0, 0])),
        Sample(0, 0, SamplingParams(logit_bias=((1, 5.0),))),
        Sample(0, 0, SamplingParams(allowed_token_ids=(3,))),
        Sample(0, 0, SamplingParams(), banned=(0, 2)),
        Sample(0, 0, SamplingParams(presence_penalty=1.0), penalty_counts=seen([3], [])),
    ]
    assert change_logits(logits, samples).tolist() == [
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, 0.5],
        [1.0, 6.0, 1.0, 1.0],
        [-INF, -INF, -INF, 1.0],
        [-INF, 1.0, -INF, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ]


def test_ids_that_are_already_in_an_array_are_not_converted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the two outputs are converted id by id."""
    converted: list[int] = []
    fromiter = np.fromiter

    def counting(ids: Any, dtype: Any, count: int) -> Any:
        converted.append(count)
        return fromiter(ids, dtype, count)

    monkeypatch.setattr(np, "fromiter", counting)
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, logit_bias=((0, 1.0),) * 9
    )
    row = Sample(
        0, 400, params, penalty_counts=seen(range(300), [1, 2]), listed=ListedIds.of(params)
    )
    change_logits(torch.ones(1, 300), [row])
    assert set(converted) == {2}


@pytest.mark.parametrize("penalty", [0.7, 1.1, 1.8])
def test_a_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 300, generator=generator) * 4
    known = torch.randint(300, (5, 40), generator=generator)
    params = SamplingParams(repetition_penalty=penalty)
    samples = [
        Sample(0, 40, params, penalty_counts=seen(row[:25], row[25:])) for row in known.tolist()
    ]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
    torch.testing.assert_close(change_logits(logits, samples), expected, rtol=1e-6, atol=0)


# --- banned ids ---------------------------------------------------------------------------------


def bans(outputs: list[int], prompt: list[int] | None = None, **params: Any) -> set[int]:
    tokens = [*(prompt or [7, 8]), *outputs]
    values = SamplingParams(max_tokens=50, **params)
    return set(BannedTokens(values).ids((99,), tokens, num_outputs=len(outputs), vocab_size=100))


def test_a_bad_word_of_one_id_is_always_banned() -> None:
    assert bans([], bad_words=((5,), (6,))) == {5, 6}
    assert bans([5, 6], bad_words=((5,), (6,))) == {5, 6}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [([], set()), ([1], {2}), ([1, 2], {3}), ([2], set()), ([1, 1], {2}), ([1, 2, 9], set())],
)
def test_the_last_id_of_a_bad_word_is_banned_after_its_other_ids(
    outputs: list[int], expected: set[int]
) -> None:
    assert bans(outputs, bad_words=((1, 2), (1, 2, 3), (9, 9, 9, 9))) == expected


def test_bad_words_are_not_matched_in_the_prompt() -> None:
    assert bans([], prompt=[7, 1], bad_words=((1, 2),)) == set()
    assert bans([2], prompt=[7, 1], bad_words=((1, 2, 3),)) == set()


def test_bad_words_and_min_tokens_can_ban_at_the_same_time() -> None:
    assert bans([1], bad_words=((1, 2),), min_tokens=2, stop_token_ids=(4,)) == {2, 4, 99}
    assert bans([0, 1], bad_words=((1, 2),), min_tokens=2, stop_token_ids=(4,)) == {2}


def test_bans_that_would_leave_no_id_are_dropped() -> None:
    assert bans([], bad_words=((5,),), allowed_token_ids=(5,)) == set()
    assert bans([], bad_words=((5,),), allowed_token_ids=(5, 6)) == {5}
    assert bans([1], bad_words=tuple((id,) for id in range(100))) == set()
    assert bans([], min_tokens=3, allowed_token_ids=(99,)) == set()


# --- all parameters together --------------------------------------------------------------------

VOCAB = 40
MARGIN = 1e-4  # float32 may decide a closer comparison either way


class Margin:
    """The smallest difference of all comparisons."""

    def __init__(self) -> None:
        self.least = INF

    def compare(self, left: float, right: float) -> None:
        if math.isfinite(left) and math.isfinite(right):
            self.least = min(self.least, abs(left - right))


def slow_changes(
    raw: list[float], params: SamplingParams, prompt: list[int], outputs: list[int]
) -> list[float]:
    result = []
    for id, logit in enumerate(raw):
        count = outputs.count(id)
        if params.allowed_token_ids is not None and id not in params.allowed_token_ids:
            logit = -INF
        for word in params.bad_words:
            if word[-1] == id and (len(word) == 1 or tuple(outputs[-len(word) + 1 :]) == word[:-1]):
                logit = -INF
        logit += sum(bias for biased, bias in params.logit_bias if biased == id)
        if id in prompt or count:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        result.append(logit)
    return result


def slow_shape(logits: list[float], params: SamplingParams, margin: Margin) -> list[float]:
    scaled = [logit / params.temperature for logit in logits]
    if params.min_p > 0:
        threshold = max(scaled) + math.log(params.min_p)
        for logit in scaled:
            margin.compare(logit, threshold)
        scaled = [logit if logit >= threshold else -INF for logit in scaled]
    if 0 < params.top_k < VOCAB:
        ranked = sorted(scaled, reverse=True)
        margin.compare(ranked[params.top_k - 1], ranked[params.top_k])
        scaled = [logit if logit >= ranked[params.top_k - 1] else -INF for logit in scaled]
    if params.top_p < 1:
        order = sorted(range(VOCAB), key=lambda id: -scaled[id])
        total = sum(math.exp(logit) for logit in scaled)
        mass = 0.0
        for id in order:
            margin.compare(mass, params.top_p)
            probability = math.exp(scaled[id]) / total
            if mass >= params.top_p:
                scaled[id] = -INF
            mass += probability
    return scaled


def slow_sample(
    raw: list[float], params: SamplingParams, prompt: list[int], outputs: list[int], choice: int
) -> tuple[int, float]:
    """The sampled id, and the smallest difference of the comparisons that led to it."""
    margin = Margin()
    scores = slow_changes(raw, params, prompt, outputs)
    if params.temperature > 0:
        keys = noise_keys(params.seed or 0, choice, len(prompt) + len(outputs))
        noise = gumbel([keys], VOCAB, torch.device("cpu"))[0].tolist()
        shaped = slow_shape(scores, params, margin)
        scores = [logit + bump for logit, bump in zip(shaped, noise, strict=True)]
    first, second = sorted(scores, reverse=True)[:2]
    margin.compare(first, second)
    return scores.index(first), margin.least


ids = st.integers(0, VOCAB - 1)


@st.composite
def all_params(draw: st.DrawFn) -> SamplingParams:
    allowed = draw(st.none() | st.lists(ids, min_size=12, max_size=30, unique=True))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=99,
        top_k=draw(st.sampled_from([-1, 1, 3, 10, 99])),
        top_p=draw(st.sampled_from([1.0, 0.3, 0.83])),
        min_p=draw(st.sampled_from([0.0, 0.011, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.6, 1.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.1, 1.9])),
        logit_bias=tuple(draw(st.lists(st.tuples(ids, st.floats(-4, 4)), max_size=5))),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(
            draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=5))
        ),
    )


@given(
    params=st.lists(all_params(), min_size=1, max_size=5),
    tokens=st.lists(ids, min_size=1, max_size=12),
    data=st.data(),
)
@settings(max_examples=300)
def test_a_batch_with_all_parameters_gives_the_ids_of_the_slow_reference(
    params: list[SamplingParams], tokens: list[int], data: st.DataObject
) -> None:
    raw = np.random.default_rng(data.draw(st.integers(0, 2**32))).normal(0, 2, (5, VOCAB))
    logits = torch.tensor(raw, dtype=torch.float32)[: len(params)]
    samples, expected = [], []
    for row, each in enumerate(params):
        prompt_len = data.draw(st.integers(1, len(tokens)))
        prompt, outputs = tokens[:prompt_len], tokens[prompt_len:]
        banned = BannedTokens(each).ids((), tokens, num_outputs=len(outputs), vocab_size=VOCAB)
        known = seen(prompt, outputs) if each.penalized else None
        samples.append(Sample(row % 3, len(tokens), each, banned, known))
        id, margin = slow_sample(logits[row].tolist(), each, prompt, outputs, row % 3)
        assume(margin > MARGIN)
        expected.append(id)
    actual = sample(logits, range(len(params)), samples)
    assert [each.id for each in actual] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_changed_logits_on_cuda_equal_those_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, VOCAB, generator=generator)
    params = SamplingParams(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias=((1, 2.0), (1, 1.0)),
        allowed_token_ids=tuple(range(30)),
    )
    known = [seen(range(row, 12), [row, row, 20]) for row in range(6)]
    samples = [Sample(0, row, params, (row + 5,), known[row]) for row in range(6)]
    expected = change_logits(logits.clone(), samples)
    torch.testing.assert_close(change_logits(logits.cuda(), samples).cpu(), expected)
