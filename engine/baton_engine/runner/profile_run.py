"""Run the largest possible step once on CUDA, so that all kernels of sampling are compiled and
loaded, and measure its memory.

In: the plan, with the limits of a step, and a runner of the model. Out: the plan with the measured
memory. The rows reach the limits and use every feature that costs memory. There are no requests
yet: all rows write to the same block, and their samples are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.interface import (
    ListedIds,
    Matcher,
    PenaltyCounts,
    PromptAsk,
    Row,
    Runner,
    Sample,
)
from baton_engine.memory.estimate import measured_bytes
from baton_engine.runner.cuda_card import CudaCard
from baton_engine.runner.plan import EnginePlan
from baton_protocol.ids import BlockId
from baton_protocol.pooling import PoolingParams
from baton_protocol.sampling import SamplingParams

PROFILE_BLOCKS = 1
BLOCK = BlockId(1)
# A grammar, every filter, changed logits and logprobs: the most memory that a row of logits can
# need.
COSTLY = SamplingParams(
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    seed=0,
)
GREEDY = SamplingParams(temperature=0.0)


class AnyToken:
    """A Matcher that permits every id."""

    stopped = complete = False
    error = ""

    def __init__(self, vocab_size: int) -> None:
        self._mask = b"\xff" * -(-vocab_size // 8)

    def copy(self) -> AnyToken:
        return self

    def accept(self, ids: Sequence[int]) -> bool:
        return True

    def forced(self) -> Sequence[int]:
        return ()

    def mask(self) -> bytes:
        return self._mask


def largest_step(
    *,
    max_batched_tokens: int,
    max_num_seqs: int,
    longest: int,
    block_size: int,
    vocab_size: int,
    pooling: bool = False,
) -> list[Row]:
    """The maximum number of rows, of about equal length, with the maximum number of tokens in
    total; no row is longer than `longest` tokens. With `pooling` they ask for vectors."""
    count = min(max_num_seqs, max_batched_tokens)
    each, more = divmod(max_batched_tokens, count)
    lengths = [min(longest, each + (index < more)) for index in range(count)]
    if pooling:
        return [_pooling_row(length, block_size) for length in lengths]
    return [_row(length, block_size, AnyToken(vocab_size)) for length in lengths]


def profile(
    plan: EnginePlan, runner: Runner, card: CudaCard, draft_model: Runner | None = None
) -> EnginePlan:
    """Run the largest step when only the model, and maybe its draft model, is on the card. Returns
    the plan with a pool of the size that the measured memory leaves, unless the pool's size was
    given. The step runs in any case: otherwise the first requests would wait while kernels are
    compiled."""
    card.release()
    before = card.reserved()
    if draft_model is not None and plan.of_draft_model is not None:
        draft_model.launch(_largest_step(plan.of_draft_model)).read()
    runner.launch(_largest_step(plan)).read()
    step = card.peak() - before
    if not plan.config.pooling:  # sampling without filters and masks has kernels of its own
        runner.launch([Row([0], 0, [BLOCK], (Sample(0, 1, GREEDY),))]).read()
    card.release()
    if plan.room is None or plan.demand.pool_blocks is not None:
        return plan
    return plan.measured(
        measured_bytes(reserved=card.reserved(), step=step, free=card.free(), room=plan.room)
    )


def _largest_step(plan: EnginePlan) -> list[Row]:
    return largest_step(
        max_batched_tokens=plan.demand.max_batched_tokens,
        # An encoder computes one prompt at a time: the longest takes the most.
        max_num_seqs=1 if plan.config.encodes else plan.demand.max_num_seqs,
        longest=plan.max_model_len,
        block_size=plan.layout.block_size,
        vocab_size=plan.config.vocab_size,
        pooling=bool(plan.config.pooling),
    )


def _pooling_row(length: int, block_size: int) -> Row:
    blocks = [BLOCK] * -(-length // block_size)
    return Row([0] * length, 0, blocks, pooling=PoolingParams())


def _row(length: int, block_size: int, matcher: Matcher) -> Row:
    tokens = [0] * length
    sample = Sample(
        *(0, length, COSTLY),
        penalty_counts=PenaltyCounts((0,), {0: 1}),
        listed=ListedIds.of(COSTLY),
        matcher=matcher,
    )
    blocks = [BLOCK] * -(-length // block_size)
    ask = PromptAsk(tuple(tokens[1:]), 1) if length > 1 else None
    return Row(tokens, 0, blocks, (sample,), ask)
