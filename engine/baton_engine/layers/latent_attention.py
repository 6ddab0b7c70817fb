"""Attention with a latent cache (DeepSeek's multi-head latent attention), in its absorbed form.

A head's k and v are products of the token's latent with parts of one weight, `kv_b_proj`. Instead
of computing k and v of every token, the part for k multiplies the query, and the part for v the
output: q (W c) = (q W) c. So attention has one kv head, whose k is the whole latent row and whose v
are the row's first numbers, and it reads each row once for all query heads. Prompts are computed in
the same form: per pair of query and key, N (2 R + P) products instead of N (A + P + V).

Shapes: T tokens of the step, D hidden size, N query heads, R numbers of the latent, P rotated
numbers, L = R + P, A further numbers of a head of k, V of a head of v, Q of the latent of q.
"""

from __future__ import annotations

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Linear, RMSNorm
from baton_engine.layers.linear_method import HEADS
from baton_engine.layers.linear_weights import LinearWeights
from baton_engine.layers.parameter import WeightSlots, as_dense
from baton_engine.layers.rotary import RopeTables, rotate

# The norms of latents have this constant whatever config.json says.
LATENT_EPS = 1e-6


class LatentAttention:
    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        assert config.latent is not None, "a config without latent attention"
        self._layer, self._heads, self._latent = layer, config.num_heads, config.latent
        self._declare_queries(slots, name, config)
        self._declare_rows(slots, name, config)
        latent = self._latent
        self._out = Linear(
            slots,
            [f"{name}.o_proj"],
            [config.hidden_size],
            config.num_heads * latent.value_dim,
            config.output_bias,
        )

    def _declare_queries(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        latent, hidden, rank = self._latent, config.hidden_size, self._latent.query_rank
        rows = [config.num_heads * (latent.key_dim + latent.rope_dim)]
        self._to_latent: Linear | None = None
        if rank is None:
            slots.when_filled(lambda: self._halve(self._queries, config.num_heads, latent.key_dim))
            self._queries = Linear(slots, [f"{name}.q_proj"], rows, hidden, False)
            return
        self._to_latent = Linear(slots, [f"{name}.q_a_proj"], [rank], hidden, config.qkv_bias)
        self._query_norm = RMSNorm(slots, f"{name}.q_a_layernorm", rank, LATENT_EPS)
        slots.when_filled(lambda: self._halve(self._queries, config.num_heads, latent.key_dim))
        self._queries = Linear(slots, [f"{name}.q_b_proj"], rows, rank, False)

    def _declare_rows(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        latent = self._latent
        slots.when_filled(lambda: self._halve(self._rows, 1, latent.rank))
        self._rows = Linear(
            slots,
            [f"{name}.kv_a_proj_with_mqa"],
            [latent.row],
            config.hidden_size,
            config.qkv_bias,
        )
        self._row_norm = RMSNorm(slots, f"{name}.kv_a_layernorm", latent.rank, LATENT_EPS)
        each = latent.key_dim + latent.value_dim
        both = LinearWeights(slots, [f"{name}.kv_b_proj"], [config.num_heads * each], latent.rank)
        self._absorb: Product
        self._expand: Product

        def pack() -> None:
            # The two products need a plain weight: one of them is with its transpose.
            [weight] = both.take()
            both_NOR = as_dense(weight, slots.dtype).view(config.num_heads, each, latent.rank)
            keys_NRA = both_NOR[:, : latent.key_dim].transpose(1, 2)
            values_NVR = both_NOR[:, latent.key_dim :]
            self._absorb = slots.product(f"{name}.kv_b_proj", keys_NRA, method=HEADS)
            self._expand = slots.product(f"{name}.kv_b_proj", values_NVR, method=HEADS)

        slots.when_filled(pack)

    def _halve(self, linear: Linear, heads: int, before: int) -> None:
        """Give the rotated outputs of each head, which follow `before` others, the order that
        rotate() takes: the first numbers of all pairs, then the second."""
        if self._latent.pairs:
            order_NO = torch.arange(linear.shape[0]).view(heads, -1)
            pairs_NP = order_NO[:, before:]
            halves = pairs_NP[:, ::2], pairs_NP[:, 1::2]
            linear.reorder(torch.cat((order_NO[:, :before], *halves), 1).flatten())

    def __call__(
        self, x_TD: torch.Tensor, rope: RopeTables, attention: StepAttention
    ) -> torch.Tensor:
        latent, heads, tokens = self._latent, self._heads, len(x_TD)
        q_TNO = self._query(x_TD).view(tokens, heads, -1)
        row_TL = self._rows(x_TD)
        parts = q_TNO[..., latent.key_dim :], row_TL[:, None, latent.rank :]
        rotated_TXP = rotate(torch.cat(parts, 1), rope)
        absorbed_TM = self._absorb(q_TNO[..., : latent.key_dim].flatten(1))
        q_TNL = torch.cat((absorbed_TM.view(tokens, heads, -1), rotated_TXP[:, :heads]), 2)
        latent_T1R = self._row_norm(row_TL[:, : latent.rank].contiguous())[:, None]
        k_T1L = torch.cat((latent_T1R, rotated_TXP[:, heads:]), 2)
        out_TNR = attention.attend(self._layer, q_TNL, k_T1L, None)
        return self._out(self._expand(out_TNR.flatten(1)))

    def _query(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._to_latent is None:
            return self._queries(x_TD)
        return self._queries(self._query_norm(self._to_latent(x_TD)))
