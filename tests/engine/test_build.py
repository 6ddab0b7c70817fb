"""build_torch: its defaults, and its errors for invalid settings, each one line with the flag."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.errors import EngineError, ModelError, SettingsError, UnsupportedModel
from baton_engine.runner.model_runner import TorchRunner
from tests.support.engines.tiny_models import FIRST_SPECIAL, MAX_POSITIONS, VOCAB
from tests.support.engines.torch_engines import small_engine


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-gqa2-tied")


def test_engine_info_is_read_from_the_model_folder(folder: Path) -> None:
    info = small_engine(folder).info
    assert (info.kind, info.model, info.vocab_size) == ("torch", folder.name, VOCAB)
    assert info.eos_ids == (FIRST_SPECIAL + 1, FIRST_SPECIAL + 4)
    assert (info.layout.num_layers, info.layout.num_kv_heads, info.layout.head_dim) == (2, 2, 16)
    assert (info.max_batched_tokens, info.max_model_len) == (256, MAX_POSITIONS)
    assert small_engine(folder, name="other").info.model == "other"


def test_the_default_pool_is_1_gib_and_the_default_chunk_at_most_8_blocks(folder: Path) -> None:
    info = build_torch(TorchSettings(model=folder, threads=1)).info
    assert info.num_blocks == (1 << 30) // info.layout.block_bytes
    assert info.layout.chunk_blocks == 8
    assert info.layout.dtype == "float32"


def test_head_shards_are_in_the_layout_and_in_the_fingerprint(folder: Path) -> None:
    one, two = (small_engine(folder, kv_shards=shards) for shards in (1, 2))
    assert (one.info.layout.kv_shards, two.info.layout.kv_shards) == (1, 2)
    assert two.memory.layout == two.info.layout
    assert one.info.fingerprint != two.info.fingerprint


def test_kv_in_8_bits_has_a_fingerprint_of_its_own_for_each_dtype_of_computation(
    folder: Path,
) -> None:
    engines = [
        small_engine(folder, dtype=dtype, kv_cache_dtype=kept, batch_invariant="off").info
        for dtype in ("float32", "bfloat16")
        for kept in ("int8", "fp8")
    ]
    assert len({info.fingerprint for info in engines}) == len(engines)
    # Of 2 layers, K and V of 2 heads have 16 codes and an exponent each.
    assert {info.layout.token_bytes for info in engines} == {2 * 2 * 2 * (16 + 1)}


def test_kv_memory_is_rounded_down_to_whole_blocks(folder: Path) -> None:
    block = small_engine(folder).info.layout.block_bytes
    assert small_engine(folder, kv_blocks=None, kv_memory=100 * block - 1).info.num_blocks == 99


def test_a_small_pool_limits_the_length_or_refuses_an_explicit_longer_one(folder: Path) -> None:
    assert small_engine(folder, kv_blocks=10).info.max_model_len == 160
    assert small_engine(folder, kv_blocks=10, max_model_len=160).info.max_model_len == 160
    with pytest.raises(SettingsError, match=r"--max-model-len 161 .* 160 tokens.*--kv-blocks"):
        small_engine(folder, kv_blocks=10, max_model_len=161)


def test_the_number_of_threads_is_set(folder: Path) -> None:
    small_engine(folder, threads=2)
    assert torch.get_num_threads() == 2
    small_engine(folder, threads=1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int4"}, "--dtype int4"),
        ({"device": "tpu"}, "--device tpu"),
        ({"kv_memory": 1 << 30}, "exclude each other"),
        ({"kv_blocks": 0}, "--kv-blocks is 0"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4 is unknown; use auto, int8, fp8"),
        ({"kv_cache_dtype": "bfloat16"}, "computes in float32.* use auto, float32, int8, fp8"),
        ({"kv_cache_dtype": "fp8", "store_codec": "int8"}, "the store has 8 bits as it is"),
        ({"threads": -1}, "--threads is -1"),
        ({"max_model_len": 4096}, "--max-model-len 4096 .* 1024"),
        ({"kv_blocks": None, "kv_memory": 100}, "raise --kv-memory"),
        ({"host_kv_memory": -1}, "--host-kv-memory is -1"),
        ({"host_kv_memory": 100}, "--host-kv-memory 100 holds no block of"),
        ({"kv_shards": 0}, "--kv-shards is 0"),
        ({"dtype": "float16"}, "--dtype float16 is computed on cuda only"),
        (
            {"dtype": "float16", "kernels": "triton", "kv_cache_dtype": "int8"},
            "--kv-cache-dtype int8 needs --dtype bfloat16",
        ),
        ({"matmul_precision": "high"}, "--matmul-precision high is for cuda"),
        ({"kv_shards": 3}, "--kv-shards 3 does not divide the model's 2 KV heads; use one of 1, 2"),
    ],
)
def test_errors_for_invalid_settings_name_the_flag(
    settings: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        small_engine(folder, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="no CUDA device; use cpu"):
        small_engine(folder, device="cuda")


def test_a_folder_without_a_supported_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        small_engine(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        small_engine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5"]}))
    with pytest.raises(UnsupportedModel, match="T5"):
        small_engine(tmp_path)
    assert issubclass(UnsupportedModel, EngineError)


@pytest.mark.integration
def test_settings_and_configs_of_all_families_are_read_without_importing_torch() -> None:
    """Processes that never use torch check flags, too."""
    config = ("config.engine_config", "config.model_config", "weights.digest")
    memory = ("memory.estimate", "memory.fit", "memory.host_memory", "memory.requirements")
    modules = ", ".join(f"baton_engine.{name}" for name in (*config, *memory))
    families = "[find_family(name) for name in BUILT_IN]"
    code = (
        f"import sys, {modules}; from baton_engine.config.families import BUILT_IN, find_family; "
        f"{families}; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_an_engine_that_cannot_be_exact_is_refused_if_it_was_asked_to_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchRunner, "exact", False)
    with pytest.raises(SettingsError, match="--batch-invariant on: products in float32"):
        small_engine(folder, batch_invariant="on")
    assert small_engine(folder).info.exact == "numeric"


def test_an_exact_engine_has_another_fingerprint_than_others(folder: Path) -> None:
    exact, other = small_engine(folder).info, small_engine(folder, batch_invariant="off").info
    assert (exact.exact, other.exact) == ("bitwise", "numeric")
    assert other.fingerprint != exact.fingerprint
