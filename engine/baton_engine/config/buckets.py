"""The sizes of steps that are recorded as CUDA graphs. Declared once: the runner records them, and
the memory estimate counts them.

A recorded step consists of lines: rows of one new token. A row with few new tokens, such as the
tail after a hand-off, is that many lines, so a step may have more lines than sequences.
"""

from __future__ import annotations

# The most new tokens of a row that is computed as lines. Each line reads the row's KV again.
SHORT_ROW = 16
# Room for the lines of short rows, in addition to a line per sequence.
MORE_LINES = 256
# The distance between sizes beyond the number of sequences.
COARSE = 32


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes in lines that steps are padded to, ascending. Small sizes are close together, because
    padding costs most there. A step of one-token rows always fits; the largest size has room for
    all rows to be short, within MORE_LINES."""
    most = max_num_seqs + min(MORE_LINES, (SHORT_ROW - 1) * max_num_seqs)
    dense = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    sizes = {size for size in dense if size < max_num_seqs}
    return tuple(sorted({*sizes, max_num_seqs, *range(COARSE, most, COARSE), most}))
