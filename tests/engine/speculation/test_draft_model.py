"""Torch engines for which a draft model drafts: the same answers, which models fit, its memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import SettingsError
from baton_engine.interface import TokenOut
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.engine_core import drive, run_all
from tests.support.engines.landing import land
from tests.support.engines.tiny_models import VOCAB, prompt_of
from tests.support.engines.torch_engines import make_request, small_engine

GIB = 1 << 30
TARGET = "llama-gqa2-tied"
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, n=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


def speculative(folder: Path, **keys: Any) -> str:
    return json.dumps({"method": "draft_model", "model": str(folder), **keys})


def requests() -> list[Request]:
    lengths = (5, 40, 61)
    return [
        *(make_request(f"g{length}", prompt_of(length), GREEDY) for length in lengths),
        *(make_request(f"d{length}", prompt_of(length), DRAWN) for length in lengths),
    ]


def answers(engine: EngineCore) -> list[TokenOut]:
    tokens = run_all(engine, requests()).tokens
    return sorted(tokens, key=lambda token: (token.request, token.choice, token.offset))


@pytest.mark.parametrize(
    ("name", "keys", "settings"),
    [
        (TARGET, {}, {}),
        (TARGET, {"quantization": "int8"}, {"kv_blocks": 24}),  # preempts
        pytest.param("gemma2", {}, {"overlap": "on"}, marks=pytest.mark.long),
        pytest.param("deepseek-v3", {}, {"max_batched_tokens": 40}, marks=pytest.mark.long),
        pytest.param("mistral-window", {}, {"kv_cache_dtype": "int8"}, marks=pytest.mark.long),
    ],
)
def test_a_draft_model_changes_no_token(
    tiny_model: Callable[[str], Path], name: str, keys: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder = tiny_model(TARGET)
    config = speculative(tiny_model(name), num_speculative_tokens=3, **keys)
    engine = small_engine(folder, speculative_config=config, **settings)
    alone = small_engine(folder, **{**settings, "kv_blocks": 200})
    assert answers(engine) == answers(alone)
    load = engine.load()
    assert load.drafted_tokens_total > 0
    if name == TARGET and not keys:
        assert load.accepted_drafts_total == load.drafted_tokens_total
    assert (load.preemptions_total > 0) == ("kv_blocks" in settings)
    assert engine.info.fingerprint == alone.info.fingerprint


def test_a_draft_model_catches_up_after_a_hand_off(tiny_model: Callable[[str], Path]) -> None:
    """KV of the prompt and the first tokens come from another engine, which has no draft model."""
    folder = tiny_model(TARGET)
    donor = small_engine(folder)
    request = make_request("a", prompt_of(61), GREEDY)
    begun = run_all(donor, [request])
    engine = small_engine(folder, speculative_config=speculative(folder), max_batched_tokens=40)
    going_on = msgspec.structs.replace(request, outputs=(tuple(begun.ids("a")[:9]),))
    reservation = engine.reserve(going_on)
    assert reservation is not None
    landed = land(engine, reservation, donor, range(4)).landed
    engine.submit(going_on, reservation=reservation, landed=landed)
    run = drive(engine)
    assert run.tokens == [token for token in begun.tokens if token.offset >= 9]
    assert run.use("a") == (0, 61, 0)
    load = engine.load()
    assert load.drafted_tokens_total == load.accepted_drafts_total > 0


def other_tokenizer(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model whose tokenizer.json is changed."""
    shutil.copytree(folder, to)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to


def swap_two(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def test_a_model_with_another_tokenizer_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(TARGET)
    other = other_tokenizer(folder, tmp_path / "other", swap_two)
    message = (
        f"the draft model {other} has another tokenizer than {folder}: 'I' has id 41 there and"
        " id 40 here; of 320 tokens, 2 differ"
    )
    with pytest.raises(SettingsError, match=message):
        small_engine(folder, speculative_config=speculative(other))


def test_a_folder_without_a_model_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=f"^--speculative-config: model folder {tmp_path}"):
        small_engine(tiny_model(TARGET), speculative_config=speculative(tmp_path))


def with_ids(folder: Path, to: Path, count: int) -> Path:
    """A copy of a model with this number of token ids, to compute with random weights."""
    shutil.copytree(folder, to)
    values = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**values, "vocab_size": count}))
    return to


def test_numbers_of_ids_may_differ_if_the_tokens_are_equal(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Random weights alone: the answers are those of the target, whatever ids the other has."""
    folder = tiny_model(TARGET)
    wider, narrower = (with_ids(folder, tmp_path / str(n), n) for n in (VOCAB + 64, VOCAB - 64))
    alone = answers(small_engine(folder, load_format="dummy"))
    for second in (wider, narrower):
        config = speculative(second)
        engine = small_engine(folder, load_format="dummy", speculative_config=config)
        assert answers(engine) == alone
        assert engine.load().drafted_tokens_total > 0
    (wider / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match=f"has {VOCAB + 64} token ids, and .* has {VOCAB}"):
        small_engine(folder, speculative_config=speculative(wider))


def test_its_weights_and_kv_are_part_of_the_engines_memory(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model(TARGET)
    config = speculative(folder)

    def blocks(free: int, **settings: Any) -> int:
        chosen = TorchSettings(model=folder, threads=1, **settings)
        return build_torch(chosen, free=lambda: free).info.num_blocks

    size = small_engine(folder).info.layout.block_bytes
    alone, both = (blocks(2 * GIB // 10, speculative_config=each) for each in (None, config))
    assert 0.45 * alone < both < 0.5 * alone
    assert size * alone < 2 * GIB // 10


def test_an_engine_without_memory_for_the_draft_model_is_refused(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model(TARGET)
    settings = TorchSettings(
        model=folder, threads=1, kv_memory=GIB // 8, speculative_config=speculative(folder)
    )
    with pytest.raises(SettingsError) as refused:
        build_torch(settings, free=lambda: GIB // 4 + GIB // 16)
    message = str(refused.value)
    assert "weights of both models" in message
    assert "--speculative-config without a draft model" in message
