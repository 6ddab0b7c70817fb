"""Log-probabilities as clients get them: a token's own and those of the likeliest.

In: raw logits, so natural log before temperature and everything else. Out: PositionLogprobs.
Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton_protocol.request import PositionLogprobs, TokenLogprob


def position_logprobs(
    logits_NV: torch.Tensor, ids: Sequence[int], tops: Sequence[int]
) -> list[PositionLogprobs]:
    """Per position that of its id, and of the `tops[i]` likeliest. A rank is 1 + the number of
    larger ones. Logits may be of any dtype."""
    logprob_NV = logits_NV.log_softmax(dim=-1, dtype=torch.float32)
    chosen_N = torch.tensor(ids, device=logits_NV.device)
    own_N1 = logprob_NV.gather(1, chosen_N[:, None])
    ranks = ((logprob_NV > own_N1).sum(dim=-1) + 1).tolist()
    best = logprob_NV.topk(min(max(tops), logits_NV.shape[1]), dim=-1)
    found = []
    for id, own, rank, values, tokens, top in zip(
        ids,
        own_N1[:, 0].tolist(),
        ranks,
        best.values.tolist(),
        best.indices.tolist(),
        tops,
        strict=True,
    ):
        likeliest = enumerate(zip(tokens[:top], values[:top], strict=True), start=1)
        found.append(
            PositionLogprobs(
                TokenLogprob(id, own, int(rank)),
                tuple(
                    TokenLogprob(int(token), value, place) for place, (token, value) in likeliest
                ),
            )
        )
    return found
