"""The workloads of the CPU benchmark: every engine gets the same one in every run."""

from __future__ import annotations

import random

import pytest

from benchmarks.support.engine.cpu_workloads import (
    MID,
    MID_MIXTURE,
    SEED,
    WORKLOADS,
    Workload,
)


def drawn(name: str) -> Workload:
    return WORKLOADS[name](random.Random(SEED))


def test_the_standard_workload_is_the_one_that_other_engines_were_measured_with() -> None:
    work = drawn("standard")
    assert (len(work.prompts), sum(map(len, work.prompts)), work.new_tokens) == (16, 3013, 64)
    assert work.output_tokens == 1024


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_repeats_its_prompts_and_no_two_prompts_are_equal(name: str) -> None:
    work = drawn(name)
    assert work == drawn(name)
    assert len({tuple(prompt) for prompt in work.prompts}) == len(work.prompts)


def test_a_shared_prefix_is_counted_once() -> None:
    work = drawn("shared-prefix")
    assert len({tuple(prompt[: work.shared]) for prompt in work.prompts}) == 1
    assert work.computed_tokens == 1000 + 16 * 64 + 16 * 63
    assert drawn("decode-heavy").computed_tokens == 32 * (32 + 255)


def test_operations_are_two_per_weight_and_computed_token() -> None:
    """A layer has a hidden size of 768, 12 query and 4 KV heads of 64, and an MLP of 2304."""
    layer = 768 * (768 + 2 * 256) + 768 * 768 + 3 * 768 * 2304
    work = Workload([[1, 2, 3], [4]], 2)
    assert MID.operations(work) == 2 * (16 * layer * (3 + 1 + 2) + 768 * 8192 * 4)


def test_a_mixture_counts_the_experts_that_a_token_takes_and_the_router() -> None:
    """4 experts of 576 have as many weights as the dense MLP; each of 16 layers has a router."""
    assert MID_MIXTURE.layer_weights == MID.layer_weights + 16 * 768 * 32
