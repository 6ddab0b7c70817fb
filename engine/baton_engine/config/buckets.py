"""The sizes that steps are padded to, so that each is recorded once as a CUDA graph. No torch: the
memory estimate counts the graphs from the same sizes.

In: --max-num-seqs. Out: numbers of lines (one-token rows).
"""

from __future__ import annotations


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes in lines that steps are padded to, ascending. Small sizes are close together, because
    padding costs most there. The largest is `max_num_seqs`, so every step fits."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
