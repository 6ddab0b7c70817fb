"""From settings and a model's config to an engine's memory requirements; imports no torch.

In: TorchSettings, the config, the device and the kernels. Out: the layout of the KV, and a
MemoryDemand, whose bytes `estimate` counts.
"""

from __future__ import annotations

import msgspec

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.model_config import ModelConfig, compute_dtype
from baton_engine.errors import SettingsError
from baton_engine.memory.demand import MemoryDemand
from baton_protocol.layout import LATENT, KVField, KVGroup, KVLayout, default_chunk_blocks

# Default size of the pool on a CPU, where other processes share the memory.
CPU_KV_BYTES = 1 << 30
# Share of the free memory that an engine on a CPU may use; the rest is for other processes.
CPU_SHARE = 0.9
# Default tokens per step. On a CPU, bf16 computes 512 in the time of 256 in fp32. On a GPU, the
# launches of a step that is not recorded take 4 to 5 ms, in which a large card computes 2,000
# tokens of a small model, so a large card gets longer steps. An A100 with "40 GB" has 42 * 10^9
# bytes.
BATCHED_TOKENS_CPU = {"float32": 256, "bfloat16": 512}
# A step of a mixture reads the weights of all its experts, and each computes only some tokens. With
# 32 experts of which a token takes 4, twice the tokens per step computed prompts 1.1 times as fast.
MIXTURE_STEPS_CPU = 2
BATCHED_TOKENS_CUDA = 2048
BATCHED_TOKENS_LARGE_CARD = 8192
LARGE_CARD_BYTES = 40 * 10**9
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
    return MemoryDemand(
        config=config,
        layout=layout,
        dtype=dtype,
        device=device,
        kernels=kernels,
        # transformers' code may ask the device for a number, which no graph can record.
        graphs=device == "cuda"
        and kernels == "triton"
        and not settings.enforce_eager
        and config.bridge is None,
        max_batched_tokens=settings.max_batched_tokens
        or batched_tokens(dtype, card, experts=config.experts is not None),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=wanted,
        kv_memory=settings.kv_memory,
        kv_blocks=settings.kv_blocks,
        stored_splits=settings.batch_invariant == "on" and kernels == "triton",
    )


def batched_tokens(dtype: str, card: int | None, *, experts: bool = False) -> int:
    """The default of --max-batched-tokens on a GPU with `card` bytes of memory; None: on a CPU."""
    if card is None:
        return BATCHED_TOKENS_CPU[dtype] * (MIXTURE_STEPS_CPU if experts else 1)
    return BATCHED_TOKENS_LARGE_CARD if card >= LARGE_CARD_BYTES else BATCHED_TOKENS_CUDA


def groups_of(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of layers that share blocks; () if no layer has a window.

    Layers with the same window form a group. All groups' blocks have the size of the largest group,
    so a set of layers that is larger than another one is split: all groups get the same number of
    layers, the largest with which at most PADDED_SHARE of the blocks' bytes are unused. Examples:
    13 layers of each kind make 2 groups of 13; 4 layers without and 22 with a window make 7 groups
    of at most 4.
    """
    windows = config.windows or (None,) * config.num_layers
    if not any(windows):
        return ()
    sets: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        sets.setdefault(window, []).append(layer)
    ordered = sorted(sets.items(), key=lambda item: item[0] or 0)  # those without a window first
    longest = max(map(len, sets.values()))
    for size in range(longest, 0, -1):
        slots = sum(-(-len(layers) // size) * size for layers in sets.values())
        if slots - len(windows) <= PADDED_SHARE * slots:
            break
    return tuple(
        KVGroup(tuple(layers[begin : begin + size]), window)
        for window, layers in ordered
        for begin in range(0, len(layers), size)
    )


def layout_of(settings: TorchSettings, config: ModelConfig) -> KVLayout:
    """The layout of the engine's KV. Raises SettingsError if --kv-shards does not divide the
    model's KV heads."""
    fields = config.kv_fields(compute_dtype(config, settings.dtype))
    layout = KVLayout.of_fields(
        fields,
        num_layers=config.num_layers,
        block_size=settings.block_size,
        chunk_blocks=settings.chunk_blocks or 1,
        kv_shards=settings.kv_shards,
        groups=groups_of(config),
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
