"""Logprobs for clients: of the token itself and of the most likely tokens.

In: logits. Out: PositionLogprobs, natural logarithms. They stay on the device until they are read.
Shapes: N positions, V vocabulary, K most likely tokens, M ids that a request names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.kv.staging import stage
from baton_protocol.request import PositionLogprobs, TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each position: the logprob and the rank (1 + number of larger logprobs) of its id, and
    the K most likely tokens with their logprobs. `named_NM` are the logprobs of the ids that the
    requests name, padded to the longest list; None if they name none."""

    own_N: torch.Tensor
    rank_N: torch.Tensor
    value_NK: torch.Tensor
    token_NK: torch.Tensor
    named_NM: torch.Tensor | None = None

    def to_host(self) -> Logprobs:
        """Start copies to the host. Read them only after a later event on the stream is done."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", non_blocking=True)

        return Logprobs(
            copy(self.own_N),
            copy(self.rank_N),
            copy(self.value_NK),
            copy(self.token_NK),
            None if self.named_NM is None else copy(self.named_NM),
        )

    def read(
        self,
        ids: Sequence[int],
        tops: Sequence[int],
        named: Sequence[Sequence[int]] = (),
    ) -> list[PositionLogprobs]:
        """For each position i, the logprob of `ids[i]`, of the `tops[i]` most likely tokens and of
        the ids `named[i]`."""
        positions = []
        for id, own, rank, values, tokens, top in zip(
            ids,
            self.own_N.tolist(),
            self.rank_N.tolist(),
            self.value_NK.tolist(),
            self.token_NK.tolist(),
            tops,
            strict=True,
        ):
            likeliest = enumerate(zip(tokens[:top], values[:top], strict=True), start=1)
            best = (TokenLogprob(int(token), value, place) for place, (token, value) in likeliest)
            positions.append(PositionLogprobs(TokenLogprob(id, own, int(rank)), tuple(best)))
        if self.named_NM is None:
            return positions
        return [
            PositionLogprobs(
                position.sampled, position.top, tuple(map(TokenLogprob, asked, values))
            )
            for position, asked, values in zip(
                positions, named, self.named_NM.tolist(), strict=True
            )
        ]


def logprobs_of(logits_NV: torch.Tensor, ids_N: torch.Tensor, most: int) -> Logprobs:
    """Logprobs of `ids_N` and of the `most` most likely tokens. Logits are float32."""
    return select(log_softmax(logits_NV), ids_N, most)


def select(
    score_NV: torch.Tensor,
    ids_N: torch.Tensor,
    most: int,
    named: Sequence[Sequence[int]] = (),
) -> Logprobs:
    """The scores of `ids_N`, of the `most` most likely tokens and of the ids `named[i]` of each
    position i, as if they were logprobs."""
    own_N1 = score_NV.gather(1, ids_N[:, None])
    rank_N = (score_NV > own_N1).sum(dim=-1) + 1
    best = score_NV.topk(min(most, score_NV.shape[1]), dim=-1)
    named_NM = None
    if widest := max(map(len, named), default=0):
        table_NM = np.zeros((len(named), widest), np.int64)
        for row, asked in zip(table_NM, named, strict=True):
            row[: len(asked)] = asked
        named_NM = score_NV.gather(1, stage(table_NM, score_NV.device))
    return Logprobs(own_N1[:, 0], rank_N, best.values, best.indices, named_NM)


def log_softmax(logits_NV: torch.Tensor) -> torch.Tensor:
    """On CUDA, torch adds a row's elements in an order that depends on the row's address modulo 16
    bytes, so rows are padded to whole multiples of it."""
    vocab = logits_NV.shape[1]
    padded_NV = F.pad(logits_NV, (0, -vocab % 4), value=-torch.inf) if vocab % 4 else logits_NV
    return padded_NV.log_softmax(dim=-1)[:, :vocab]
