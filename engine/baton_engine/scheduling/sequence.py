"""One choice of one request, as the scheduler sees it: tokens known, KV computed, blocks held.

In: a Request and the tokens sampled for it. Out: what is missing. Nothing here knows the pool.

Tokens are known when they were read, and computed when the step that computes them was read. Of
steps under way a sequence knows how far they take it, and which sample gives its next token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton_engine.interface import ListedIds, Matcher, PenaltyCounts, PromptUse
from baton_engine.scheduling.ranges import Run, total, within
from baton_engine.scheduling.stop_conditions import BannedTokens
from baton_protocol.hashing import block_hasher
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.request import PositionLogprobs, Request


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `tokens` tokens."""
    return -(-tokens // block_size)


def given_ids(request: Request) -> tuple[int, ...]:
    """What every choice of a request knows when it arrives: the prompt, and the outputs too where
    there is one choice."""
    if request.params.n == 1 and request.outputs:
        return request.prompt_ids + request.outputs[0]
    return request.prompt_ids


class Sequence:
    """Tokens [0, computed) have KV in `blocks`; tokens [computed, known) are to be computed, but
    for the runs of tokens `ahead`, which have landed already.

    The first `registered` blocks are in the prefix cache, or shared from it, and so are those of
    the runs. Of the choice's chunks the first `passed` have been computed or come to. `key` orders
    sequences by age: (arrival of the request, choice). `seen` is there where the parameters hold a
    penalty.

    Steps under way compute up to `started`; the last of them is number `step`. Where it samples a
    token, `after` is the sample's number, else -1. With `end` tokens the choice ends for sure. The
    next row can be made while a token is awaited, if with that token less than `reach` are known.
    A `plain` sequence decodes and asks for nothing beyond its parameters: a token does no more to
    it than end it or fill a block. `tenure` is new whenever it gets blocks anew; `capacity` is how
    many tokens its blocks hold. `matcher` has taken the outputs, where the request has a grammar.
    """

    __slots__ = (
        "_counts",
        "after",
        "ahead",
        "blocks",
        "capacity",
        "choice",
        "computed",
        "end",
        "hashes",
        "key",
        "matcher",
        "passed",
        "plain",
        "reach",
        "registered",
        "running",
        "seen",
        "started",
        "state",
        "step",
        "tenure",
        "tokens",
    )

    def __init__(self, state: RequestState, choice: int) -> None:
        self.state = state
        self.choice = choice
        self.key = (state.arrival, choice)
        self.tokens: list[int] = [*state.request.prompt_ids, *state.outputs_of(choice)]
        self.hashes: list[BlockHash] = list(state.given_hashes)
        self.blocks: list[BlockId] = []
        self.ahead: list[Run] = []
        self.computed = self.started = self.registered = self.passed = self.capacity = 0
        self.step = self.tenure = 0
        self.after = -1
        self.running = self.plain = False
        self.end = min(state.end, len(self.tokens) + 1) if state.prefill_only else state.end
        self.reach = 0
        self._counts: dict[int, int] = {}
        self.seen: PenaltyCounts | None = None
        if state.params.penalized:
            self.seen = PenaltyCounts(state.distinct_prompt, self._counts)
            for id in state.outputs_of(choice):
                self._count(id)
        self.matcher: Matcher | None = None
        if state.matcher is not None:
            self.matcher = state.matcher.copy()
            self.matcher.accept(state.outputs_of(choice))
        self.look_ahead()

    def append(self, id: int) -> None:
        """The choice has a new token."""
        self.tokens.append(id)
        if self.seen is not None:
            self._count(id)
        if self.matcher is not None:
            self.matcher.accept((id,))

    def _count(self, id: int) -> None:
        self._counts[id] = self._counts.get(id, 0) + 1

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens known behind the computed ones; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def due(self) -> int:
        """Tokens to begin before the next run, or at all; at least 1 where no token is awaited."""
        for start, _ in self.ahead:
            if start > self.started:
                return start - self.started
        return len(self.tokens) - self.started

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.state.prompt_len

    @property
    def prompt_missing(self) -> int:
        """Prompt tokens that are to be computed."""
        prompt = self.state.prompt_len
        return max(0, prompt - self.computed) - total(within(self.ahead, 0, prompt))

    def named(self, blocks: int) -> list[BlockHash]:
        """Hashes of at least the first `blocks` blocks, all full; made when first asked for."""
        hashes, state = self.hashes, self.state
        size = state.block_size
        for index in range(len(hashes), blocks):
            block = self.tokens[index * size : (index + 1) * size]
            hashes.append(state.name(hashes[-1] if hashes else state.root, block))
        return hashes

    def hashes_of(self, blocks: int) -> Seq[BlockHash]:
        """Hashes of the first `blocks` blocks, all full."""
        return self.named(blocks)[:blocks]

    def place(self, blocks: list[BlockId], runs: Seq[Run] = ()) -> None:
        """Give the sequence blocks, in which the tokens of `runs` have KV, all of whose whole
        blocks are registered. A run begins where a block begins."""
        self.blocks, self.computed, self.ahead = [], 0, list(runs)
        self.extend(blocks)
        self.advance(0)
        self.registered = self.computed // self.state.block_size
        assert self.due > 0, "at least one token must be left to compute"

    def extend(self, blocks: Seq[BlockId]) -> None:
        """Blocks more, behind those it has."""
        self.blocks += blocks
        self.capacity = len(self.blocks) * self.state.block_size

    def launch(self, count: int, after: int) -> None:
        """A step under way computes `count` tokens more; its sample number `after` (-1: none) is
        the next token. A run that is reached is gone over."""
        self.after = after
        self.started += count
        for start, end in self.ahead:
            if start == self.started:
                self.started = end

    def advance(self, count: int) -> None:
        """`count` tokens more are computed; a run that is reached is gone over."""
        self.computed += count
        if self.ahead and self.ahead[0][0] == self.computed:
            self.computed = self.ahead.pop(0)[1]
        self.started = max(self.started, self.computed)

    def look_ahead(self) -> None:
        """Set `reach`; to be done again when the prompt is told."""
        state = self.state
        starts_others = not state.prompt_done and state.params.n > 1
        self.reach = 0 if state.looks_at_tokens or starts_others else self.end

    def settle(self) -> None:
        """A token was read behind all that is computed: see `plain`."""
        self.look_ahead()
        state = self.state
        self.plain = not state.looks_at_tokens and self.num_outputs >= state.params.min_tokens

    def clear(self) -> list[BlockId]:
        """Forget all KV (tokens stay) and return the blocks that held it."""
        blocks, self.blocks, self.ahead = self.blocks, [], []
        self.computed = self.started = self.registered = self.capacity = 0
        self.after, self.plain = -1, False
        return blocks


@dataclass(frozen=True, slots=True)
class BlockNaming:
    """How a request's blocks get their hashes: chained from `root`, a block at a time."""

    root: BlockHash
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What whoever submits a request asks for beside it, see `interface.Engine.submit`."""

    prefill_only: bool = False
    track: bool = False
    report_filled: bool = False
    matcher: Matcher | None = None


class RequestState:
    """What the choices of one request share; `given_hashes` name the full blocks of `given_ids`.

    Choice 0 (or the first that runs) leads: it computes the prompt. The others are `pending` until
    then, and find the prompt's full blocks in the prefix cache.
    """

    def __init__(
        self,
        request: Request,
        naming: BlockNaming,
        *,
        arrival: int,
        given_hashes: Seq[BlockHash],
        submission: Submission,
        eos_ids: Seq[int] = (),
        max_tokens: int = sys.maxsize,
    ) -> None:
        self.request = request
        self.params = params = request.params
        self.arrival = arrival
        self.root = naming.root
        self.given_hashes = given_hashes
        self.block_size = naming.block_size
        self.name = block_hasher(naming.block_size)
        self.prefill_only = submission.prefill_only
        self.track = submission.track
        self.report_filled = submission.report_filled
        self.matcher = submission.matcher  # at the beginning of the grammar
        # For one step after it has ended.
        self.keeps_blocks = submission.track or submission.report_filled
        self.prompt_len = len(request.prompt_ids)
        self.given_len = len(given_ids(request))
        self.pending: list[int] = []
        self.live: dict[int, Sequence] = {}
        self.leader: Sequence | None = None
        self.prompt_done = False
        self.given_done = False  # tracked until all that was given had KV
        self.bans = BannedTokens(params)
        self.listed = ListedIds.of(params)
        # A choice that has so many tokens, prompt and outputs, ends; one that says these ids may.
        self.end = min(self.prompt_len + params.max_tokens, max_tokens)
        self.stops = frozenset((*(() if params.ignore_eos else eos_ids), *params.stop_token_ids))
        self.looks_at_tokens = (
            params.penalized or bool(params.bad_words) or self.matcher is not None
        )
        # An array, so that a runner takes it as it is in each step.
        self.distinct_prompt = array("q")
        if params.penalized:
            self.distinct_prompt.extend(sorted(set(request.prompt_ids)))
        # Of the prompt's tokens from the second on, as far as the leader has come.
        self._prompt_logprobs: list[PositionLogprobs] = []
        # Where leading tokens and runs came from, beside those that were computed: this node's
        # cache, its host tier, the store. None until the leader is first placed.
        self._sources: list[list[Run]] | None = None

    @property
    def ended(self) -> bool:
        return not self.pending and not self.live

    @property
    def asks_prompt(self) -> bool:
        """Whether the leader must compute each token of the prompt itself: nothing cached or
        fetched tells how likely a token was. The other choices come after that, and may share."""
        return self.params.prompt_logprobs is not None and not self.prompt_done

    def take_prompt_logprobs(self, start: int, found: Seq[PositionLogprobs]) -> None:
        """What the piece from `start` on told. A leader that was preempted tells it again."""
        self._prompt_logprobs[start:] = found

    def outputs_of(self, choice: int) -> tuple[int, ...]:
        """Ids the choice had when the request arrived."""
        outputs = self.request.outputs
        return outputs[choice] if outputs else ()

    def choices_with(self, sequence: Sequence) -> list[int]:
        """Choices whose next token is sampled from the last row of `sequence`: with the leader at
        the prompt's end, all that have no token yet. (A leader has none itself if any has none.)"""
        choices = [sequence.choice]
        if sequence is self.leader and not self.prompt_done:
            choices += [choice for choice in self.pending if not self.outputs_of(choice)]
        return choices

    def placed(
        self,
        sequence: Sequence,
        *,
        cached: Seq[Run] = (),
        host: Seq[Run] = (),
        fetched: Seq[Run] = (),
    ) -> None:
        """Note where the leader's first KV came from. After a preemption only what is lost counts:
        tokens that this request itself computed do not become cached ones."""
        if sequence is not self.leader or self.prompt_done:
            return
        sources, kept = self._sources, sequence.computed
        if sources is None:
            sources, kept = [list(cached), list(host), list(fetched)], self.prompt_len
        self._sources = [within(runs, 0, min(kept, self.prompt_len)) for runs in sources]

    def prompt_use(self) -> PromptUse:
        """Given once: what the prompt told is handed over, and kept here no longer."""
        found, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        cached, host, fetched = map(total, self._sources or ((), (), ()))
        return PromptUse(
            request=self.request.id,
            prompt=self.prompt_len,
            cached=cached,
            host=host,
            fetched=fetched,
            computed=self.prompt_len - cached - host - fetched,
            logprobs=found,
        )
