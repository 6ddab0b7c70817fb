"""Puts a torch engine together: settings and a model folder in, an EngineCore out.

Everything that can be wrong is found, in one line, before the weights are read: the folder, the
architecture, the device, the memory for one sequence of max_model_len.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

import msgspec
import torch

from baton_engine.api import EngineInfo
from baton_engine.config import ModelConfig, compute_dtype, read_config
from baton_engine.core import EngineCore
from baton_engine.digest import tensor_digests
from baton_engine.dummy_weights import count_weights, dummy_digests, fill_slots
from baton_engine.errors import SettingsError
from baton_engine.host_tier import CopiedBlocks, HostMemory, slots_for
from baton_engine.kernels.choice import Kernels, attention_for, choose_kernels
from baton_engine.kernels.ops import ops_for
from baton_engine.loader import load_weights
from baton_engine.models.registry import build_model
from baton_engine.models.slots import WeightSlots
from baton_engine.torch_memory import TORCH_DTYPES, PinnedBlocks, TorchMemory
from baton_engine.torch_runner import TorchRunner
from baton_engine.torch_settings import TorchSettings
from baton_engine.weight_files import weight_files
from baton_protocol.fingerprint import fingerprint
from baton_protocol.layout import ITEM_BYTES, KVLayout, default_chunk_blocks

CPU_KV_BYTES = 1 << 30
# Of what the weights leave free on a GPU; the rest is for activations and the allocator's slack.
CUDA_KV_SHARE = 0.85
BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
# On a CPU torch and oneDNN each keep compiled products, one per shape, 1,024 by default: 0.4 MB
# apiece that no setting of ours counts. Prompts of all lengths took a small engine from 640 to
# 1,081 MB; with 256 of both it stays below 700. Read at the first product.
PRODUCT_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
PRODUCTS_KEPT = "256"

logger = logging.getLogger(__name__)


def build_torch(settings: TorchSettings) -> EngineCore:
    """Raise SettingsError or ModelError, one line each, for what a user can correct."""
    started = time.monotonic()
    plan = _plan(settings)
    config, layout = plan.config, plan.layout
    if settings.load_format == "dummy":
        digests = dummy_digests(config)
    else:
        digests = tensor_digests(settings.model, config, threads=plan.threads)
    info = EngineInfo(
        kind="torch",
        model=settings.name or settings.model.resolve().name,
        fingerprint=fingerprint(digests, layout, config.canonical()),
        layout=layout,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_batched_tokens=settings.max_batched_tokens or BATCHED_TOKENS[plan.device.type],
        max_num_seqs=settings.max_num_seqs,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
    )
    runner = _load_runner(settings, plan)
    engine = EngineCore(info, runner, _host_memory(runner.memory, plan))
    logger.info(
        "%s (%s, %s, %s) is ready after %.1f s; %d KV blocks of %d tokens",
        *(info.model, config.architecture, layout.dtype, plan.device, time.monotonic() - started),
        *(info.num_blocks, layout.block_size),
    )
    return engine


def _host_memory(memory: TorchMemory, plan: _Plan) -> HostMemory | None:
    if not plan.host_slots:
        return None
    room = PinnedBlocks if plan.device.type == "cuda" else CopiedBlocks
    return room(memory, plan.host_slots)


def build_runner(settings: TorchSettings) -> TorchRunner:
    """The runner alone, for tests and benchmarks of single steps."""
    return _load_runner(settings, _plan(settings))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything decided from settings, model and machine before weights are read."""

    config: ModelConfig
    layout: KVLayout
    device: torch.device
    num_blocks: int
    host_slots: int
    max_model_len: int
    threads: int
    kernels: Kernels


