"""Sampling launches its work without waiting for the device, so the next step overlaps this one."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest
import torch

from baton_engine.interface import PenaltyCounts, Sample
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import choose
from baton_engine.sampling.triton_sampler import choose_tokens
from baton_protocol.sampling import SamplingParams
from tests.support.engines.matchers import ListedMatcher
from tests.support.engines.waits import waits
from tests.support.needs import needs

VOCAB = 100
CPU = torch.device("cpu")
SEEN = PenaltyCounts(array("q", [1, 2]), Counter([3, 3]))
SAMPLES = {
    "plain": Sample(0, 3, SamplingParams()),
    "greedy": Sample(0, 3, SamplingParams(temperature=0.0)),
    "filters": Sample(0, 3, SamplingParams(top_k=5, top_p=0.9, min_p=0.1)),
    "logprobs": Sample(0, 3, SamplingParams(logprobs=3)),
    "named logprobs": Sample(0, 3, SamplingParams(logprobs=1, logprob_token_ids=(2, 7))),
    "a grammar": Sample(0, 3, SamplingParams(), matcher=ListedMatcher([1, 5, 9], 13)),
    "allowed ids": Sample(0, 3, SamplingParams(allowed_token_ids=(1, 2))),
    "banned ids": Sample(0, 3, SamplingParams(), banned=(4,)),
    "biases": Sample(0, 3, SamplingParams(logit_bias=((1, 2.0), (1, 1.0)))),
    "penalties": Sample(
        *(0, 3, SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)), penalty_counts=SEEN
    ),
}


def launch(samples: list[Sample], device: torch.device) -> None:
    logits = torch.zeros(len(samples), VOCAB, device=device)
    asking = {at: 3 for at, each in enumerate(samples) if each.params.logprobs}
    choose(
        *(logits, samples, draws_of(samples, device)),
        lambda *given: choose_tokens(*given).clamp_(0, VOCAB - 1),  # kernels may not be run
        changed=range(len(samples)),
        asking=asking,
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_no_parameter_makes_the_host_wait_for_the_device(name: str) -> None:
    with waits() as found:
        launch([SAMPLES["plain"], SAMPLES[name]], CPU)
    assert found == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1], device=x.device),
        lambda x: x.to(CPU),
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
    ],
    ids=["copy from a list", "to", "item", "bool", "mask", "tolist"],
)
def test_operations_that_wait_are_found(wait: Any) -> None:
    with waits() as found:
        wait(torch.zeros(3))
    assert found


@pytest.mark.gpu
def test_cuda_does_not_wait_either() -> None:
    needs("gpu")
    device, samples = torch.device("cuda"), list(SAMPLES.values())
    launch(samples, device)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(samples, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
