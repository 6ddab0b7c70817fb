"""EngineArgs: vLLM's names of arguments, hub names with revisions, another tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import EngineArgs
from baton_engine.config.engine_config import EngineConfig, TorchSettings
from baton_engine.errors import ModelError, SettingsError
from baton_engine.offline.arguments import ONLY, REFUSED, RENAMED, UNUSED, engine_options

MIB = 1 << 20
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"max_num_seqs": 8, "max_model_len": None}, {"max_num_seqs": 8}),
        ({"max_num_batched_tokens": 64}, {"max_batched_tokens": 64}),
        ({"num_gpu_blocks_override": 9}, {"kv_blocks": 9}),
        ({"kv_cache_memory_bytes": MIB}, {"kv_memory": MIB}),
        ({"swap_space": 0.5}, {"host_kv_memory": 512 * MIB}),
        ({"kv_offloading_size": 2}, {"host_kv_memory": 2048 * MIB}),
        ({"async_scheduling": False}, {"overlap": "off"}),
        ({"async_scheduling": None}, {}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"speculative_config": NGRAM}, {"speculative_config": json.dumps(NGRAM)}),
        (
            {"spec_method": "ngram", "spec_tokens": 3, "spec_model": None},
            {"speculative_config": json.dumps(NGRAM)},
        ),
        ({"tensor_parallel_size": 1, "trust_remote_code": False, "tokenizer_mode": "auto"}, {}),
        ({"disable_log_stats": True, "hf_token": None}, {}),
    ],
)
def test_vllm_s_names_stand_for_the_options_of_these_meanings(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = engine_options(given)
    assert options == expected
    TorchSettings(model=Path("x"), **options).check()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"max_num_seq": 1}, TypeError, "max_num_seq is unknown; did you mean max_num_seqs?"),
        ({"blocksize": 1}, TypeError, "blocksize is unknown; did you mean block_size?"),
        ({"zzz": 1}, TypeError, "zzz is unknown$"),
        ({"tensor_parallel_size": 2}, SettingsError, "is 2; it can only be 1: an engine has one"),
        (
            {"tokenizer_mode": "slow"},
            SettingsError,
            "tokenizer_mode is 'slow'; it can only be 'auto'",
        ),
        ({"trust_remote_code": True}, SettingsError, "no code of a model's repository is run"),
        ({"hf_token": "x"}, SettingsError, "hf_token is not supported: set HF_TOKEN"),
        ({"kv_blocks": 1, "num_gpu_blocks_override": 1}, SettingsError, "are the same option"),
        ({"spec_method": "ngram", "speculative_config": NGRAM}, SettingsError, "not both"),
        ({"stream_interval": 0}, SettingsError, "stream_interval is 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        EngineArgs("model", **given)


def test_each_name_stands_in_one_table_and_leads_to_an_option() -> None:
    options = {field.name for field in fields(EngineConfig)}
    tables = [*RENAMED, *ONLY, *UNUSED, *REFUSED]
    assert len(set(tables)) == len(tables)
    assert set(RENAMED.values()) <= options


def test_a_hub_s_model_is_found_at_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--somebody--some-model"
    snapshot = repository / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("1" * 40)
    settings = EngineArgs("somebody/some-model", revision="v1").torch_settings()
    assert (settings.model, settings.name) == (snapshot, "somebody/some-model")
    with pytest.raises(ModelError, match=r"--model somebody/some-model at v2: .* did not provide"):
        EngineArgs("somebody/some-model", revision="v2").folder  # noqa: B018
    with pytest.raises(ModelError, match="only a hub's model has revisions: leave out revision v1"):
        EngineArgs(snapshot, revision="v1").folder  # noqa: B018


def test_another_tokenizer_brings_its_template_and_the_model_keeps_its_defaults(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    other = tiny_model("qwen3-gqa4")
    assert EngineArgs(tmp_path).read_text() is None
    text = EngineArgs(tmp_path, tokenizer=str(other)).read_text()
    own = EngineArgs(other).read_text()
    assert text is not None
    assert own is not None
    assert text.tokenizer.encode("the cache") == own.tokenizer.encode("the cache")
    assert text.template.render([{"role": "user", "content": "hi"}]) == own.template.render(
        [{"role": "user", "content": "hi"}]
    )
    assert text.tokenizer.eos_ids == (7,)
    assert text.defaults == {"temperature": 0.25}
    assert EngineArgs(other, skip_tokenizer_init=True).read_text() is None
    with pytest.raises(ModelError, match="tokenizer /no/such: the folder does not exist"):
        EngineArgs(other, tokenizer="/no/such").read_text()


@pytest.mark.parametrize(
    ("given", "method", "expected"),
    [
        (None, "awq", "none"),
        ("awq", "awq", "none"),
        ("int8", None, "int8"),
        ("gptq", "awq", "gptq"),
    ],
)
def test_the_checkpoint_s_own_quantization_may_be_named(
    tmp_path: Path, given: str | None, method: str | None, expected: str
) -> None:
    config = {} if method is None else {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        tmp_path, quantization=given, load_format="safetensors", served_model_name="a"
    )
    settings = args.torch_settings()
    assert (settings.quantization, settings.load_format, settings.name) == (expected, "auto", "a")