def _plan(settings: TorchSettings) -> _Plan:
    settings.check()
    config = read_config(settings.model)
    if settings.load_format != "dummy":
        weight_files(settings.model)
    device = _device(settings)
    layout = _layout(settings, config, compute_dtype(config, settings.dtype))
    num_blocks = _num_blocks(settings, config, layout, device)
    host_slots = slots_for(settings.host_kv_memory, layout)
    max_model_len = _max_model_len(settings, config, num_blocks * layout.block_size)
    threads = settings.threads or len(os.sched_getaffinity(0))
    kernels = choose_kernels(settings.kernels, device, layout.dtype)
    return _Plan(config, layout, device, num_blocks, host_slots, max_model_len, threads, kernels)


def _load_runner(settings: TorchSettings, plan: _Plan) -> TorchRunner:
    torch.set_num_threads(plan.threads)
    for cache in PRODUCT_CACHES:
        os.environ.setdefault(cache, PRODUCTS_KEPT)
    ops = ops_for(plan.kernels)
    slots = WeightSlots(TORCH_DTYPES[plan.layout.dtype], plan.device, ops)
    model = build_model(plan.config, slots)
    if settings.load_format == "dummy":
        fill_slots(slots)
    else:
        load_weights(settings.model, plan.config, slots)
    slots.finish()
    memory = TorchMemory(plan.layout, plan.num_blocks, plan.device)
    return TorchRunner(model, memory, attention_for(plan.kernels, memory, plan.config))


def _device(settings: TorchSettings) -> torch.device:
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"--device {settings.device}: torch finds no CUDA device; use cpu")
    return device


def _layout(settings: TorchSettings, config: ModelConfig, dtype: str) -> KVLayout:
    shards, heads = settings.kv_shards, config.num_kv_heads
    if heads % shards:
        able = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise SettingsError(
            f"--kv-shards {shards} does not divide the model's {heads} KV heads; use one of {able}"
        )
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=dtype,
        chunk_blocks=settings.chunk_blocks or 1,
        kv_shards=shards,
    )
    if settings.chunk_blocks is not None:
        return layout
    chunk_blocks = default_chunk_blocks(layout.block_bytes, layout.kv_shards)
    return msgspec.structs.replace(layout, chunk_blocks=chunk_blocks)


def _num_blocks(
    settings: TorchSettings, config: ModelConfig, layout: KVLayout, device: torch.device
) -> int:
    if settings.kv_blocks is not None:
        return settings.kv_blocks
    if settings.kv_memory is not None:
        available = settings.kv_memory
    elif device.type == "cpu":
        available = CPU_KV_BYTES
    else:
        free, _ = torch.cuda.mem_get_info(device)
        available = int((free - _weight_bytes(settings, config, layout)) * CUDA_KV_SHARE)
    if available < layout.block_bytes:
        raise SettingsError(
            f"{available} bytes of KV memory hold no block of {layout.block_bytes} bytes; "
            "raise --kv-memory"
        )
    return available // layout.block_bytes


def _weight_bytes(settings: TorchSettings, config: ModelConfig, layout: KVLayout) -> int:
    """Bytes of the weights in the compute dtype, which is the cache's."""
    if settings.load_format == "dummy":
        return count_weights(config) * ITEM_BYTES[layout.dtype]
    on_disk = sum(path.stat().st_size for path in weight_files(settings.model))
    return on_disk * ITEM_BYTES[layout.dtype] // ITEM_BYTES[config.dtype]


def _max_model_len(settings: TorchSettings, config: ModelConfig, room: int) -> int:
    """At most what the model was made for, and what the whole pool can hold."""
    wanted = settings.max_model_len
    if wanted is None:
        return min(config.max_positions, room)
    if wanted > config.max_positions:
        raise SettingsError(
            f"--max-model-len {wanted} exceeds the model's max_position_embeddings "
            f"{config.max_positions}"
        )
    if wanted > room:
        raise SettingsError(
            f"--max-model-len {wanted} does not fit the KV pool of {room} tokens; "
            "raise --kv-memory or --kv-blocks, or lower --max-model-len"
        )
    return wanted
