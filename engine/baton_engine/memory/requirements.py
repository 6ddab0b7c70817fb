"""From settings and a model's config to an engine's memory requirements; imports no torch.

In: TorchSettings, the config, the device and the kernels. Out: the layout of the KV, and a
MemoryDemand, whose bytes `estimate` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from baton_engine.config.batch_limits import BatchLimits, batch_limits
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.model_config import ModelConfig, compute_dtype
from baton_engine.config.quantization.kv_cache import CODES_OF
from baton_engine.errors import SettingsError
from baton_engine.memory.demand import MemoryDemand
from baton_protocol.layout import LATENT, KVField, KVGroup, KVLayout, default_chunk_blocks
from baton_protocol.policies import KVCacheDType

# Default size of the pool on a CPU, where other processes share the memory.
CPU_KV_BYTES = 1 << 30
# Share of the free memory that an engine on a CPU may use; the rest is for other processes.
CPU_SHARE = 0.9
# Default tokens per step. On a CPU, bf16 computes 512 in the time of 256 in fp32. On a GPU, the
# launches of a step that is not recorded take 4 to 5 ms, in which a large card computes 2,000
# tokens of a small model, so a large card gets longer steps. An A100 with "40 GB" has 42 * 10^9
# bytes.
BATCHED_TOKENS_CPU = {"float32": 256, "bfloat16": 512, "float16": 512}
BATCHED_TOKENS_CUDA = 2048
BATCHED_TOKENS_LARGE_CARD = 8192
LARGE_CARD_BYTES = 40 * 10**9
# What an encoder keeps of a token. It has no KV, but sequences have blocks all the same: one byte.
NO_KV = KVField("none", 1, 1, "uint8")
# Share of a block's bytes that may be unused because groups of layers differ in size.
PADDED_SHARE = 0.1


def demand_of(
    settings: TorchSettings,
    config: ModelConfig,
    layout: KVLayout,
    *,
    kernels: str,
    card: int | None,
) -> MemoryDemand:
    """`kernels` is "torch" or "triton"; `card` is the GPU's memory in bytes, None on a CPU. Raises
    SettingsError if --max-model-len exceeds the model's max_position_embeddings."""
    device = "cpu" if card is None else "cuda"
    wanted = settings.max_model_len
    if wanted is not None and wanted > config.max_positions:
        raise SettingsError(
            f"--max-model-len {wanted} exceeds the model's max_position_embeddings "
            f"{config.max_positions}"
        )
    dtype = compute_dtype(config, settings.dtype)
    whole = None
    if config.encodes:
        whole = config.max_positions if wanted is None else wanted
    limits = batch_limits(settings, batched_tokens(dtype, card), whole=whole)
    return MemoryDemand(
        config=config,
        layout=layout,
        dtype=dtype,
        device=device,
        kernels=kernels,
        # transformers' code may ask the device for a number, which no graph can record. Prompts,
        # which are all that a pooling model computes, need no graphs.
        graphs=device == "cuda"
        and kernels == "triton"
        and not settings.enforce_eager
        and config.bridge is None
        and not config.pooling,
        max_batched_tokens=limits.tokens,
        max_num_seqs=limits.seqs,
        # An encoder's step has whole prompts, so the longest decides about memory.
        max_model_len=min(whole, limits.tokens) if whole is not None else wanted,
        longest=limits.longest,
        kv_memory=None if config.encodes else settings.kv_memory,
        kv_blocks=_blocks_of_steps(limits, layout) if config.encodes else settings.kv_blocks,
        stored_splits=settings.batch_invariant == "on" and kernels == "triton",
    )


