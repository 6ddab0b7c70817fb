"""Check that a model which Baton does not know is computed as by its own code.

In: a runner of the model, and what its own code expects. Out: nothing, or UnsupportedModel. The
runner computes two sequences in pieces and in one step with each other; the model's own code, whole
and alone, without a cache. A model that keeps more than KV, lets a token see tokens of another
sequence, ignores positions or attends in a way of its own gives other log-probabilities. The blocks
that the runner writes must belong to no request.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import UnsupportedModel
from baton_engine.interface import PromptAsk, Row, Runner
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

# Numbers of tokens of each sequence's pieces.
PIECES = ((13, 1, 10), (6, 7, 1))
# Median difference of log-probabilities, in nats, up to which two computations are the same up to
# rounding.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.5, "float16": 0.1}


def blocks_needed(layout: KVLayout) -> int:
    return sum(_blocks(layout, sum(pieces)) for pieces in PIECES)


def check_state(
    runner: Runner,
    layout: KVLayout,
    config: ModelConfig,
    expected: Callable[[Sequence[int]], Sequence[float]],
) -> None:
    """`runner` has blocks_needed() blocks. `expected` gives the log-probability of each token of a
    sequence after the tokens before it, without that of the first."""
    draw, first = random.Random(0), 1
    sequences = []
    for pieces in PIECES:
        count = _blocks(layout, sum(pieces))
        blocks = [BlockId(number) for number in range(first, first + count)]
        sequences.append(([draw.randrange(config.vocab_size) for _ in range(sum(pieces))], blocks))
        first += count
    whole = [expected(tokens) for tokens, _ in sequences]
    parts: list[list[float]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for step in zip(*PIECES, strict=True):
        rows = [
            _row(*each, start, count)
            for each, start, count in zip(sequences, starts, step, strict=True)
        ]
        for part, found in zip(parts, _logprobs(runner, rows), strict=True):
            part += found
        starts = [start + count for start, count in zip(starts, step, strict=True)]
    first_apart, later_apart = [], []
    for one_L, other_L, pieces in zip(whole, parts, PIECES, strict=True):
        apart_L = [abs(one - other) for one, other in zip(one_L, other_L, strict=True)]
        first_apart += apart_L[: pieces[0]]
        later_apart += apart_L[pieces[0] :]
    apart = [statistics.median(first_apart), statistics.median(later_apart)]
    if not all(each <= TOLERANCES[layout.dtype] for each in apart):  # NaN is no answer either
        raise UnsupportedModel(
            f"architecture {config.architecture} cannot be served by transformers: over the paged"
            f" cache, log-probabilities differ by {max(apart):.2g} from those without"
            " a cache, so its tokens depend on more than the KV before them"
        )


def _blocks(layout: KVLayout, tokens: int) -> int:
    return -(-tokens // layout.block_size) * layout.num_groups


def _row(tokens: Sequence[int], blocks: Sequence[BlockId], start: int, count: int) -> Row:
    targets = tuple(tokens[start + 1 : start + count + 1])
    ask = PromptAsk(targets, 1) if targets else None
    return Row(tokens[start : start + count], start, blocks, prompt=ask)


def _logprobs(runner: Runner, rows: Sequence[Row]) -> list[list[float]]:
    results = runner.launch(rows).read()
    return [[found.sampled.logprob for found in result.prompt] for result in results]
