"""--batch-invariant on: the bits of a token's logprobs depend only on the tokens before it.

Ids and float32 logprobs are compared as they are, without a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import small_engine

Token = tuple[int, float]
NEW_TOKENS = 12
FAMILIES = [
    "llama-gqa2-tied",
    "llama3-rope",
    "mistral-window",
    "qwen2",
    "qwen3-gqa4",
    "qwen3-window",
    "phi3",
    "gemma2",
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
PROMPT = prompt_of(150, seed=1)


def exact_engine(folder: Path, **settings: Any) -> EngineCore:
    engine = small_engine(folder, batch_invariant="on", **settings)
    assert engine.info.exact == "bitwise"
    return engine


def submit(
    engine: EngineCore, name: str, prompt: Sequence[int], outputs: Sequence[int] = ()
) -> None:
    engine.submit(
        Request(
            id=RequestId(name),
            attempt=0,
            prompt_ids=tuple(prompt),
            params=PARAMS,
            outputs=(tuple(outputs),),
        )
    )


def run(engine: EngineCore, found: dict[str, list[Token]] | None = None) -> dict[str, list[Token]]:
    """Step until all requests have ended. Returns their ids and logprobs."""
    found = {} if found is None else found
    while engine.has_work():
        for token in engine.step().tokens:
            assert token.logprobs is not None
            found.setdefault(token.request, []).append((token.id, token.logprobs.sampled.logprob))
    engine.check_integrity()
    return found


def alone(folder: Path, dtype: str, **settings: Any) -> list[Token]:
    engine = exact_engine(folder, dtype=dtype, **settings)
    submit(engine, "alone", PROMPT)
    return run(engine)["alone"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_path_gives_a_request_the_bits_that_it_gets_alone(
    family: str, dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(family)
    expected = alone(folder, dtype)
    for size in (1, 7, 16, 64):
        assert alone(folder, dtype, max_batched_tokens=size) == expected, f"pieces of {size}"
    assert alone(folder, dtype, overlap="on") == expected, "with overlap"

    engine = exact_engine(folder, dtype=dtype, max_batched_tokens=64)
    for index in range(20):
        submit(engine, f"other {index}", prompt_of(1 + 9 * index, seed=2 + index))
    submit(engine, "crowd", PROMPT)
    assert run(engine)["crowd"] == expected, "in a crowd of 20"

    submit(engine, "cached", PROMPT)
    assert run(engine)["cached"] == expected, "with a cached prompt"
    for index in range(3):  # these share the prompt's blocks
        submit(engine, f"shared {index}", [*PROMPT, *prompt_of(5, seed=50 + index)])
    submit(engine, "shared", PROMPT)
    assert run(engine)["shared"] == expected, "with a shared prompt"

    for position in range(NEW_TOKENS):
        continued = exact_engine(folder, dtype=dtype)
        ids = [id for id, _ in expected[:position]]
        submit(continued, "continued", PROMPT, ids)
        assert run(continued)["continued"] == expected[position:], f"taken over at {position}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_give_the_same_bits_with_blocks_that_do_not_divide_a_split(
    dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model("mistral-window")
    expected = alone(folder, dtype, block_size=12)
    for size in (1, 7, 64):
        assert alone(folder, dtype, block_size=12, max_batched_tokens=size) == expected


def test_preempted_requests_get_the_bits_that_they_get_alone(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("llama-gqa2-tied")
    expected = alone(folder, "float32")
    for blocks in range(22, 40, 3):
        engine = exact_engine(folder, dtype="float32", kv_blocks=blocks)
        for index in range(4):
            submit(engine, f"same {index}", PROMPT)
        assert set(map(tuple, run(engine).values())) == {tuple(expected)}, f"{blocks} blocks"
