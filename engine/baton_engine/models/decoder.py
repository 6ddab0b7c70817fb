"""The decoder-only model that all families share.

In: token ids, positions and the step's attention. Out: hidden states, and logits of selected rows.
Shapes: T tokens of the step, D hidden size, C numbers that are returned of a token (D, or more if
hidden states of some layers are kept), S rows to sample, V vocabulary, N numbers of a pooling
model's answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Attention, GatedMLP, RMSNorm
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.latent_attention import LatentAttention
from baton_engine.layers.linear_method import HEAD
from baton_engine.layers.linear_weights import LinearWeights
from baton_engine.layers.moe import MoE
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.online import quantized
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.rotary import Rope, RopeTables

# The beginning of the decoder's tensors in checkpoints, and the layer of a classifier's scores.
INNER, SCORE = "model.", "score"


class DecoderLayer:
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    The output of attention or MLP is added to x by the next norm: one pass over x instead of two.
    Families override the types of the parts, and the methods `make_...`.
    """

    attention_type: type[Attention] | type[LatentAttention] = Attention
    mlp_type: type[GatedMLP] = GatedMLP
    moe_type: type[MoE] = MoE

    def __init__(
        self, slots: WeightSlots, layer: int, config: ModelConfig, name: str | None = None
    ) -> None:
        """`name` is the layer's in checkpoints, if it is not the usual one."""
        name = f"model.layers.{layer}" if name is None else name
        self._attention = self.attention_type(slots, f"{name}.self_attn", layer, config)
        self._mlp = self.make_mlp(slots, f"{name}.mlp", layer, config)
        self.make_norms(slots, name, config)

    def make_mlp(
        self, slots: WeightSlots, name: str, layer: int, config: ModelConfig
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        if config.experts is not None and config.experts.layers[layer]:
            return self.moe_type(slots, name, config, config.experts)
        return self.mlp_type(slots, name, config)

    def make_norms(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self._attention_norm = RMSNorm(slots, f"{name}.input_layernorm", size, eps)
        self._mlp_norm = RMSNorm(slots, f"{name}.post_attention_layernorm", size, eps)

    def __call__(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        rope: RopeTables,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Add `delta_TD`, the previous layer's output, to the residual stream x in place, compute
        the layer, and return the MLP's output [T, D], which the caller adds to x next."""
        delta_TD = self._attention(self._attention_norm(x_TD, delta_TD), rope, attention)
        return self._mlp(self._mlp_norm(x_TD, delta_TD))


class Decoder:
    """The Llama decoder. Other families override what differs."""

    layer_type: type[DecoderLayer] = DecoderLayer
    norm_type: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, slots: WeightSlots) -> None:
        self.config = config
        self.ops = slots.ops
        self._embed = Embedding(slots, "model.embed_tokens", config.vocab_size, config.hidden_size)
        # Rounded to the compute dtype, as in transformers.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=slots.dtype).item()
        self._rope = Rope(config.rope, config.rope_dim, slots.dtype, slots.device)
        self._layers = [self.layer_type(slots, layer, config) for layer in range(config.num_layers)]
        self._norm = self.norm_type(slots, "model.norm", config.hidden_size, config.norm_eps)
        # The product of the head, or of a classifier's scores. Models that embed have none.
        self._head: Product
        # The layers before which hidden states are kept, for a head that drafts.
        self.kept_layers: tuple[int, ...] = ()
        # Identifies the bits of products that depend on no other row of a step; "" if they depend
        # on others. Known when weights are loaded.
        self.bits = ""
        if config.pooling:
            self._declare_scores(slots)
            return
        size = config.vocab_size, config.hidden_size
        head = LinearWeights(slots, [HEAD], [size[0]], size[1]) if config.has_own_head else None
        slots.when_filled(lambda: self._pack_head(head, slots))

    def _declare_scores(self, slots: WeightSlots) -> None:
        """A pooling model has no head, and a classifier one for its scores. Checkpoints saved from
        the decoder alone name its tensors without `model.`."""
        config = self.config
        inner = {
            name: slots.parameters[name] for name in slots.parameters if name.startswith(INNER)
        }
        slots.also_spelled(
            inner, {name.removeprefix(INNER): parameter for name, parameter in inner.items()}
        )
        if config.classes:
            score_ND = slots.tensor(f"{SCORE}.weight", config.classes, config.hidden_size)
            slots.when_filled(lambda: self._pack_scores(score_ND, slots))
        slots.when_filled(lambda: self._note_bits(slots))

    def _pack_scores(self, score_ND: torch.Tensor, slots: WeightSlots) -> None:
        self._head = slots.product(HEAD, score_ND)  # HEAD's products are float32

    def _note_bits(self, slots: WeightSlots) -> None:
        self.bits = slots.bits

    def _pack_head(self, head: LinearWeights | None, slots: WeightSlots) -> None:
        """Pack the head's weight. A tied head then exists twice, because the embedding needs its
        rows. For 16 rows the product is 2.5 times as fast in bf16, and 1.4 times in fp32."""
        [weight] = [self._embed.weight] if head is None else head.take()
        scheme = slots.tied_head_scheme
        if head is None and scheme is not None and not isinstance(weight, QuantizedWeight):
            weight = quantized(weight, scheme)
        self._head = slots.product(HEAD, weight)
        self.bits = slots.bits  # the head's is the last product

    def keep_rope(self, positions: int) -> None:
        """Keep the rope tables of positions [0, positions), to which later steps are limited."""
        self._rope.keep(positions)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """The tokens' embeddings, a new tensor [T, D]."""
        x_TD = self._embed(tokens_T)
        return x_TD if self._embed_scale == 1.0 else x_TD.mul_(self._embed_scale)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute the hidden states [T, D] before the final norm, and write the tokens' KV. With
        `kept_layers`, the hidden states before each of these follow in further columns."""
        x_TD = self.embed(tokens_T)
        rope = self._rope.tables(positions_T)
        delta_TD = None
        kept: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self._layers):
            if number in self.kept_layers:
                kept[number] = x_TD.clone() if delta_TD is None else x_TD + delta_TD
            delta_TD = layer(x_TD, delta_TD, rope, attention)
        hidden_TD = x_TD if delta_TD is None else x_TD.add_(delta_TD)
        if not kept:
            return hidden_TD
        return torch.cat((hidden_TD, *(kept[number] for number in self.kept_layers)), 1)

    def normed(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """The final norm of rows of hidden states, [S, D]."""
        return self._norm(hidden_SC[:, : self.config.hidden_size].contiguous())

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], float32 in any compute dtype; 256 rows of 150,000 are 155 MB. Pass only
        the rows that need logits: the head is often the largest matrix of a small model."""
        return self.logits_of_normed(self.normed(hidden_SC))

    def answers(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """What a pooling model answers with, float32 [S, N]: the scores of its classes, or the
        hidden states after the final norm."""
        normed_SD = self.normed(hidden_SC)
        return self._head(normed_SD) if self.config.classes else normed_SD.float()

    def logits_of_normed(self, normed_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = self._head(normed_SD)
        cap = self.config.logits_soft_cap
        return logits_SV if cap is None else logits_SV.div_(cap).tanh_().mul_(cap)
