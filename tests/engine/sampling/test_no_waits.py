"""Sampling launches its work without waiting for the device, so the next step overlaps this one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from baton_engine.interface import PenaltyCounts, Sample
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import choose
from baton_engine.sampling.triton_sampler import choose_tokens
from baton_protocol.sampling import SamplingParams
from tests.support.engines.matchers import ListedMatcher
from tests.support.needs import needs

VOCAB = 100
CPU = torch.device("cpu")
# Copies to and from memory that is not pinned. Torch waits for them, and so for all work before.
COPIES = {
    *(torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu),
    *(torch.Tensor.tolist, torch.Tensor.numpy),
}
# Operations whose result is a number on the host, or has a shape that depends on values.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero"}


class Copies(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COPIES:
            self._found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if name in READS or masks:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """The operations that would make the host wait for a GPU. Kernels are not run."""
    found: list[str] = []
    no_launch = mock.patch.object(KernelInterface, "__getitem__", return_value=mock.Mock())
    with no_launch, Copies(found), Reads(found):
        yield found


SEEN = PenaltyCounts(array("q", [1, 2]), Counter([3, 3]))
SAMPLES = {
    "plain": Sample(0, 3, SamplingParams()),
    "greedy": Sample(0, 3, SamplingParams(temperature=0.0)),
    "filters": Sample(0, 3, SamplingParams(top_k=5, top_p=0.9, min_p=0.1)),
    "logprobs": Sample(0, 3, SamplingParams(logprobs=3)),
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
