"""The plan that is made before weights are read: device, pool and lengths, and its errors."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.build import build_torch
from baton_engine.config.engine_config import EngineConfig, SimConfig, TorchSettings
from baton_engine.errors import SettingsError
from baton_engine.memory.demand import Measured, MemoryBudget
from baton_engine.memory.estimate import fixed_bytes, pool_bytes
from baton_engine.runner.plan import EnginePlan, find_device, make_plan, unused_gpus
from baton_engine.sim.build import SimSettings
from tests.support.engines.torch_engines import small_engine

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model whose weights cannot be read: an attempt raises WeightsError."""
    shutil.copy(tiny_model("llama-gqa2-tied") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def plan_of(folder: Path, free: int | None = 64 * GIB, **settings: Any) -> EnginePlan:
    """The plan on a machine with `free` bytes of free memory; None: unknown."""
    return make_plan(TorchSettings(model=folder, **settings), free=lambda: free)


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_device_is_found_by_its_name(name: str, devices: int, expected: str) -> None:
    assert find_device(name, devices) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "devices", "warning"),
    [
        ("cpu", 0, ""),
        ("cpu", 2, ""),
        ("cuda", 1, ""),
        ("cuda:0", 2, ""),  # chosen by its number
        ("cuda:1", 2, ""),
        ("cuda", 2, "sees 2 GPUs and uses one, cuda:0"),
        ("cuda", 8, "sees 8 GPUs and uses one, cuda:0"),
    ],
)
def test_gpus_that_are_not_used_are_named(name: str, devices: int, warning: str) -> None:
    assert warning in unused_gpus(name, devices)
    assert bool(unused_gpus(name, devices)) == bool(warning)


