"""The decoder-only skeleton that Llama, Mistral, Qwen2 and Qwen3 share.

In: token ids, positions and the step's attention. Out: hidden states, and logits of chosen rows.
Shapes: T tokens of the step, D hidden size, S rows to sample, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_engine.attention import StepAttention
from baton_engine.config import ModelConfig
from baton_engine.models.layers import Attention, GatedMLP, RMSNorm
from baton_engine.models.rope import Rope
from baton_engine.models.slots import WeightSlots


class DecoderLayer:
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, slots: WeightSlots, layer: int, config: ModelConfig, attention: type[Attention]
    ) -> None:
        name = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.norm_eps
        self._attention_norm = RMSNorm(slots, f"{name}.input_layernorm", size, eps)
        self._attention = attention(slots, f"{name}.self_attn", layer, config)
        self._mlp_norm = RMSNorm(slots, f"{name}.post_attention_layernorm", size, eps)
        self._mlp = GatedMLP(slots, f"{name}.mlp", config)

    def __call__(
        self,
        x_TD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        # In place: x is this step's own residual stream and the norms write elsewhere.
        x_TD += self._attention(self._attention_norm(x_TD), rope, attention)
        x_TD += self._mlp(self._mlp_norm(x_TD))
        return x_TD


class Decoder:
    """Llama. Families override what differs."""

    attention_type: type[Attention] = Attention

    def __init__(self, config: ModelConfig, slots: WeightSlots) -> None:
        self.config = config
        self._embed_VD = slots.tensor(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self._rope = Rope(config.rope, config.head_dim, slots.dtype, slots.device)
        self._layers = [
            DecoderLayer(slots, layer, config, self.attention_type)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(slots, "model.norm", config.hidden_size, config.norm_eps)
        self._head_VD = (
            self._embed_VD
            if config.tied
            else slots.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Hidden states [T, D] before the final norm; writes the tokens' KV."""
        x_TD = F.embedding(tokens_T, self._embed_VD)
        rope = self._rope.tables(positions_T)
        for layer in self._layers:
            x_TD = layer(x_TD, rope, attention)
        return x_TD

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] in float32. Only sampled rows come here: the head is often the largest
        matrix of a small model."""
        return F.linear(self._norm(hidden_SD), self._head_VD).float()
