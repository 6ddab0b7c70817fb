"""Model configs and memory demands of engines, without engines."""

from __future__ import annotations

from typing import Any

from baton_engine.config.model_config import ModelConfig, RopeConfig
from baton_engine.memory.demand import MemoryDemand
from baton_protocol.layout import KVGroup, KVLayout

GIB = 1 << 30
# Qwen3-8B's sizes.
EIGHT_B: dict[str, int] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_layers": 36,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}


def kv_layout(
    *,
    layers: int = 1,
    heads: int = 1,
    dim: int = 2,
    block: int = 4,
    dtype: str = "float32",
    chunk: int = 1,
    shards: int = 1,
    groups: tuple[KVGroup, ...] = (),
) -> KVLayout:
    return KVLayout(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        block_size=block,
        dtype=dtype,
        chunk_blocks=chunk,
        kv_shards=shards,
        groups=groups,
    )


def config_of(*, max_positions: int = 40960, tied: bool = False, **sizes: Any) -> ModelConfig:
    """Qwen3-8B's config with the given changes."""
    chosen: dict[str, Any] = {**EIGHT_B, **sizes}
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        norm_eps=1e-6,
        max_positions=max_positions,
        tied=tied,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        rope=RopeConfig(type="default", theta=1e6),
        eos_ids=(),
        dtype="bfloat16",
        **chosen,
    )


def demand_of(
    config: ModelConfig | None = None,
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    **changes: Any,
) -> MemoryDemand:
    """A demand on CUDA with graphs and steps of 2,048 tokens and 256 sequences; `changes` changes
    its fields."""
    config = config or config_of()
    layout = kv_layout(
        layers=config.num_layers,
        heads=config.num_kv_heads,
        dim=config.head_dim,
        block=block_size,
        dtype=dtype,
    )
    usual: dict[str, Any] = {
        "device": "cuda",
        "kernels": "triton",
        "graphs": True,
        "max_batched_tokens": 2048,
        "max_num_seqs": 256,
    }
    return MemoryDemand(config=config, layout=layout, dtype=dtype, **{**usual, **changes})
