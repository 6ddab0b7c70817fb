"""A whole engine on real weights: its ids with overlapping steps equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton_protocol.sampling import SamplingParams
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import make_request, run_requests, small_engine

# Rows that need only plain decode steps and rows that need other kinds of steps. They finish at
# different times.
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=25, top_p=0.8),
    SamplingParams(seed=4, max_tokens=40, presence_penalty=0.5),
    SamplingParams(seed=4, max_tokens=20, logprobs=2),
    SamplingParams(seed=9, max_tokens=12, n=3),
    SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8),
)
PROMPTS = [prompt_of(5 + 7 * number, seed=number) for number in range(12)]

Ids = dict[str, list[tuple[int, int, int]]]


def run(folder: Path, **settings: object) -> Ids:
    requests = [
        make_request(str(number), prompt, KINDS[number % len(KINDS)])
        for number, prompt in enumerate(PROMPTS)
    ]
    tokens = run_requests(small_engine(folder, **settings), requests)
    return {
        str(id): sorted((each.choice, each.offset, each.id) for each in outputs)
        for id, outputs in tokens.items()
    }


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path]) -> Ids:
    return run(tiny_model("qwen3-gqa4"), overlap="off")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batched_tokens": 16},
        {"kv_blocks": 30, "max_model_len": 200},
        {"max_num_seqs": 3},
    ],
    ids=["default", "chunked prefill", "few blocks", "few sequences"],
)
def test_ids_with_overlap_equal_those_without(
    settings: dict[str, int], tiny_model: Callable[[str], Path], expected: Ids
) -> None:
    assert run(tiny_model("qwen3-gqa4"), overlap="on", **settings) == expected
