"""What the CPU benchmark asks of every side, and the random model that it asks.

In: a seed. Out: prompts and how many tokens to generate; a folder in Qwen3's or Qwen3-MoE's shape.
Random ids and no end of text, so that all sides compute the same number of tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# The first whose standard prompts have 3,013 tokens in all, as those that the rivals were first
# measured with.
SEED = 1850
VOCAB = 8192
SHARED_TOKENS = 1000


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    new_tokens: int
    shared: int = 0  # first tokens that all prompts have in common

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.new_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV must be computed if what is shared is computed once."""
        own = sum(len(prompt) - self.shared for prompt in self.prompts)
        return self.shared + own + len(self.prompts) * (self.new_tokens - 1)

    def shortened(self, prompt_tokens: int, new_tokens: int) -> Workload:
        return Workload([prompt[:prompt_tokens] for prompt in self.prompts], new_tokens)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(count)]


def standard(draw: random.Random) -> Workload:
    """16 prompts of 64 to 256 ids, 64 new tokens each."""
    lengths = [draw.randint(64, 256) for _ in range(16)]
    return Workload([_ids(draw, length) for length in lengths], 64)


def decode_heavy(draw: random.Random) -> Workload:
    """32 prompts of 32 ids, 256 new tokens each."""
    return Workload([_ids(draw, 32) for _ in range(32)], 256)


def shared_prefix(draw: random.Random) -> Workload:
    """16 prompts of 64 ids behind 1,000 that all share, 64 new tokens each."""
    shared = _ids(draw, SHARED_TOKENS)
    return Workload([[*shared, *_ids(draw, 64)] for _ in range(16)], 64, SHARED_TOKENS)


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "standard": standard,
    "decode-heavy": decode_heavy,
    "shared-prefix": shared_prefix,
}


@dataclass(frozen=True)
class Shape:
    """`experts` is their number per layer; 0 makes an MLP without experts. A token takes `chosen`,
    and `mlp` is the size of one."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    chosen: int = 1

    @property
    def layer_weights(self) -> int:
        """Weights that every token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + router + 3 * self.hidden * self.mlp * self.chosen)

    def operations(self, work: Workload) -> float:
        """Of the matrix products alone: two per weight and token, the head for tokens that come
        out."""
        return 2.0 * (
            self.layer_weights * work.computed_tokens + self.hidden * VOCAB * work.output_tokens
        )

    def config(self) -> dict[str, Any]:
        """What config.json has."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        if self.experts:
            config |= {
                "moe_intermediate_size": self.mlp,
                "num_experts": self.experts,
                "num_experts_per_tok": self.chosen,
                "norm_topk_prob": True,
            }
        return config


# Each token is multiplied with 116M parameters, of which the mixture has 711M in all.
MID = Shape(hidden=768, layers=16, mlp=2304, heads=12, kv_heads=4, head_dim=64)
MID_MIXTURE = replace(MID, mlp=576, experts=32, chosen=4)
TINY = Shape(hidden=256, layers=4, mlp=768, heads=8, kv_heads=2, head_dim=32)
TINY_MIXTURE = replace(TINY, mlp=192, experts=8, chosen=4)
# The shape that a benchmark takes, and its tiny form for --quick.
SHAPES = {"dense": (MID, TINY), "mixture": (MID_MIXTURE, TINY_MIXTURE)}


def write_config(folder: Path, shape: Shape, quantization: Mapping[str, Any] | None = None) -> None:
    """What an engine needs to draw weights of this shape itself."""
    config = shape.config()
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def save_model(folder: Path, shape: Shape) -> int:
    """Write the random model, in fp32; how many of its parameters compute a token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config(), eos_token_id=None)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.08, generator=noise)
    model.save_pretrained(folder)
    return shape.layer_weights + VOCAB * shape.hidden
