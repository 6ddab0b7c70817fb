"""What ModelConfig says of attention with a latent cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention, in numbers per token or head.

    The cache has one row per token: a latent of `rank` numbers, and a rotated part of k of
    `rope_dim` numbers, which all heads share. From the latent, each head has `key_dim` further
    numbers of k and `value_dim` numbers of v. q comes from a latent of `query_rank` numbers, or
    from the hidden state if it is None. With `pairs`, rope rotates neighbouring numbers in the
    checkpoint's order, else those that are half of `rope_dim` apart.
    """

    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int
    query_rank: int | None
    pairs: bool

    @property
    def row(self) -> int:
        """Numbers of a token's row in the cache."""
        return self.rank + self.rope_dim
