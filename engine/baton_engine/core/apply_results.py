"""Apply a finished step's results to the sequences, the prefix cache and the counters.

In: a step and the runner's results for it. Out: an Outcome with new tokens, progress, full chunks
and the requests that ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from baton_engine.core.in_flight import InFlightStep
from baton_engine.core.kv_chunks import register, take_filled
from baton_engine.core.limits import Limits
from baton_engine.core.requests import RunningRequests
from baton_engine.interface import EngineInfo, Failed, Progress, Row, RowResult, Sampled, TokenOut
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_engine.scheduling.sequence import RequestState, Sequence, blocks_for
from baton_engine.scheduling.stop_conditions import Outcome, end_of
from baton_protocol.errors import GrammarDeadEnd

logger = logging.getLogger(__name__)


class ResultReader:
    """Applies the runner's results, one step at a time."""

    def __init__(
        self,
        info: EngineInfo,
        limits: Limits,
        pool: BlockPool,
        scheduler: Scheduler,
        requests: RunningRequests,
    ) -> None:
        self._info = info
        self._layout = info.layout
        self._windowed = info.layout.window is not None
        self._limits = limits
        self._pool = pool
        self._scheduler = scheduler
        self._requests = requests

    def take(self, step: InFlightStep, results: Seq[RowResult], outcome: Outcome) -> None:
        """Apply one result per row of `step` and add what happened to `outcome`.

        A plain sequence takes a short path that checks only what one token can change;
        _take_row() handles any sequence and gives the same result.
        """
        number, size = step.number, self._layout.block_size
        outcome.num_seqs = outcome.num_tokens = len(step.pieces)
        tokens = outcome.tokens
        for piece, row, result in zip(step.pieces, step.rows, results, strict=True):
            sequence = piece.sequence
            if sequence.step == number:
                sequence.after = -1
            if not sequence.plain:
                self._take_row(piece, row, result, outcome)
                continue
            sequence.computed = computed = row.start + 1
            if computed % size == 0:
                self._fill(sequence, row.start, computed, outcome)
                if self._windowed:
                    self._requests.leave(sequence)
            token, state = result.samples[0], sequence.state
            if computed + 1 >= sequence.end or token.id in state.stops:
                self._append(state, sequence.choice, token, outcome)
                self._requests.forget_if_ended(state, outcome.ended)
                continue
            sequence.tokens.append(token.id)
            offset = computed - state.prompt_len
            request = state.request
            tokens.append(
                TokenOut(
                    *(request.id, request.attempt, sequence.choice, offset, token.id),
                    token.logprobs,
                )
            )

    def _take_row(self, piece: Piece, row: Row, result: RowResult, outcome: Outcome) -> None:
        sequence, state = piece.sequence, piece.sequence.state
        end = row.start + piece.count
        outcome.num_tokens += piece.count - 1
        outcome.num_prompt_tokens += max(0, min(end, state.prompt_len) - row.start)
        if not sequence.running:
            return  # the sequence ended while the step was in flight
        if state.asks_prompt:
            state.take_prompt_logprobs(row.start, result.prompt)
        sequence.advance(piece.count)
        self._fill(sequence, row.start, end, outcome)
        if sequence is state.leader:
            self._report_progress(sequence, outcome)
        if self._windowed:
            self._requests.leave(sequence)
        for sample, token in zip(row.samples, result.samples, strict=True):
            self._append(state, sample.choice, token, outcome)
        if self._requests.states.get(state.request.id) is not state:
            return  # the request failed
        if row.samples and sequence.running:
            sequence.settle()
        if state.prompt_done:
            self._requests.start_others(state)
        self._requests.forget_if_ended(state, outcome.ended)

    def _fill(self, sequence: Sequence, begin: int, end: int, outcome: Outcome) -> None:
        """The KV of tokens [begin, end) is written: register full blocks, report full chunks."""
        full = sequence.computed // self._layout.block_size
        if full > sequence.registered:
            run = (sequence.registered, full)
            register(self._pool, sequence.blocks, sequence.named(full), run, self._layout)
            sequence.registered = full
        if sequence.state.report_filled:
            outcome.filled += take_filled(sequence, begin, end, self._layout)

    def _report_progress(self, leader: Sequence, outcome: Outcome) -> None:
        """Report how many of the request's given tokens the leader has computed."""
        state = leader.state
        if state.track and not state.given_done:
            spans = blocks_for(state.given_len, self._layout.block_size)
            blocks = leader.blocks[: spans * self._layout.num_groups]
            computed = min(leader.computed, state.given_len)
            outcome.progress.append(Progress(state.request.id, computed, tuple(blocks)))
            state.given_done = computed == state.given_len
        if not state.prompt_done and leader.computed >= state.prompt_len:
            state.prompt_done = True
            outcome.prompts.append(state.prompt_use())

    def _append(self, state: RequestState, choice: int, token: Sampled, outcome: Outcome) -> None:
        """Report a choice's new token, and end the choice if a stop condition holds. If its grammar
        has no continuation, the request fails."""
        if self._requests.states.get(state.request.id) is not state:
            return  # another choice failed in this step
        sequence = state.live.get(choice)
        starts = sequence is None
        if sequence is None:
            if choice not in state.pending:
                return  # the choice ended while the step was in flight
            sequence = self._requests.make(state, choice)
        sequence.append(token.id)
        count = sequence.num_outputs
        try:
            end = end_of(
                state.params,
                self._info.eos_ids,
                token.id,
                num_outputs=count,
                room=self._limits.max_tokens - sequence.known,
                matcher=sequence.matcher,
            )
        except GrammarDeadEnd as error:
            self._fail(state, error, outcome)
            return
        outcome.tokens.append(
            TokenOut(
                state.request.id,
                state.request.attempt,
                choice,
                offset=count - 1,
                id=token.id,
                logprobs=token.logprobs,
                finish=None if end is None else end.finish,
                stop_id=None if end is None else end.stop_id,
            )
        )
        if starts:
            self._scheduler.add(sequence)
        if end is not None or state.prefill_only:
            self._requests.end(state, choice, linger=state.keeps_blocks)

    def _fail(self, state: RequestState, error: GrammarDeadEnd, outcome: Outcome) -> None:
        logger.warning("request %s fails: %s", state.request.id, error)
        self._requests.forget(state)
        outcome.failed.append(Failed(state.request.id, error))
        outcome.ended.append(state.request.id)
