"""What the CPU benchmark asks: the same of every side and in every run."""

from __future__ import annotations

import random

import pytest

from benchmarks.support.engine.cpu_workloads import MID, SEED, WORKLOADS, Workload


def drawn(name: str) -> Workload:
    return WORKLOADS[name](random.Random(SEED))


def test_the_standard_workload_is_the_one_that_rivals_were_measured_with() -> None:
    work = drawn("standard")
    assert (len(work.prompts), sum(map(len, work.prompts)), work.new_tokens) == (16, 3013, 64)
    assert work.output_tokens == 1024


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_prompts_again_and_no_two_are_alike(name: str) -> None:
    work = drawn(name)
    assert work == drawn(name)
    assert len({tuple(prompt) for prompt in work.prompts}) == len(work.prompts)


def test_what_prompts_share_is_counted_once() -> None:
    work = drawn("shared-prefix")
    assert len({tuple(prompt[: work.shared]) for prompt in work.prompts}) == 1
    assert work.computed_tokens == 1000 + 16 * 64 + 16 * 63
    assert drawn("decode-heavy").computed_tokens == 32 * (32 + 255)


def test_operations_are_two_per_weight_and_token() -> None:
    """A layer of 768 wide: qkv and output of 12 and 4 heads of 64, an MLP of 2304."""
    layer = 768 * (768 + 2 * 256) + 768 * 768 + 3 * 768 * 2304
    work = Workload([[1, 2, 3], [4]], 2)
    assert MID.operations(work) == 2 * (16 * layer * (3 + 1 + 2) + 768 * 8192 * 4)