def test_a_node_with_two_gpus_says_at_its_start_that_it_uses_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 8 << 30))
    plan_of(folder, device="cuda", kernels="torch")
    assert "this process sees 2 GPUs and uses one, cuda:0" in caplog.text


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("cuda", 0, "--device cuda: torch finds no CUDA device; use cpu"),
        ("cuda:1", 0, "--device cuda:1: torch finds no CUDA device; use cpu"),
        ("cuda:2", 2, "--device cuda:2: torch finds no such device; use one of cuda:0, cuda:1"),
    ],
)
def test_a_missing_device_is_refused(name: str, devices: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        find_device(name, devices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:"}, "--device cuda: is unknown; use cpu, cuda, cuda:N"),
        ({"device": "cpu:1"}, "--device cpu:1 is unknown"),
        ({"overlap": "yes"}, "--overlap yes is unknown; use auto, on, off"),
        (
            {"gpu_memory_utilization": 0.0},
            "--gpu-memory-utilization is 0.0; it must be at least",
        ),
        ({"gpu_memory_utilization": 1.5}, r"--gpu-memory-utilization is 1\.5"),
        ({"load_format": "gguf"}, "--load-format gguf is unknown; use auto, dummy"),
    ],
)
def test_an_invalid_setting_is_named_in_the_error(
    settings: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_of(folder, **settings)


def test_the_pool_is_one_gib_if_the_machine_has_enough_memory(folder: Path) -> None:
    plan = plan_of(folder)
    assert plan.num_blocks == GIB // plan.layout.block_bytes
    assert plan_of(folder, None).num_blocks == plan.num_blocks


def test_the_pool_fits_in_the_machines_free_memory(folder: Path) -> None:
    plan = plan_of(folder, 300 * MIB)
    assert plan.room == MemoryBudget(total=300 * MIB, share=0.9)
    used = fixed_bytes(plan.demand, plan.max_model_len) + pool_bytes(plan.demand, plan.num_blocks)
    assert 0.9 * plan.room.limit < used <= plan.room.limit
    with_host_tier = plan_of(folder, 300 * MIB, host_kv_memory=100 * MIB)
    tier_blocks = 100 * MIB // plan.layout.block_bytes
    assert plan.num_blocks - with_host_tier.num_blocks in (tier_blocks, tier_blocks + 1)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(folder: Path) -> None:
    with pytest.raises(SettingsError, match="the model does not fit: weights") as error:
        build_torch(TorchSettings(model=folder), free=lambda: 20 * MIB)
    assert "\n" not in str(error.value)
    assert "GiB of free memory" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": 500 * GIB}, r"--kv-memory does not fit: .* = 500\.1 GiB"),
        ({"kv_blocks": 1 << 26}, r"--kv-blocks does not fit: .* \+ --kv-blocks "),
        ({"host_kv_memory": 500 * GIB}, r"--host-kv-memory 500\.00 GiB cannot fit: 20\.00 GiB"),
        ({"kv_blocks": 10, "max_batched_tokens": 1 << 26}, "the model does not fit: .*activations"),
        ({"kv_blocks": 10, "max_num_seqs": 1 << 28}, "the model does not fit: .*activations"),
    ],
)
def test_a_size_that_the_machine_cannot_hold_is_refused_without_overcommit(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        plan_of(folder, 20 * GIB, **settings)
    assert "--overcommit" in str(error.value)
    assert "\n" not in str(error.value)
    plan = plan_of(folder, 20 * GIB, **settings, overcommit=True)
    if "kv_memory" in settings:
        assert plan.num_blocks == 500 * GIB // plan.layout.block_bytes
    plan_of(folder, None, **settings)


def test_a_pool_with_an_explicit_size_may_take_all_free_memory(folder: Path) -> None:
    plan = plan_of(folder, 20 * GIB, kv_memory=int(19.5 * GIB))
    assert plan.num_blocks == int(19.5 * GIB) // plan.layout.block_bytes


def test_with_little_memory_the_maximum_sequence_length_is_shorter(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 24
    (folder / "config.json").write_text(json.dumps(config))
    plan = plan_of(folder, 2 * GIB, dtype="bfloat16", max_num_seqs=1, max_batched_tokens=1)
    assert plan.room is not None
    assert 256 < plan.max_model_len <= plan.num_blocks * plan.layout.block_size
    longest = fixed_bytes(plan.demand, plan.max_model_len)
    assert longest + pool_bytes(plan.demand, plan.num_blocks) <= plan.room.limit


@pytest.mark.parametrize(("overlap", "expected"), [("auto", False), ("on", True), ("off", False)])
def test_steps_overlap_on_a_cpu_only_with_overlap_on(
    overlap: str, expected: bool, tiny_model: Callable[[str], Path]
) -> None:
    assert small_engine(tiny_model("llama-gqa1"), overlap=overlap).overlap is expected


def on_a_gpu(plan: EnginePlan, *, max_model_len: int | None = None) -> EnginePlan:
    """The plan as it would be on an idle GPU with 1 GiB of memory."""
    demand = replace(plan.demand, device="cuda", max_model_len=max_model_len)
    return replace(plan, demand=demand, room=MemoryBudget(total=GIB, share=0.9))


def test_the_pool_on_a_gpu_is_sized_from_the_measured_memory(folder: Path) -> None:
    plan = on_a_gpu(plan_of(folder))
    assert plan.room is not None
    measured = plan.measured(Measured(resident=100 * MIB, step=50 * MIB))
    used = fixed_bytes(measured.demand, measured.max_model_len)
    assert used == 150 * MIB + (384 << 20)
    free = plan.room.limit - used - pool_bytes(measured.demand, measured.num_blocks)
    assert 0 <= free < plan.layout.block_bytes
    assert "KV pool of 0.38 GiB: 0.9 that may be used - weights 0.098" in measured.pool_text()


def test_measured_memory_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"weights 0\.098 \+ activations 0\.49 .* a card with 2 "
    ):
        on_a_gpu(plan_of(folder)).measured(Measured(resident=100 * MIB, step=500 * MIB))


def test_the_startup_log_line_states_the_pool_the_lengths_and_the_overlap(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton_engine")
    small_engine(tiny_model("llama-gqa1"), overlap="on")
    [line] = [each.getMessage() for each in caplog.records if "is ready" in each.getMessage()]
    assert "200 KV blocks of 16 tokens, sequences of up to 1024" in line
    assert line.endswith("by --kv-blocks; overlap on, no graphs, exact: bitwise")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_an_engine_on_a_gpu_uses_the_configured_share_of_memory(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton_engine")
    engine = build_torch(
        TorchSettings(
            model=tiny_model("llama-gqa1"),
            device="cuda",
            dtype="bfloat16",
            gpu_memory_utilization=0.5,
            max_num_seqs=20,
        )
    )
    free, total = torch.cuda.mem_get_info()
    assert 0.4 * total < total - free <= 0.51 * total
    assert engine.overlap
    assert any("captured 15 batch sizes (276 ... 1)" in each for each in caplog.messages)


def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({}, True),
        ({"batch_invariant": "off"}, False),
        ({"kernels": "triton"}, False),  # in the interpreter, for tests
        ({"batch_invariant": "on", "kernels": "triton"}, True),
        ({"device": "cuda"}, False),  # auto: its cost on a GPU is not measured
        ({"device": "cuda", "batch_invariant": "on"}, True),
    ],
)
def test_batch_invariance_is_on_by_default_on_a_cpu_only(
    settings: dict[str, Any], exact: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with_a_gpu(monkeypatch)
    assert plan_of(folder, dtype="float32", **settings).exact == exact


@pytest.mark.parametrize(
    ("gib", "asked", "tokens"), [(24, None, 2048), (80, None, 8192), (80, 9, 9)]
)
def test_the_default_tokens_of_a_step_depend_on_the_card(
    gib: int, asked: int | None, tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_gpu(monkeypatch)
    memory = (gib - 1) * GIB, gib * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
    plan = plan_of(folder, device="cuda", kernels="torch", max_batched_tokens=asked)
    assert plan.demand.max_batched_tokens == tokens


def test_batch_invariance_with_torchs_kernels_is_refused_with_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_gpu(monkeypatch)
    with pytest.raises(SettingsError, match="--batch-invariant on needs --kernels triton on cuda"):
        plan_of(folder, device="cuda", kernels="torch", batch_invariant="on")


@pytest.mark.parametrize(
    ("options", "tokens", "seqs", "longest"),
    [
        ({}, 256, 256, 512),
        ({"performance_mode": "throughput"}, 512, 512, 512),
        ({"performance_mode": "interactivity"}, 128, 128, 512),
        (
            {"performance_mode": "throughput", "max_num_seqs": 9, "max_batched_tokens": 300},
            *(300, 9, 512),
        ),
        ({"enable_chunked_prefill": False}, 256, 256, 256),
        ({"enable_chunked_prefill": False, "max_model_len": 400}, 400, 256, 400),
        ({"enable_chunked_prefill": False, "max_batched_tokens": 64}, 64, 256, 64),
    ],
)
def test_options_set_the_sizes_of_a_step(
    options: dict[str, Any], tokens: int, seqs: int, longest: int, folder: Path
) -> None:
    plan = plan_of(folder, kv_blocks=32, dtype="float32", **options)
    assert (plan.demand.max_batched_tokens, plan.demand.max_num_seqs) == (tokens, seqs)
    assert plan.max_model_len == longest
    sim = SimSettings.of(EngineConfig(**options), SimConfig(), model="m")
    assert (sim.max_batched_tokens, sim.max_num_seqs) == (tokens, seqs)
    assert sim.max_model_len == (8192 if options.get("enable_chunked_prefill", True) else longest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_chunked_prefill": False, "max_batched_tokens": 64, "max_model_len": 65},
            "--max-batched-tokens 64 is less than --max-model-len 65, and --no-enable-chunked-pre",
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 9},
            "--long-prefill-token-threshold 9 cuts prompts, and --no-enable-chunked-prefill",
        ),
        ({"max_long_partial_prefills": 2}, "2 needs --long-prefill-token-threshold"),
        (
            {
                "long_prefill_token_threshold": 9,
                "max_long_partial_prefills": 2,
                "max_num_partial_prefills": 1,
            },
            "--max-long-partial-prefills 2 is more than --max-num-partial-prefills 1",
        ),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy lifo is unknown; use fcfs, priority"),
        ({"performance_mode": "fast"}, "--performance-mode fast is unknown; use balanced"),
        ({"scheduler_cls": "os:path"}, "--scheduler-cls os:path is no subclass"),
        ({"max_num_partial_prefills": 0}, "--max-num-partial-prefills is 0; it must be at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_named(
    options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_of(folder, kv_blocks=32, dtype="float32", **options)
