"""--batch-invariant on with kernels: a token's bits depend only on the tokens before it.

Ids and float32 logprobs are compared as they are, without a tolerance. For torch on a CPU,
`tests/bits` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.attention import triton_backend, triton_paged_attention
from baton_engine.core.engine_core import EngineCore
from baton_engine.kv.kv_pool import TORCH_DTYPES
from baton_engine.layers import triton_matmul
from baton_engine.layers.triton_quantized import products
from tests.support.engines.kernels import DEVICE, can_compute
from tests.support.engines.quantized.quantized_models import make_quantized
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import GREEDY, make_request, run_requests, small_engine

Token = list[tuple[int, float]]
Folders = Callable[[str], Path]
NEW_TOKENS = 2
PROMPT = prompt_of(36, seed=1)
SPLIT_KEYS = 16  # the kernels' 256 would need long prompts
PARAMS = msgspec.structs.replace(GREEDY, max_tokens=NEW_TOKENS, logprobs=20)
DTYPES = [
    "float32",
    pytest.param("bfloat16", marks=[pytest.mark.gpu, pytest.mark.long]),
]

QUANTIZED = ("mixtral in w4a16 g32", "llama-gqa4 in w8a8")


@pytest.fixture(autouse=True)
def _short_splits_among_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's keys are divided among more programs in a small step than in a large one. Without
    fixed splits that changes its bits. The engine's own test of its products is shortened."""
    for module, kind in ((triton_matmul, "FIXED"), (products, "QUANTIZED")):
        for name in (f"{kind}_TILE", f"{kind}_TILE_HEAD"):
            method = replace(getattr(module, name), counts=(1, 70))
            monkeypatch.setattr(module, name, method)
    for name in ("FIXED_SPLIT_KEYS", "SPLIT_KEYS", "MOST_KEYS"):
        monkeypatch.setattr(triton_paged_attention, name, SPLIT_KEYS)
    monkeypatch.setattr(
        triton_backend, "programs_for", lambda rows, *sizes: {1: 4, 2: 2}.get(rows, 1)
    )


def exact_engine(folder: Path, dtype: str, **settings: Any) -> EngineCore:
    chosen = {"kernels": "triton", "device": DEVICE.type, "batch_invariant": "on", **settings}
    engine = small_engine(folder, dtype=dtype, **chosen)
    assert engine.info.exact == "bitwise"
    return engine


def tokens_of(
    engine: EngineCore, prompts: Sequence[Sequence[int]], outputs: Sequence[int] = ()
) -> list[Token]:
    """Submit all prompts at once. Returns the most likely ids and their logprobs for each token of
    the first one; one logprob alone often rounds a difference away."""
    requests = [make_request(str(index), prompt, PARAMS) for index, prompt in enumerate(prompts)]
    requests[0] = msgspec.structs.replace(requests[0], outputs=(tuple(outputs),))
    found = run_requests(engine, requests)[requests[0].id]
    return [
        [(likely.id, likely.logprob) for likely in each.logprobs.top]
        for each in found
        if each.logprobs
    ]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "llama-gqa2-tied", "qwen2", "qwen3-window", "phi3-partial-window", "gpt-oss"),
        *QUANTIZED,
    ],
)
def test_every_path_gives_a_request_the_bits_that_it_gets_alone(
    family: str, dtype: str, tiny_model: Folders
) -> None:
    can_compute(TORCH_DTYPES[dtype])
    name, _, layout = family.partition(" in ")
    folder = make_quantized(name, layout).folder if layout else tiny_model(family)
    expected = tokens_of(exact_engine(folder, dtype), [PROMPT])
    assert len(expected) == NEW_TOKENS

    engine = exact_engine(folder, dtype, max_batched_tokens=24, overlap="on")
    others = [prompt_of(length, seed=length) for length in (1, 20)]
    assert tokens_of(engine, [PROMPT, *others]) == expected, "in a batch, in pieces of 24 at most"
    shared = [*PROMPT, *prompt_of(3, seed=50)]
    assert tokens_of(engine, [PROMPT, shared]) == expected, "with a cached and shared prompt"

    first = expected[0][0][0]
    continued = tokens_of(exact_engine(folder, dtype, max_batched_tokens=10), [PROMPT], [first])
    assert continued == expected[1:], "taken over after a token, in pieces of 10"


def test_engines_of_different_arithmetic_have_different_fingerprints(tiny_model: Folders) -> None:
    """They must not exchange KV."""
    folder = tiny_model("llama-gqa2-tied")
    engines = [
        exact_engine(folder, "float32"),
        exact_engine(folder, "float32", kernels="torch", device="cpu"),
        small_engine(folder, batch_invariant="off"),
    ]
    assert len({engine.info.fingerprint for engine in engines}) == len(engines)
