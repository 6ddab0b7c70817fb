"""Prompt logprobs on real weights equal those of transformers, with any chunked prefill and in any
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.step_sizes import PROMPT_ROWS
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import PromptUse
from baton_engine.models.decoder import Decoder
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import SamplingParams
from tests.support.engines.engine_core import drive
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import make_request, small_engine

NAME = "qwen3-gqa4"
TOP = 5
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=TOP)
PLAIN = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path]) -> Callable[[Sequence[int]], torch.Tensor]:
    """Returns transformers' log-probabilities [length, vocabulary] of a prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(NAME), dtype=torch.float32)

    def of(prompt: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0]
        return logits.log_softmax(-1)

    return of


def check(
    actual: Sequence[PositionLogprobs], prompt: Sequence[int], logprobs: torch.Tensor
) -> None:
    assert len(actual) == len(prompt) - 1
    for entry, id, row in zip(actual, prompt[1:], logprobs, strict=False):
        own = row[id].item()
        assert entry.sampled.id == id
        assert entry.sampled.logprob == pytest.approx(own, abs=1e-4)
        larger = int((row > own + 1e-4).sum())
        assert larger < entry.sampled.rank <= int((row > own - 1e-4).sum()) + 1
        best = row.topk(TOP).values.tolist()
        assert [each.logprob for each in entry.top] == pytest.approx(best, abs=1e-4)
        for each in entry.top:
            assert row[each.id].item() == pytest.approx(each.logprob, abs=1e-4)


def prompt_uses(
    engine: EngineCore, **requests: tuple[list[int], SamplingParams]
) -> dict[str, PromptUse]:
    for name, (prompt, params) in requests.items():
        engine.submit(make_request(name, prompt, params))
    return {str(use.request): use for use in drive(engine).prompts}


@pytest.mark.parametrize("budget", [7, 256])
def test_prompt_logprobs_equal_those_of_transformers_in_any_batch(
    budget: int, tiny_model: Callable[[str], Path], expected: Callable[..., torch.Tensor]
) -> None:
    long, short, other = prompt_of(200, seed=1), prompt_of(9, seed=2), prompt_of(60, seed=3)
    assert len(long) > PROMPT_ROWS  # more rows than one computation of logits takes
    engine = small_engine(tiny_model(NAME), max_batched_tokens=budget)
    results = prompt_uses(
        engine, long=(long, WITH_LOGPROBS), other=(other, PLAIN), short=(short, WITH_LOGPROBS)
    )
    check(results["long"].logprobs, long, expected(long))
    check(results["short"].logprobs, short, expected(short))
    assert results["other"].logprobs == ()


def test_a_cached_prompt_is_computed_again_for_prompt_logprobs(
    tiny_model: Callable[[str], Path], expected: Callable[..., torch.Tensor]
) -> None:
    engine, prompt = small_engine(tiny_model(NAME)), prompt_of(100, seed=4)
    plain = prompt_uses(engine, first=(prompt, PLAIN))["first"]
    use = prompt_uses(engine, asking=(prompt, WITH_LOGPROBS))["asking"]
    again = prompt_uses(engine, last=(prompt, PLAIN))["last"]
    assert (plain.cached, use.cached, again.cached) == (0, 0, 96)
    check(use.logprobs, prompt, expected(prompt))


def test_prompt_logprobs_survive_preemption(
    tiny_model: Callable[[str], Path], expected: Callable[..., torch.Tensor]
) -> None:
    engine = small_engine(tiny_model(NAME), kv_blocks=12, max_batched_tokens=16)
    prompt = prompt_of(120, seed=6)
    growing = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    engine.submit(make_request("old", prompt_of(17, seed=5), growing))
    for _ in range(44):  # "old" then needs its next block while the prompt is computed
        engine.step()
    use = prompt_uses(engine, asking=(prompt, WITH_LOGPROBS))["asking"]
    assert engine.load().preemptions_total > 0
    assert use.computed == 120
    check(use.logprobs, prompt, expected(prompt))


def test_logits_are_computed_only_for_samples_and_requested_prompt_logprobs(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits = Decoder.logits

    def counted(self: Decoder, hidden_SD: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_SD))
        return logits(self, hidden_SD)

    monkeypatch.setattr(Decoder, "logits", counted)
    engine = small_engine(tiny_model(NAME), max_batched_tokens=50)
    params: dict[str, Any] = {
        "a": (prompt_of(40, seed=1), PLAIN),
        "b": (prompt_of(30), WITH_LOGPROBS),
    }
    prompt_uses(engine, **params)
    # Step 1: a sample and 10 tokens of b's prompt. Step 2: two samples and the rest of the prompt.
    # Step 3: the last sample.
    assert rows == [1, 10, 2, 19, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_prompt_logprobs_on_cuda_equal_those_of_transformers(
    tiny_model: Callable[[str], Path], expected: Callable[..., torch.Tensor]
) -> None:
    prompt = prompt_of(200, seed=1)
    engine = small_engine(tiny_model(NAME), device="cuda")
    use = prompt_uses(engine, a=(prompt, WITH_LOGPROBS))["a"]
    check(use.logprobs, prompt, expected(prompt))
