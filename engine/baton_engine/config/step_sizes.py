"""Sizes of a step's parts that attention computes with and the memory estimate counts."""

from __future__ import annotations

import math

# Number of scores of a prompt that exist at a time on a CPU, 4 MB in float32. More do not stay in
# the CPU's caches between two passes. In bf16, each score takes two bf16 products, two float32
# numbers and a bf16 weight.
SCORES_AT_ONCE = 1 << 20
# Sizes of torch's attention. If K and V of one-token rows are copied, KEYS_COPIED elements of K are
# copied at a time, or those of one row. Splits have SPLIT_KEYS keys if possible (see
# split_blocks). REGISTER_NUMBERS are the float32 numbers in a vector register with AVX-512; others
# have fewer.
SPLIT_KEYS = 64
REGISTER_NUMBERS = 16
KEYS_COPIED = 1 << 21
# Number of prompt positions whose logits exist at a time for prompt_logprobs: 128 rows of 150,000
# floats are 77 MB.
PROMPT_ROWS = 128
# Maximum bytes of the splits that Triton's attention stores in a step with --batch-invariant on.
# Beyond it, one program adds all splits of a row. Products store theirs afterwards, at most 8 MiB.
STORED_SPLIT_BYTES = 64 << 20
# Positions of a sequence whose hidden states are kept for a head that drafts, while it gets no
# drafts. After more of them it begins a new context.
KEPT_POSITIONS = 64
# Number of queries of an encoder's prompt whose scores exist at a time: with 12 heads and 8,192
# keys they are 200 MB in float32.
ENCODER_QUERIES = 512


def split_blocks(block_size: int) -> int:
    """The number of blocks in a split of batch-invariant attention: the keys fill whole vector
    registers, and there are at most SPLIT_KEYS, if that is possible."""
    smallest = math.lcm(block_size, REGISTER_NUMBERS) // block_size
    return max(1, SPLIT_KEYS // block_size // smallest) * smallest
