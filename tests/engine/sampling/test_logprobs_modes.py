"""--logprobs-mode and --max-logprobs: what logprobs are, how many there may be, and that neither
changes an id."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine import LLM, SamplingParams
from baton_engine.config.engine_config import LogprobsMode
from baton_engine.interface import Sample
from baton_protocol.errors import InvalidRequest
from tests.support.engines.sampling import sample, shaped_logits
from tests.support.engines.tiny_models import VOCAB, prompt_of

MODES = typing.get_args(LogprobsMode)
BIAS = ((3, 2.5),)
DRAWN = SamplingParams(temperature=0.5, top_k=3, seed=1, logprobs=8, logit_bias=BIAS)
GREEDY = SamplingParams(temperature=0.0, logprobs=8, logit_bias=BIAS)
BEAM = SamplingParams(temperature=0.0, logprobs=8, use_beam_search=True)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_scores_that_it_names_and_the_same_ids(mode: LogprobsMode) -> None:
    raw_SV = torch.randn(3, 21, generator=torch.Generator().manual_seed(3))
    changed_SV = raw_SV.clone()
    changed_SV[:2, 3] += 2.5
    shown_SV = raw_SV.clone()
    if mode.startswith("processed"):
        shown_SV[0] = shaped_logits(changed_SV[:1], [DRAWN])[0]
        shown_SV[1:] = changed_SV[1:]
    if mode.endswith("logprobs"):
        shown_SV = shown_SV.log_softmax(dim=-1)
    shown_SV[2] = raw_SV[2].log_softmax(dim=-1)  # beams are scored by the raw logprobs
    samples = [Sample(0, 4, params) for params in (DRAWN, GREEDY, BEAM)]
    found = sample(raw_SV.clone(), range(3), samples, mode=mode)
    assert [each.id for each in found] == [
        each.id for each in sample(raw_SV.clone(), range(3), samples)
    ]
    for row, each in enumerate(found):
        assert each.logprobs is not None
        best = shown_SV[row].topk(8)
        values = [token.logprob for token in each.logprobs.top]
        assert values == pytest.approx(best.values.tolist())
        assert each.logprobs.sampled.logprob == pytest.approx(float(shown_SV[row, each.id]))
        assert each.logprobs.sampled.rank == 1 + int((shown_SV[row] > shown_SV[row, each.id]).sum())


def test_the_whole_vocabulary_within_the_limit(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("qwen3-gqa4")
    every = LLM(folder, dtype="float32", threads=1, kv_blocks=50, max_logprobs=-1)
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    [output] = every.generate(prompt_of(5), params)
    logprobs, prompt_logprobs = output.outputs[0].logprobs, output.prompt_logprobs
    assert logprobs is not None
    assert prompt_logprobs is not None
    for position in (*logprobs, *prompt_logprobs[1:]):
        assert position is not None
        assert {token.id for token in position.top} == set(range(VOCAB))
    few = LLM(folder, dtype="float32", threads=1, kv_blocks=50, max_logprobs=3)
    for name in ("logprobs", "prompt_logprobs"):
        few.generate(prompt_of(5), asking(name, 3))
        for value in (-1, 4):
            with pytest.raises(InvalidRequest, match=rf"{name} is {value}; .*must be in \[0, 3\]"):
                few.generate(prompt_of(5), asking(name, value))


def asking(name: str, value: int) -> SamplingParams:
    return msgspec.convert({"max_tokens": 1, name: value}, SamplingParams)
