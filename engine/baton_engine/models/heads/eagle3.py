"""EAGLE-3: one layer over a token's embedding and a mix of three of the target's hidden states.

Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test". The head may have a vocabulary of its own, of the target's most frequent ids: id i of it is
id i + d2t[i] of the target.

Shapes: see `models.heads.head`; Z the outputs of q, k and v together, W vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.attention.interface import StepAttention
from baton_engine.config.head_config import HeadConfig
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.decoder_layers import Attention, Linear, RMSNorm
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.linear_method import HEAD
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import Rope, RopeTables
from baton_engine.models.decoder import Decoder, DecoderLayer
from baton_engine.models.heads.projection import Projection


class WideAttention(Attention):
    """Attention whose input is the embedding and the state, one after the other."""

    def make_qkv(self, slots: WeightSlots, name: str, config: ModelConfig) -> Linear:
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        return Linear(slots, names, [n * h, k * h, k * h], 2 * config.hidden_size, config.qkv_bias)


class Eagle3Layer(DecoderLayer):
    attention_type = WideAttention

    def make_norms(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        super().make_norms(slots, name, config)
        self._state_norm = RMSNorm(
            slots, f"{name}.hidden_norm", config.hidden_size, config.norm_eps
        )

    def mixed(
        self,
        embedded_TD: torch.Tensor,
        states_TD: torch.Tensor,
        rope: RopeTables,
        attention: StepAttention,
        *,
        add_to_norm: bool,
    ) -> torch.Tensor:
        """The state and the layer's outputs, added up; or with `add_to_norm` the normed state."""
        normed_TD = self._state_norm(states_TD)
        x_TD = normed_TD.clone() if add_to_norm else states_TD.clone()
        wide_TE = torch.cat((self._attention_norm(embedded_TD), normed_TD), 1)
        delta_TD = self._attention(wide_TE, rope, attention)
        return x_TD.add_(self._mlp(self._mlp_norm(x_TD, delta_TD)))


class Eagle3:
    def __init__(
        self, head: HeadConfig, slots: WeightSlots, target: Decoder, *, own_embedding: bool
    ) -> None:
        """With `own_embedding`, the checkpoint has one; else the target's is used."""
        config, size = head.layer, head.layer.hidden_size
        self._target = target
        self._from = slice(head.target_size, None)
        self._add_to_norm = head.norm_before_residual
        self._embed: Callable[[torch.Tensor], torch.Tensor] = (
            Embedding(slots, "embed_tokens", config.vocab_size, size)
            if own_embedding
            else target.embed
        )
        self._rope = Rope(config.rope, config.rope_dim, slots.dtype, slots.device)
        self._join = Projection(slots, "fc", size, 3 * head.target_size)
        self._layer = Eagle3Layer(slots, 0, config, head.name)
        self._norm = RMSNorm(slots, "norm", size, config.norm_eps)
        self._vocab = config.vocab_size
        weight_WD = slots.tensor(f"{HEAD}.weight", head.vocab_size, size)
        offsets_W = slots.tensor("d2t", head.vocab_size, dtype=torch.int64, default=0)
        self._product: Product
        self._ids_W: torch.Tensor | None = None

        def pack() -> None:
            self._product = slots.product(HEAD, weight_WD)
            ids_W = offsets_W + torch.arange(len(offsets_W), device=offsets_W.device)
            if int(ids_W.min()) < 0 or int(ids_W.max()) >= self._vocab:
                raise WeightsError(
                    f"d2t of {head.folder} gives ids from {int(ids_W.min())} to {int(ids_W.max())},"
                    f" and the vocabulary has {self._vocab}"
                )
            if len(ids_W) < self._vocab or offsets_W.any():
                self._ids_W = ids_W

        slots.when_filled(pack)

    def states(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        return self._join(hidden_TC[:, self._from].contiguous())

    def forward(
        self,
        states_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        rope = self._rope.tables(positions_T)
        return self._layer.mixed(
            self._embed(tokens_T), states_TD, rope, attention, add_to_norm=self._add_to_norm
        )

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Ids that the head never drafts have -inf."""
        logits_SW = self._product(self._norm(hidden_SD))
        if self._ids_W is None:
            return logits_SW
        logits_SV = logits_SW.new_full((len(logits_SW), self._vocab), -torch.inf)
        return logits_SV.index_copy_(1, self._ids_W, logits_SW)
