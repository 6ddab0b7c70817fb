"""The benchmark of quality: what it compares, and the documents that quote its results."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from baton_engine.llm import LLM
from baton_protocol.sampling import SamplingParams
from benchmarks.engine.quality import ROWS, Answers, Row, compared, equal_prefix
from benchmarks.support.engine.quality_page import PAGE, PLOT, pages, read_results
from benchmarks.support.engine.shuffled_channels import shuffle_channels
from tests.support.engines.quantized.gguf_files import numbers_of_blocks
from tests.support.engines.quantized.gguf_rounding import rounded_blocks
from tests.support.engines.tiny_models import make_tiny_model, prompt_of


@pytest.mark.parametrize("page", [PAGE, PLOT], ids=lambda page: page.name)
def test_the_documents_show_the_results(page: Path) -> None:
    stale = "stale; run: python -m benchmarks.support.engine.quality_page"
    assert page.read_text() == pages(read_results())[page], stale


def test_the_results_have_each_row() -> None:
    results = {(row.name, row.kind) for row in read_results().rows}
    assert results == {(row.name, row.kind) for row in ROWS}


def test_an_engine_is_compared_with_float32() -> None:
    plain = Answers([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4], [[5, 6, 7], [8, 9, 9]])
    ours = Answers([-1.5, -2.0, -3.5, -2.0], [1, 2, 0, 4], [[5, 6, 7], [8, 0, 9]])
    row = compared(Row("int8", "checkpoint"), 8.0, ours, plain)
    assert row.perplexity == pytest.approx(math.exp(2.25))
    assert row.increase == pytest.approx(math.exp(0.25) - 1)
    assert (row.equal_next, row.equal_answer) == (0.75, 2.0)
    assert equal_prefix([], []) == 0


@pytest.mark.parametrize("model", ["llama-gqa2-tied", "llama3-rope"])
def test_a_model_with_shuffled_channels_computes_the_same(model: str, tmp_path: Path) -> None:
    source, shuffled = make_tiny_model(model), tmp_path / "shuffled"
    shuffle_channels(source, shuffled)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = []
    for folder in (source, shuffled):
        llm = LLM(folder, dtype="float32", threads=1, kv_blocks=20)
        [output] = llm.generate([prompt_of(100, seed=1)], params)
        scored = [each for each in output.prompt_logprobs or () if each is not None]
        found.append(torch.tensor([each.sampled.logprob for each in scored]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("kind", "error"), [("Q4_K", 0.09), ("Q6_K", 0.02)])
def test_blocks_of_256_are_rounded_to_the_nearest_code(kind: str, error: float) -> None:
    x = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    x[0], x[1], x[2] = 0.0, np.abs(x[1]), -np.abs(x[2])
    numbers = numbers_of_blocks(kind, rounded_blocks(kind, x))
    assert np.sqrt(np.square(numbers - x).mean()) < error
    assert not numbers[0].any()
