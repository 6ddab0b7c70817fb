"""What a request says about logits: each way alone, their order, batches, and all of it at once
against a slow reference."""

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
from baton_engine.sampling.gumbel import gumbel, noise_keys
from baton_engine.sampling.logits_processors import changed_logits
from baton_engine.sampling.sampler import sample
from baton_engine.scheduling.stop_conditions import BannedTokens
from baton_protocol.sampling import SamplingParams

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
    """One row's logits after the changes."""
    values = SamplingParams(**params)
    known = seen(prompt, outputs) if values.penalized else None
    row = Sample(0, len(prompt) + len(outputs), values, banned, known)
    found: list[float] = changed_logits(torch.tensor([logits]), [row])[0].tolist()
    return found


class ListedMatcher:
    """Lets `ids` follow; its mask may be shorter or longer than the vocabulary."""

    stopped, error = False, ""

    def __init__(self, ids: Sequence[int], width: int) -> None:
        self._mask = bytearray(width)
        for id in ids:
            self._mask[id // 8] |= 1 << id % 8

    def copy(self) -> ListedMatcher:
        return self

    def accept(self, ids: Sequence[int]) -> bool:
        return True

    def mask(self) -> bytes:
        return bytes(self._mask)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_only_ids_of_a_matchers_mask_are_left(width: int) -> None:
    """Of its own row: the rows beside it stay as they are, and the raw logits too."""
    raw_SV = torch.arange(3 * 21, dtype=torch.float32).reshape(3, 21)
    ids = [0, 7, 9, 20] if width > 2 else [0, 7, 9]
    params = SamplingParams()
    masked = Sample(0, 4, params, banned=(7,), matcher=ListedMatcher(ids, width))
    found_SV = changed_logits(raw_SV, [Sample(0, 4, params), masked, Sample(0, 4, params)])
    assert found_SV[[0, 2]].equal(raw_SV[[0, 2]])
    left = found_SV[1].isfinite().nonzero().flatten().tolist()
    assert left == [id for id in ids if id != 7]
    assert found_SV[1, left].equal(raw_SV[1, left])
    assert raw_SV.isfinite().all()


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    found = changed([2.5, -0.5, 2.5, -0.5], outputs=[0, 1], repetition_penalty=1.2)
    assert found == pytest.approx([2.083333, -0.6, 2.5, -0.5], abs=1e-6)


def test_a_repetition_penalty_counts_an_id_of_prompt_and_outputs_once() -> None:
    found = changed([2.0, 2.0, 2.0, 2.0], prompt=[0, 0, 1], outputs=[1, 2, 2], repetition_penalty=2)
    assert found == [1.0, 1.0, 1.0, 2.0]


def test_a_frequency_penalty_grows_with_the_count() -> None:
    found = changed([2.5, 2.5, 2.5], outputs=[0, 0, 0, 1], frequency_penalty=0.5)
    assert found == [1.0, 2.0, 2.5]


def test_a_presence_penalty_does_not_grow_with_the_count() -> None:
    found = changed([2.5, 2.5, 2.5], outputs=[0, 0, 0, 1], presence_penalty=0.5)
    assert found == [2.0, 2.0, 2.5]


def test_all_three_penalties_come_one_after_another() -> None:
    found = changed(
        [2.5],
        outputs=[0, 0, 0],
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    assert found == pytest.approx([0.083333], abs=1e-6)


def test_frequency_and_presence_do_not_look_at_the_prompt() -> None:
    found = changed([1.0, 1.0], prompt=[0], outputs=[], frequency_penalty=2, presence_penalty=2)
    assert found == [1.0, 1.0]


def test_negative_penalties_and_a_repetition_penalty_below_1_favour_what_was_said() -> None:
    assert changed([1.0, 1.0], outputs=[0], presence_penalty=-0.5) == [1.5, 1.0]
    assert changed([1.0, -1.0], outputs=[0, 1], repetition_penalty=0.5) == [2.0, -0.5]


def test_biases_are_added_and_those_of_one_id_add_up() -> None:
    assert changed([1.0, 1.0, 1.0], logit_bias=((0, -3.0), (2, 1.5), (2, 1.0))) == [-2.0, 1.0, 3.5]


def test_a_bias_comes_before_the_penalties() -> None:
    """-1 + 3 is positive, so it is divided."""
    assert changed([-1.0], outputs=[0], logit_bias=((0, 3.0),), repetition_penalty=2.0) == [1.0]


def test_only_allowed_ids_are_left() -> None:
    assert changed([1.0, 2.0, 3.0, 4.0], allowed_token_ids=(2, 0)) == [1.0, -INF, 3.0, -INF]


def test_neither_a_bias_nor_a_penalty_brings_back_what_is_not_allowed_or_banned() -> None:
    found = changed(
        [1.0, 2.0, 3.0],
        outputs=[0, 1, 2],
        banned=(0,),
        allowed_token_ids=(0, 2),
        logit_bias=((0, 100.0), (1, 100.0)),
        repetition_penalty=0.5,
        frequency_penalty=-2.0,
    )
    assert found == [-INF, -INF, 8.0]


def test_nothing_is_copied_or_changed_where_nothing_is_said() -> None:
    logits = torch.randn(3, 10)
    samples = [Sample(0, index, SamplingParams(seed=1, top_k=2)) for index in range(3)]
    assert changed_logits(logits, samples) is logits


def test_the_raw_logits_stay_for_the_logprobs() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((0, -50.0),))
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    [found] = sample(logits, [0], [Sample(0, 0, params)])
    assert found.id == 1
    assert found.logprobs is not None
    expected = logits.log_softmax(-1)[0].tolist()
    assert found.logprobs.sampled.logprob == pytest.approx(expected[1])
    assert found.logprobs.sampled.rank == 2
    assert [each.id for each in found.logprobs.top] == [0, 1]
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


def test_each_row_of_a_batch_is_changed_by_its_own_request() -> None:
    logits = torch.ones(6, 4)
    both = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25)
    samples = [
        Sample(0, 0, SamplingParams()),
        Sample(0, 0, both, seen=seen([3], [0, 0])),
        Sample(0, 0, SamplingParams(logit_bias=((1, 5.0),))),
        Sample(0, 0, SamplingParams(allowed_token_ids=(3,))),
        Sample(0, 0, SamplingParams(), banned=(0, 2)),
        Sample(0, 0, SamplingParams(presence_penalty=1.0), seen=seen([3], [])),
    ]
    assert changed_logits(logits, samples).tolist() == [
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, 0.5],
        [1.0, 6.0, 1.0, 1.0],
        [-INF, -INF, -INF, 1.0],
        [-INF, 1.0, -INF, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ]


