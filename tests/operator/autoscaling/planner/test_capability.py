"""Capabilities are learnt from noisy samples and resist outliers."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.autoscaling.planner.capability import Learnt, NodeSample
from baton_operator.autoscaling.planner.inputs import Capability

# As from a self-benchmark: it measures one step of one sequence, and prompts of one length.
PRIOR = Capability(prefill_tokens=8_000.0, step_base_s=0.02, kv_capacity=100_000, start_s=60.0)
UNLEARNT = Learnt.from_prior(PRIOR)
BASE, PER_SEQ, PER_KV = 0.012, 2e-4, 1.5e-7


def sample(random: Random, noise: float = 0.05, slower: float = 1.0) -> NodeSample:
    batch = random.randint(1, 128)
    kv = batch * random.uniform(200.0, 4_000.0)
    true = slower * (BASE + batch * PER_SEQ + kv * PER_KV)
    return NodeSample(
        batch=batch,
        kv_tokens=kv,
        step_s=true * random.uniform(1.0 - noise, 1.0 + noise),
        prefill_tokens_per_s=20_000.0 / slower * random.uniform(1.0 - noise, 1.0 + noise),
        start_s=90.0,
        kv_capacity=150_000,
    )


def step_s(of: Capability, batch: float, kv: float) -> float:
    return of.step_base_s + batch * of.step_per_seq_s + kv * of.step_per_kv_token_s


def after(count: int, learnt: Learnt = UNLEARNT, **changes: float) -> Learnt:
    random = Random(3)
    return learnt.with_samples(sample(random, **changes) for _ in range(count))


def test_without_samples_the_capability_is_the_prior() -> None:
    learnt_values = UNLEARNT.capability
    assert learnt_values.start_s == pytest.approx(PRIOR.start_s)
    assert learnt_values.prefill_tokens == pytest.approx(PRIOR.prefill_tokens)
    times = {"start_s": PRIOR.start_s, "prefill_tokens": PRIOR.prefill_tokens}
    assert replace(learnt_values, **times) == PRIOR  # type: ignore[arg-type]
    assert UNLEARNT.with_samples([]) == UNLEARNT


def test_many_noisy_samples_converge_to_the_true_values() -> None:
    learnt_values = after(600).capability
    assert learnt_values.prefill_tokens == pytest.approx(20_000.0, rel=0.03)
    assert learnt_values.step_base_s == pytest.approx(BASE, rel=0.1)
    assert learnt_values.step_per_seq_s == pytest.approx(PER_SEQ, rel=0.1)
    assert learnt_values.step_per_kv_token_s == pytest.approx(PER_KV, rel=0.1)
    assert learnt_values.start_s == pytest.approx(90.0, rel=0.03)
    assert (learnt_values.kv_capacity, learnt_values.samples) == (150_000, 600)


def test_two_samples_move_the_prior_and_do_not_replace_it() -> None:
    learnt_values = after(2).capability
    assert PRIOR.prefill_tokens < learnt_values.prefill_tokens < 15_000.0


def test_one_outlier_in_twenty_barely_moves_a_prediction() -> None:
    random, wild = Random(3), Random(4)
    learnt = UNLEARNT
    for turn in range(600):
        noisy = sample(random)
        if turn % 20 == 0:
            factor = wild.choice([0.05, 20.0])
            noisy = replace(
                noisy,
                step_s=(noisy.step_s or 0.0) * factor,
                prefill_tokens_per_s=(noisy.prefill_tokens_per_s or 0.0) * factor,
            )
        learnt = learnt.with_samples([noisy])
    learnt_values = learnt.capability
    assert step_s(learnt_values, 64, 100_000) == pytest.approx(
        step_s(truth(), 64, 100_000), rel=0.05
    )
    assert learnt_values.prefill_tokens == pytest.approx(20_000.0, rel=0.05)


def truth() -> Capability:
    return replace(PRIOR, step_base_s=BASE, step_per_seq_s=PER_SEQ, step_per_kv_token_s=PER_KV)


def test_a_lasting_change_is_learnt_although_it_first_looks_like_outliers() -> None:
    learnt_values = after(800, after(300), slower=2.0).capability
    assert learnt_values.prefill_tokens == pytest.approx(10_000.0, rel=0.05)
    assert step_s(learnt_values, 64, 100_000) == pytest.approx(
        2.0 * step_s(truth(), 64, 100_000), rel=0.05
    )


def test_identical_batches_are_predicted_although_their_parts_cannot_be_separated() -> None:
    true = BASE + 32 * PER_SEQ + 40_000 * PER_KV
    same = NodeSample(batch=32.0, kv_tokens=40_000.0, step_s=true)
    learnt_values = UNLEARNT.with_samples([same] * 300).capability
    assert step_s(learnt_values, 32, 40_000) == pytest.approx(true, rel=0.02)
    assert (
        min(
            learnt_values.step_base_s,
            learnt_values.step_per_seq_s,
            learnt_values.step_per_kv_token_s,
        )
        >= 0.0
    )


ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True)
SAMPLES = st.builds(
    NodeSample,
    batch=ANY | st.floats(0.5, 500.0),
    kv_tokens=ANY | st.floats(0.0, 1e6),
    step_s=ANY | st.floats(1e-3, 1.0),
    prefill_tokens_per_s=ANY | st.floats(1.0, 1e6),
    start_s=ANY,
    kv_capacity=st.none() | st.integers(-5, 10**6),
)


@settings(max_examples=150)
@given(st.lists(SAMPLES, max_size=30))
def test_any_report_leads_to_plausible_capabilities(samples: list[NodeSample]) -> None:
    learnt_values = UNLEARNT.with_samples(samples).capability
    for value in (learnt_values.prefill_tokens, learnt_values.step_base_s, learnt_values.start_s):
        assert math.isfinite(value)
        assert value > 0.0
    for value in (learnt_values.step_per_seq_s, learnt_values.step_per_kv_token_s):
        assert math.isfinite(value)
        assert value >= 0.0
    assert learnt_values.kv_capacity is not None
    assert learnt_values.kv_capacity > 0


@settings(max_examples=50)
@given(st.lists(SAMPLES, max_size=10), st.integers(0, 10))
def test_learning_in_parts_equals_learning_at_once(samples: list[NodeSample], cut: int) -> None:
    parts = UNLEARNT.with_samples(samples[:cut]).with_samples(samples[cut:])
    assert parts == UNLEARNT.with_samples(samples)
