"""Put ids that the previous step sampled into a step's tokens. Torch twin: `TorchOps.put_sampled`.

In: tokens, and which of them are awaited. Out: the tokens, complete. One launch: with torch it
takes six, in each step that is launched before the previous one is read.

Shapes: T tokens of the step, S samples of the previous step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


def put_sampled(tokens_T: torch.Tensor, awaits_T: torch.Tensor, ids_S: torch.Tensor) -> None:
    """Contiguous arguments; ids are int64, and the others int32."""
    tokens = len(tokens_T)
    _put_sampled[(triton.cdiv(tokens, TILE),)](tokens_T, awaits_T, ids_S, tokens, TILE=TILE)


@triton.jit(do_not_specialize=["tokens"])
def _put_sampled(
    tokens_ptr: tl.tensor,
    awaits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    tokens: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(awaits_ptr + token, mask=token < tokens, other=-1)
    id = tl.load(ids_ptr + place, mask=place >= 0, other=0)
    tl.store(tokens_ptr + token, id.to(tl.int32), mask=place >= 0)
