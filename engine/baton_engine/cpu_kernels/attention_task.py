"""The task of a kernel of paged attention: its argument, its parts, and the order of additions."""

from __future__ import annotations

import enum

import numpy as np

from baton_engine.cpu_kernels.openmp import COUNTER, task_class

# The argument of a kernel. The addresses are of arrays: `blocks` int32 [X, P], `heads` int32 [X],
# `rows` int32 [X, M] (which of the Q rows), `heights` int32 [X] (how many rows a matrix has),
# `seen` int32 [X, 2] (begin, end), `scores` float32 [Q, L], `sinks` float32 [Q] (0 if rows have no
# sink), `sums` float32 [Q, V], `queries` [Q, H] and `output` [Q, V] in the dtype of the pool, with
# H = `dim` and V = `value_dim`. K is at `keys`, V at `values`; the other numbers of both are bytes
# from one block, kv head and slot to the next. Key 0 of a matrix has its scores in column `column`.
# `next` is the matrix that the next free thread takes. The orders are those of bfloat16 products;
# those of float32 add one by one. A score is the sum of those of `scores_block` numbers of q and k
# each. With `rounded`, bfloat16 products are rounded to bfloat16 twice (see cpu_bf16.wide_scores).
# `states` is float32 [Q, 4], for Part.SPLITS. The kernels of codes have K and V as codes of int8
# or, with `fp8`, of fp8, and the exponents of slots one byte apart.
AttentionTask = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "height", "width", "block")),
        *((name, np.int64) for name in ("dim", "value_dim", "blocks", "heads", "rows", "heights")),
        *((name, np.int64) for name in ("seen", "keys", "values")),
        *((f"key_{unit}_bytes", np.int64) for unit in ("block", "head", "slot")),
        *((f"value_{unit}_bytes", np.int64) for unit in ("block", "head", "slot")),
        *((name, np.int64) for name in ("queries", "scores", "sinks", "sums", "output", "states")),
        *((name, np.int64) for name in ("row_scores", "column", "split", "parts")),
        *((name, np.int64) for name in ("scores_order", "scores_block", "sums_order", "rounded")),
        *((name, np.int64) for name in ("key_exponents", "value_exponents", "fp8")),
        *((f"exponent_{unit}_bytes", np.int64) for unit in ("block", "head")),
        ("scale", np.float32),
    ]
)


class Order(enum.IntEnum):
    """In which order a product adds the inputs of an output."""

    IN_TURN = 0  # one by one
    PAIRS = 1  # two by two, the second before the first: AVX-512 BF16
    TILES = 2  # per 32 inputs, those at even and at odd places apart: AMX


class Part(enum.IntFlag):
    """What a kernel computes of each matrix, in this order. SPLITS is in place of SCORES, SOFTMAX
    and SUMS for layers with weights by split (see softmax.SplitSums): `scores` has the columns of
    one split, and a key is read for its score and for the sums while it is in the cache."""

    SCORES = 1  # -inf for keys that a row does not see
    SOFTMAX = 2  # replaces all scores of the rows by weights; a sink is a score without a weight
    NO_SUMS = 4  # sets `sums` to 0, and `states` to those of no keys
    SUMS = 8  # adds V times weight to `sums`, one split after the other
    OUTPUT = 16  # writes `sums` to `output`
    ALL = 31
    SPLITS = 32  # scores, weights and sums, one split after the other