def _blocks_of_steps(limits: BatchLimits, layout: KVLayout) -> int:
    """Blocks for the prompts of two steps, of which one may be in flight. Those that wait have
    none."""
    return 2 * (limits.tokens // layout.block_size + limits.seqs)


def batched_tokens(dtype: str, card: int | None) -> int:
    """The default of --max-batched-tokens on a GPU with `card` bytes of memory; None: on a CPU."""
    if card is None:
        return BATCHED_TOKENS_CPU[dtype]
    return BATCHED_TOKENS_LARGE_CARD if card >= LARGE_CARD_BYTES else BATCHED_TOKENS_CUDA


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers must have in common to share blocks. `token_bytes` are those of a token in one
    layer."""

    window: int | None
    fields: tuple[KVField, ...]

    @property
    def token_bytes(self) -> int:
        return sum(field.token_bytes for field in self.fields)


def groups_of(config: ModelConfig, dtype: str) -> tuple[KVGroup, ...]:
    """The groups of layers that share blocks, if KV is kept in this dtype; () if all layers keep
    the same and none has a window.

    Layers with the same window and the same fields form a group. All groups' blocks have the size
    of the largest group, so a set of layers that is larger than another one is split: each group
    gets as many layers as fit into the largest size with which at most PADDED_SHARE of the blocks'
    bytes are unused, or else into the size with which the fewest are. Examples: 13 layers of each
    kind make 2 groups of 13; 4 layers without and 22 with a window make 7 groups of at most 4; 2
    layers with 3 KV heads and 12 with one make 3 groups of 2, 6 and 6.
    """
    fields = config.kv_fields(dtype)
    windows = config.windows or (None,) * config.num_layers
    kinds: dict[LayerKind, list[int]] = {}
    for layer, (window, kept) in enumerate(zip(windows, fields, strict=True)):
        kinds.setdefault(LayerKind(window, kept), []).append(layer)
    if len(kinds) == 1 and not any(windows):
        return ()
    size = _block_size({kind: len(layers) for kind, layers in kinds.items()})
    ordered = sorted(kinds.items(), key=lambda item: item[0].window or 0)  # without a window first
    return tuple(
        KVGroup(
            tuple(layers[begin : begin + size // kind.token_bytes]),
            kind.window,
            UNSET if kind.fields == fields[0] else kind.fields,
        )
        for kind, layers in ordered
        for begin in range(0, len(layers), size // kind.token_bytes)
    )


def _block_size(counts: Mapping[LayerKind, int]) -> int:
    """The bytes of a token in a block of each group; see groups_of()."""
    total = sum(count * kind.token_bytes for kind, count in counts.items())
    least = max(kind.token_bytes for kind in counts)
    sizes = {
        layers * kind.token_bytes
        for kind, count in counts.items()
        for layers in range(1, count + 1)
    }
    taken = {}
    for size in sorted((size for size in sizes if size >= least), reverse=True):
        groups = sum(-(-count // (size // kind.token_bytes)) for kind, count in counts.items())
        taken[size] = groups * size
        if taken[size] - total <= PADDED_SHARE * taken[size]:
            return size
    return min(taken, key=lambda size: taken[size])


def kv_cache_dtype(settings: TorchSettings, config: ModelConfig) -> KVCacheDType:
    """The value of --kv-cache-dtype. auto is what the checkpoint is made for; with --store-codec,
    which is for KV in the compute dtype, it stays auto. Raises SettingsError for another dtype than
    that of computation."""
    chosen, computed = settings.kv_cache_dtype, compute_dtype(config, settings.dtype)
    if chosen not in ("auto", computed, *CODES_OF):
        raise SettingsError(
            f"--kv-cache-dtype {chosen}: this engine computes in {computed}, and keeps K and V in"
            f" that or in 8 bits; use auto, {computed}, {', '.join(CODES_OF)}, or another --dtype"
        )
    if chosen != "auto" or settings.store_codec != "none" or config.quantization is None:
        return chosen
    return config.quantization.kv_cache


def layout_of(settings: TorchSettings, config: ModelConfig) -> KVLayout:
    """The layout of the engine's KV; of an encoder, that of its blocks. Raises SettingsError if
    --kv-shards does not divide the model's KV heads."""
    if config.encodes:
        size = settings.block_size
        return KVLayout.of_fields((NO_KV,), num_layers=1, block_size=size, chunk_blocks=1)
    kept = CODES_OF.get(kv_cache_dtype(settings, config))
    dtype = kept or compute_dtype(config, settings.dtype)
    layout = KVLayout.of_fields(
        config.kv_fields(dtype)[0],
        num_layers=config.num_layers,
        block_size=settings.block_size,
        chunk_blocks=settings.chunk_blocks or 1,
        kv_shards=settings.kv_shards,
        codec=settings.store_codec,
        groups=groups_of(config, dtype),
    )
    if layout.undivided is not None:
        raise _undivided(layout.undivided, settings.kv_shards)
    if settings.chunk_blocks is not None:
        return layout
    chunk_blocks = default_chunk_blocks(layout.chunk_bytes, layout.kv_shards)
    return msgspec.structs.replace(layout, chunk_blocks=chunk_blocks)


def _undivided(field: KVField, shards: int) -> SettingsError:
    able = [str(each) for each in range(1, field.heads + 1) if field.heads % each == 0]
    what = f"{field.heads} KV heads"
    if field.name == LATENT:
        what = "latent rows, which all heads share"
    return SettingsError(
        f"--kv-shards {shards} does not divide the model's {what}; use one of {', '.join(able)}"
    )
