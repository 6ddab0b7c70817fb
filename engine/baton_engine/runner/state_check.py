"""Check that the only state of a model's sequences is their KV.

In: a runner of a model that Baton does not know, and the layout of its KV. Out: nothing, or
UnsupportedModel. Two sequences are computed whole and alone, and again in pieces and in one step
with each other. A model that keeps more than KV, lets a token see tokens of another sequence, or
ignores positions gives other log-probabilities in pieces. The blocks that it writes must belong to
no request.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from baton_engine.errors import UnsupportedModel
from baton_engine.interface import PromptAsk, Row, Runner
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

# Numbers of tokens of each sequence's pieces.
PIECES = ((13, 1, 10), (6, 7, 1))
# Median difference of log-probabilities, in nats, up to which two computations are the same up to
# rounding. Rounding moved them by up to 1e-4 in float32 and 0.1 in bfloat16; a model that ignores
# the pieces before, by 1 and more.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.5}


def blocks_needed(layout: KVLayout) -> int:
    return sum(_blocks(layout, sum(pieces)) for pieces in PIECES)


def check_state(runner: Runner, layout: KVLayout, architecture: str, vocab_size: int) -> None:
    """`runner` has blocks_needed() blocks."""
    draw, first = random.Random(0), 1
    sequences = []
    for pieces in PIECES:
        count = _blocks(layout, sum(pieces))
        blocks = [BlockId(number) for number in range(first, first + count)]
        sequences.append(([draw.randrange(vocab_size) for _ in range(sum(pieces))], blocks))
        first += count
    whole = [_logprobs(runner, [_row(*each, 0, len(each[0]))])[0] for each in sequences]
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
    # The tokens of the first pieces depend on nothing before them.
    apart = [
        abs(one - other)
        for one_L, other_L, pieces in zip(whole, parts, PIECES, strict=True)
        for one, other in zip(one_L[pieces[0] :], other_L[pieces[0] :], strict=True)
    ]
    if not statistics.median(apart) <= TOLERANCES[layout.dtype]:  # NaN is no answer either
        raise UnsupportedModel(
            f"architecture {architecture} cannot be served by transformers: a sequence that is"
            f" computed in pieces differs from the whole by {statistics.median(apart):.2g} nats, so"
            " its tokens depend on more than the KV before them"
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
