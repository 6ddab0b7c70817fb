"""One choice of one request, as the scheduler sees it: tokens known, KV computed, blocks held.

In: a Request and the tokens sampled for it. Out: the tokens left to compute. This module does not
use the block pool.

A token is known when the step that samples it is read. It is computed when the step that computes
its KV is read. For steps in flight, a sequence records how far they compute and which sample is its
next token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton_engine.interface import (
    PADDING,
    ChangeLogits,
    ListedIds,
    Matcher,
    PenaltyCounts,
    PromptUse,
)
from baton_engine.scheduling.acceptance import Acceptance
from baton_engine.scheduling.beam_search import BeamSearch, LiveBeams
from baton_engine.scheduling.ranges import Run, total, within
from baton_engine.scheduling.stop_conditions import BannedTokens
from baton_engine.scheduling.time_account import TimeAccount
from baton_protocol.hashing import block_hasher
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout
from baton_protocol.request import PositionLogprobs, Request


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks of one group that hold the KV of `tokens` tokens."""
    return -(-tokens // block_size)


def drop_windowed(blocks: list[BlockId], spans: Iterable[int], layout: KVLayout) -> list[BlockId]:
    """Replace the blocks of these spans in the groups with a window by padding. `blocks` is a flat
    list (see KVLayout). Returns the blocks that were there, in logical order."""
    groups, full = layout.num_groups, layout.num_full_groups
    dropped = []
    for span in spans:
        for index in range(span * groups + full, (span + 1) * groups):
            if blocks[index] != PADDING:
                dropped.append(blocks[index])
                blocks[index] = PADDING
    return dropped


def given_ids(request: Request) -> tuple[int, ...]:
    """Tokens that every choice of a request knows on arrival: the prompt, and with n = 1 also the
    outputs. A beam search knows the prompt only."""
    if request.params.n == 1 and request.outputs and not request.params.use_beam_search:
        return request.prompt_ids + request.outputs[0]
    return request.prompt_ids


class Sequence:
    """Tokens [0, computed) have KV in `blocks`. Tokens [computed, known) are left to compute,
    except for the token runs in `landed_runs`, whose KV has already landed. Steps in flight compute
    tokens up to `launched`; their last sample for this sequence, number `awaited_sample` of the
    step `last_step`, is the next token (-1: none is awaited).

    `blocks` is a flat list with one block per span of `block_size` tokens and group of layers (see
    KVLayout). It has 0 where the sequence holds no block because a window has left the span.
    `capacity` is the number of tokens that `blocks` can hold, and `blocks_id` a new number each
    time the sequence gets its blocks again. Of the leading spans, `registered_spans` are in the
    prefix cache (like those of `landed_runs`), and the blocks with a window of `released_spans` are
    released. The first `reported_chunks` chunks are reported, or were cached, or have landed.

    The choice ends at `max_len` tokens at the latest. While a token is awaited, the next row can be
    made only if fewer tokens than `launch_limit` are known, the awaited one included. A sequence
    `takes_short_path` if it decodes, has no penalty, bad words or grammar, and is past min_tokens:
    a new token can only end it or fill a block. `key` orders sequences by age: (arrival of the
    request, choice); `order` is the scheduler's. `penalty_counts` is None without a
    penalty, `matcher` (the state of the grammar after all outputs) without a grammar. `acceptance`
    says how often drafts were right, and is None in an engine without drafts.

    Tokens before `reached` had KV until a preemption, and those before `lost_until` may have had it
    on a node that the request has lost; from `first_new` on all are new (see `core.step_time`).

    A beam is `idle` from the sample of its next tokens until those of the request's other beams: it
    computes nothing, and if it is preempted it waits in no queue. A beam that was forked from
    another one shares its blocks (see Scheduler) while `forked_from` has them.
    """

    __slots__ = (
        "_output_counts",
        "acceptance",
        "awaited_sample",
        "blocks",
        "blocks_id",
        "capacity",
        "choice",
        "computed",
        "first_new",
        "forked_from",
        "hashes",
        "idle",
        "key",
        "landed_runs",
        "last_step",
        "launch_limit",
        "launched",
        "lost_until",
        "matcher",
        "max_len",
        "order",
        "penalty_counts",
        "reached",
        "registered_spans",
        "released_spans",
        "reported_chunks",
        "running",
        "state",
        "takes_short_path",
        "tokens",
    )

    def __init__(self, state: RequestState, choice: int) -> None:
        self.state = state
        self.choice = choice
        self.key = (state.arrival, choice)
        self.order: tuple[int, ...] = self.key
        self.tokens: list[int] = [*state.request.prompt_ids, *state.outputs_of(choice)]
        self.hashes: list[BlockHash] = list(state.given_hashes)
        self.blocks: list[BlockId] = []
        self.landed_runs: list[Run] = []
        self.computed = self.launched = self.capacity = 0
        self.registered_spans = self.released_spans = self.reported_chunks = 0
        self.last_step = self.blocks_id = 0
        self.reached = self.lost_until = 0
        if state.request.after_loss:  # its newest token was never computed
            self.lost_until = len(self.tokens) - bool(state.outputs_of(choice))
        self.first_new = max(state.prompt_len, self.lost_until)
        self.awaited_sample = -1
        self.running = self.takes_short_path = self.idle = False
        self.forked_from: Sequence | None = None
        self.max_len = state.max_len
        if state.prefill_only:
            self.max_len = min(self.max_len, len(self.tokens) + 1)
        self.launch_limit = 0
        self.acceptance = Acceptance() if state.speculates else None
        self._output_counts: dict[int, int] = {}
        self.penalty_counts: PenaltyCounts | None = None
        if state.params.penalized:
            self.penalty_counts = PenaltyCounts(state.distinct_prompt, self._output_counts)
            for id in state.outputs_of(choice):
                self._count(id)
        self.matcher: Matcher | None = None
        if state.matcher is not None:
            self.matcher = state.matcher.copy()
            self.matcher.accept(state.outputs_of(choice))
        self.set_launch_limit()

    @classmethod
    def fork(cls, parent: Sequence, choice: int, id: int) -> Sequence:
        """A beam that continues another one with this token, under the number `choice`."""
        sequence = cls(parent.state, choice)
        sequence.tokens = [*parent.tokens, id]
        sequence.hashes = parent.hashes.copy()
        sequence.reported_chunks = parent.reported_chunks
        sequence.forked_from = parent
        return sequence

    def append_token(self, id: int) -> None:
        """The choice has a new token."""
        self.tokens.append(id)
        if self.penalty_counts is not None:
            self._count(id)
        if self.matcher is not None:
            self.matcher.accept((id,))

    def _count(self, id: int) -> None:
        self._output_counts[id] = self._output_counts.get(id, 0) + 1

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Number of known tokens after the computed ones; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def due(self) -> int:
        """Number of tokens to schedule before the next landed run, or before the last known token;
        at least 1 if no token is awaited."""
        for start, _ in self.landed_runs:
            if start > self.launched:
                return start - self.launched
        return len(self.tokens) - self.launched

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.state.prompt_len

    @property
    def prompt_missing(self) -> int:
        """Number of prompt tokens left to compute, without those that landed."""
        prompt = self.state.prompt_len
        return max(0, prompt - self.computed) - total(within(self.landed_runs, 0, prompt))

    def hash_spans(self, spans: int) -> list[BlockHash]:
        """Hashes of at least the first `spans` spans, which must be full. Computed on first use."""
        hashes, state = self.hashes, self.state
        size = state.block_size
        for index in range(len(hashes), spans):
            block = self.tokens[index * size : (index + 1) * size]
            hashes.append(state.name(hashes[-1] if hashes else state.root, block))
        return hashes

    def hashes_of(self, spans: int) -> Seq[BlockHash]:
        """Hashes of the first `spans` spans, which must be full."""
        return self.hash_spans(spans)[:spans]

    def set_blocks(self, blocks: list[BlockId], runs: Seq[Run] = ()) -> None:
        """Give the sequence its blocks. The tokens of `runs` already have KV in them. Each run
        begins at a block boundary, and its whole blocks are registered."""
        self.blocks, self.computed, self.landed_runs, self.released_spans = [], 0, list(runs), 0
        self.add_blocks(blocks)
        self.note_computed(0)
        self.registered_spans = self.computed // self.state.block_size
        assert self.due > 0, "at least one token must be left to compute"

    def add_blocks(self, blocks: Seq[BlockId]) -> None:
        """Append the blocks of whole spans to those the sequence has."""
        self.blocks += blocks
        self.capacity = len(self.blocks) // self.state.num_groups * self.state.block_size

    def drop_window_blocks(self) -> list[BlockId]:
        """Forget the blocks that no token from `computed` on sees, because a window has left their
        chunks, and return them. Whole chunks are kept, because the store gets whole chunks. A step
        in flight does not read the blocks either: it begins at `computed`."""
        layout = self.state.layout
        chunks = layout.first_complete(self.computed // layout.chunk_tokens)
        first, self.released_spans = self.released_spans, chunks * layout.chunk_blocks
        return drop_windowed(self.blocks, range(first, self.released_spans), layout)

    def note_launch(self, count: int, awaited: int) -> None:
        """Record that the launched step computes `count` more tokens and that its sample number
        `awaited` (-1: none) is the next token. Skip a landed run that begins there."""
        self.awaited_sample = awaited
        self.launched += count
        for start, end in self.landed_runs:
            if start == self.launched:
                self.launched = end

    def note_computed(self, count: int) -> None:
        """Record that `count` more tokens are computed. Skip a landed run that begins there."""
        self.computed += count
        if self.landed_runs and self.landed_runs[0][0] == self.computed:
            self.computed = self.landed_runs.pop(0)[1]
        self.launched = max(self.launched, self.computed)

    def set_launch_limit(self) -> None:
        """Set `launch_limit`. Call again when the prompt is done, and when drafts pause."""
        state = self.state
        starts_others = not state.prompt_done and state.params.n > 1
        if state.looks_at_tokens or starts_others:
            self.launch_limit = 0
        elif self.acceptance is None:
            self.launch_limit = self.max_len
        else:  # drafts depend on the tokens before them
            resumes_at = self.acceptance.resumes_at
            self.launch_limit = min(self.max_len, resumes_at) if resumes_at > self.known else 0

    def note_token_read(self) -> None:
        """Set `launch_limit` and `takes_short_path`, after a new token was read and all tokens
        before it are computed."""
        self.set_launch_limit()
        state = self.state
        self.takes_short_path = (
            not state.looks_at_tokens and self.num_outputs >= state.params.min_tokens
        )

    def note_eviction(self) -> None:
        """The sequence is preempted, so it may compute its tokens again."""
        self.reached = max(self.reached, self.computed)
        self.first_new = max(self.first_new, self.reached)

    def clear_blocks(self) -> list[BlockId]:
        """Forget all KV, keep the tokens, and return the blocks that held the KV."""
        blocks, self.blocks, self.landed_runs = [id for id in self.blocks if id], [], []
        self.computed = self.launched = self.capacity = 0
        self.registered_spans = self.released_spans = 0
        self.awaited_sample, self.takes_short_path = -1, False
        return blocks


@dataclass(frozen=True, slots=True)
class BlockNaming:
    """How a request's blocks get their hashes: a chain from `root`, one span of the layout's
    `block_size` tokens at a time."""

    root: BlockHash
    layout: KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Options of a submission, see EngineCore.submit."""

    prefill_only: bool = False
    track: bool = False
    report_filled: bool = False
    finished: Seq[int] = ()
    changes: tuple[ChangeLogits, ...] = ()  # of other packages' logits processors
    matcher: Matcher | None = None
    speculates: bool = False  # whether its sequences may get drafts
    account: TimeAccount | None = None


class RequestState:
    """State that the choices of one request share. `given_hashes` name the full blocks of
    `given_ids`.

    One choice is the leader and computes the prompt: the first without outputs, or else the first.
    The other choices are `pending` until the prompt is computed, and then find its full blocks in
    the prefix cache. `live` has the sequences of the choices that run.
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
        params = request.params
        self.arrival = arrival
        self.root = naming.root
        self.given_hashes = given_hashes
        self.layout = naming.layout
        self.block_size = naming.layout.block_size
        self.num_groups = naming.layout.num_groups
        self.name = block_hasher(self.block_size)
        self.prefill_only = submission.prefill_only
        self.track = submission.track
        self.report_filled = submission.report_filled
        self.finished = set(submission.finished)  # choices that are not run or reported
        self.changes = submission.changes
        self.speculates = submission.speculates
        self.account = submission.account
        self.matcher = submission.matcher  # at the start of the grammar
        # Whether blocks stay referenced until the step after the request's end.
        self.keeps_blocks = submission.track or submission.report_filled
        self.prompt_len = len(request.prompt_ids)
        self.given_len = len(given_ids(request))
        self.pending: list[int] = []
        self.live: dict[int, Sequence] = {}
        self.leader: Sequence | None = None
        self.started = False  # True once a step has computed a token of it
        self.prompt_done = False
        self.given_done = False  # True once all given tokens have KV; then tracking stops
        self.bans = BannedTokens(params)
        self.listed = ListedIds.of(params)
        # A choice ends at `max_len` tokens (prompt and outputs), and may end with an id in `stops`.
        self.max_len = min(self.prompt_len + params.max_tokens, max_tokens)
        self.stops = frozenset((*(() if params.ignore_eos else eos_ids), *params.stop_token_ids))
        self.beams: LiveBeams | None = None
        if params.use_beam_search:
            longest = self.max_len - self.prompt_len
            search = BeamSearch(params, self.stops, eos_ids=eos_ids, max_length=longest)
            self.beams = LiveBeams(search, params)
            params = self.beams.sampling
        self.params = params  # what its samples ask for
        self.looks_at_tokens = (
            params.penalized
            or bool(params.bad_words)
            or self.matcher is not None
            or self.beams is not None
            or bool(self.changes)
            or request.pooling is not None  # no row follows the one with its vector
        )
        # An array, so that the runner copies it in each step without a conversion.
        self.distinct_prompt = array("q")
        if params.penalized:
            self.distinct_prompt.extend(sorted(set(request.prompt_ids)))
        # Logprobs of the prompt's tokens from the second on, as far as the leader has computed.
        self._prompt_logprobs: list[PositionLogprobs] = []
        # Token runs of the prompt that were not computed, by source: this node's cache, its host
        # tier, the store. None until the leader is first placed.
        self._sources: list[list[Run]] | None = None

    @property
    def ended(self) -> bool:
        return not self.pending and not self.live

    @property
    def asks_prompt(self) -> bool:
        """Whether the leader must compute every prompt token, because the request wants
        prompt_logprobs and cached KV has no logits. Other choices start later and use the cache."""
        return self.params.prompt_logprobs is not None and not self.prompt_done

    @property
    def reads_no_cache(self) -> bool:
        """Whether the leader computes the prompt without cached KV."""
        return self.asks_prompt or (self.params.skip_reading_prefix_cache and not self.prompt_done)

    def take_prompt_logprobs(self, start: int, logprobs: Seq[PositionLogprobs]) -> None:
        """Store the prompt logprobs of the piece that begins at token `start`. A preempted leader
        computes and stores them again."""
        self._prompt_logprobs[start:] = logprobs

    def outputs_of(self, choice: int) -> tuple[int, ...]:
        """Output ids that the choice had when the request arrived; of a beam none."""
        outputs = self.request.outputs
        return outputs[choice] if outputs and self.beams is None else ()

    def choices_with(self, sequence: Sequence) -> list[int]:
        """Choices whose next token is sampled from the last row of `sequence`. For the leader at
        the end of the prompt, these are all choices without outputs. (The leader has no outputs if
        any choice has none.)"""
        choices = [sequence.choice]
        if sequence is self.leader and not self.prompt_done:
            choices += [choice for choice in self.pending if not self.outputs_of(choice)]
        return choices

    def record_sources(
        self,
        sequence: Sequence,
        *,
        cached: Seq[Run] = (),
        host: Seq[Run] = (),
        fetched: Seq[Run] = (),
    ) -> None:
        """Record the sources of the leader's prompt KV. After a preemption the sources can only
        shrink: tokens that this request computed itself never count as cached."""
        if sequence is not self.leader or self.prompt_done:
            return
        sources, kept = self._sources, sequence.computed
        if sources is None:
            sources, kept = [list(cached), list(host), list(fetched)], self.prompt_len
        self._sources = [within(runs, 0, min(kept, self.prompt_len)) for runs in sources]

    def prompt_use(self) -> PromptUse:
        """Sources of the prompt's KV, in tokens, and its logprobs. Call once: the logprobs are
        handed over and not kept."""
        logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        cached, host, fetched = map(total, self._sources or ((), (), ()))
        return PromptUse(
            request=self.request.id,
            prompt=self.prompt_len,
            cached=cached,
            host=host,
            fetched=fetched,
            computed=self.prompt_len - cached - host - fetched,
            logprobs=logprobs,
        )