def test_ids_that_stand_in_an_array_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the few outputs is read id by id."""
    read: list[int] = []
    fromiter = np.fromiter

    def counted(ids: Any, dtype: Any, count: int) -> Any:
        read.append(count)
        return fromiter(ids, dtype, count)

    monkeypatch.setattr(np, "fromiter", counted)
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, logit_bias=((0, 1.0),) * 9
    )
    row = Sample(0, 400, params, seen=seen(range(300), [1, 2]), listed=ListedIds.of(params))
    changed_logits(torch.ones(1, 300), [row])
    assert set(read) == {2}


@pytest.mark.parametrize("penalty", [0.7, 1.1, 1.8])
def test_a_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 300, generator=generator) * 4
    known = torch.randint(300, (5, 40), generator=generator)
    params = SamplingParams(repetition_penalty=penalty)
    samples = [Sample(0, 40, params, seen=seen(row[:25], row[25:])) for row in known.tolist()]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
    torch.testing.assert_close(changed_logits(logits, samples), theirs, rtol=1e-6, atol=0)


# --- bans ---------------------------------------------------------------------------------------


def bans(outputs: list[int], prompt: list[int] | None = None, **params: Any) -> set[int]:
    tokens = [*(prompt or [7, 8]), *outputs]
    values = SamplingParams(max_tokens=50, **params)
    return set(BannedTokens(values).ids((99,), tokens, num_outputs=len(outputs), vocab_size=100))


def test_a_word_of_one_id_is_always_banned() -> None:
    assert bans([], bad_words=((5,), (6,))) == {5, 6}
    assert bans([5, 6], bad_words=((5,), (6,))) == {5, 6}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [([], set()), ([1], {2}), ([1, 2], {3}), ([2], set()), ([1, 1], {2}), ([1, 2, 9], set())],
)
def test_a_longer_word_bans_its_end_once_the_outputs_end_with_its_beginning(
    outputs: list[int], expected: set[int]
) -> None:
    assert bans(outputs, bad_words=((1, 2), (1, 2, 3), (9, 9, 9, 9))) == expected


def test_a_bad_word_that_begins_in_the_prompt_is_not_one() -> None:
    assert bans([], prompt=[7, 1], bad_words=((1, 2),)) == set()
    assert bans([2], prompt=[7, 1], bad_words=((1, 2, 3),)) == set()


def test_bad_words_and_min_tokens_ban_together() -> None:
    assert bans([1], bad_words=((1, 2),), min_tokens=2, stop_token_ids=(4,)) == {2, 4, 99}
    assert bans([0, 1], bad_words=((1, 2),), min_tokens=2, stop_token_ids=(4,)) == {2}


def test_bans_that_would_leave_nothing_to_say_do_not_hold() -> None:
    assert bans([], bad_words=((5,),), allowed_token_ids=(5,)) == set()
    assert bans([], bad_words=((5,),), allowed_token_ids=(5, 6)) == {5}
    assert bans([1], bad_words=tuple((id,) for id in range(100))) == set()
    assert bans([], min_tokens=3, allowed_token_ids=(99,)) == set()


# --- all at once --------------------------------------------------------------------------------

VOCAB = 40
MARGIN = 1e-4  # a decision closer than this may fall either way in float32


class Margin:
    """How clear the closest decision was."""

    def __init__(self) -> None:
        self.least = INF

    def compare(self, left: float, right: float) -> None:
        if math.isfinite(left) and math.isfinite(right):
            self.least = min(self.least, abs(left - right))


def slow_changes(
    raw: list[float], params: SamplingParams, prompt: list[int], outputs: list[int]
) -> list[float]:
    found = []
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
        found.append(logit)
    return found


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
    """The id, and how clear each decision on the way to it was."""
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
def test_a_batch_with_all_fields_on_gives_the_ids_of_a_slow_reference(
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
    found = sample(logits, range(len(params)), samples)
    assert [each.id for each in found] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_the_changes_on_cuda_are_those_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, VOCAB, generator=generator)
    both = SamplingParams(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias=((1, 2.0), (1, 1.0)),
        allowed_token_ids=tuple(range(30)),
    )
    known = [seen(range(row, 12), [row, row, 20]) for row in range(6)]
    samples = [Sample(0, row, both, (row + 5,), known[row]) for row in range(6)]
    expected = changed_logits(logits, samples)
    torch.testing.assert_close(changed_logits(logits.cuda(), samples).cpu(), expected)
