"""Run the largest possible step once on CUDA and measure its memory.

In: the limits of a step, and a model on its device. Out: rows that reach the limits and use every
feature that costs memory, and the measured bytes. There are no requests yet: all rows write to the
same block, and their samples are discarded.
"""

from __future__ import annotations

import torch

from baton_engine.interface import ListedIds, PenaltyCounts, PromptAsk, Row, Runner, Sample
from baton_engine.memory.estimate import Measured, MemoryBudget
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams

PROFILE_BLOCKS = 1
BLOCK = BlockId(1)
# Every filter, changed logits and logprobs: the most memory that a row of logits can need.
COSTLY = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    seed=0,
)


def largest_step(
    *, max_batched_tokens: int, max_num_seqs: int, longest: int, block_size: int
) -> list[Row]:
    """The maximum number of rows, of about equal length, with the maximum number of tokens in
    total; no row is longer than `longest` tokens."""
    count = min(max_num_seqs, max_batched_tokens)
    each, more = divmod(max_batched_tokens, count)
    lengths = [min(longest, each + (index < more)) for index in range(count)]
    return [_row(length, block_size) for length in lengths]


def measure_step(
    runner: Runner, rows: list[Row], device: torch.device, room: MemoryBudget
) -> Measured:
    """Run a step on CUDA when only the model is loaded. Returns the bytes that stay allocated, and
    the peak bytes that the step needed in addition."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.launch(rows).read()
    torch.cuda.synchronize(device)
    # Measure reserved, not allocated, memory: fragments cannot be used for anything else.
    step = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Measured(resident=max(0, total - free - room.others), step=step)


def _row(length: int, block_size: int) -> Row:
    tokens = [0] * length
    sample = Sample(
        0, length, COSTLY, seen=PenaltyCounts((0,), {0: 1}), listed=ListedIds.of(COSTLY)
    )
    blocks = [BLOCK] * -(-length // block_size)
    ask = PromptAsk(tuple(tokens[1:]), 1) if length > 1 else None
    return Row(tokens, 0, blocks, (sample,), ask)
