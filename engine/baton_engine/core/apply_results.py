"""Apply a finished step's results to the sequences, the prefix cache and the counters.

In: a step and the runner's results for it. Out: the new tokens, progress, full chunks and ended
requests of a StepResult.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from baton_engine.core.beam_requests import BeamRequests
from baton_engine.core.in_flight import InFlightStep
from baton_engine.core.kv_chunks import register, take_filled
from baton_engine.core.request_limits import RequestLimits
from baton_engine.core.requests import RunningRequests
from baton_engine.interface import (
    Complete,
    Drafts,
    EngineInfo,
    Progress,
    Row,
    RowResult,
    Sampled,
    StepResult,
    TokenOut,
)
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_engine.scheduling.sequence import RequestState, Sequence, blocks_for
from baton_engine.scheduling.stop_conditions import end_of
from baton_protocol.errors import GrammarDeadEnd


class ResultReader:
    """Applies the runner's results, one step at a time."""

    def __init__(
        self,
        info: EngineInfo,
        limits: RequestLimits,
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
        self._beams = BeamRequests(scheduler, requests)

    def take(self, step: InFlightStep, results: Seq[RowResult], step_result: StepResult) -> None:
        """Apply one result per row of `step` and add what happened to `step_result`.

        The short path checks only what one token of a decoding sequence can change;
        _take_row() handles any sequence and gives the same result.
        """
        number, size = step.number, self._layout.block_size
        step_result.num_seqs = step_result.num_tokens = len(step.pieces)
        tokens = step_result.tokens
        for piece, row, result in zip(step.pieces, step.rows, results, strict=True):
            sequence = piece.sequence
            if sequence.last_step == number:
                sequence.awaited_sample = -1
            if piece.drafts:
                self._take_drafted(piece, row, result, step_result)
                continue
            if not sequence.takes_short_path:
                self._take_row(piece, row, result, step_result)
                continue
            sequence.computed = computed = row.start + 1
            if computed % size == 0:
                self._fill(sequence, row.start, computed, step_result)
                if self._windowed:
                    self._requests.release_window_blocks(sequence)
            token, state = result.samples[0], sequence.state
            if computed + 1 >= sequence.max_len or token.id in state.stops:
                self._append(state, sequence.choice, token, step_result)
                self._requests.forget_if_ended(state, step_result)
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

    def _take_row(self, piece: Piece, row: Row, result: RowResult, step_result: StepResult) -> None:
        sequence, state = piece.sequence, piece.sequence.state
        end = row.start + piece.count
        step_result.num_tokens += piece.count - 1
        step_result.num_prompt_tokens += max(0, min(end, state.prompt_len) - row.start)
        if not sequence.running:
            return  # the sequence ended while the step was in flight
        if not state.started:
            state.started = True
            step_result.started.append(state.request.id)
        if state.asks_prompt:
            state.take_prompt_logprobs(row.start, result.prompt)
        sequence.note_computed(piece.count)
        self._fill(sequence, row.start, end, step_result)
        if sequence is state.leader:
            self._report_progress(sequence, step_result)
        if self._windowed:
            self._requests.release_window_blocks(sequence)
        for sample, token in zip(row.samples, result.samples, strict=True):
            self._append(state, sample.choice, token, step_result)
        if row.pooling is not None:
            self._answer(sequence, result.vector, step_result)
        if self._requests.states.get(state.request.id) is not state:
            return  # the request failed
        if row.samples and sequence.running:
            sequence.note_token_read()
        if state.prompt_done:
            self._requests.start_others(state)
        self._requests.forget_if_ended(state, step_result)

    def _take_drafted(
        self, piece: Piece, row: Row, result: RowResult, step_result: StepResult
    ) -> None:
        """Apply a row with drafts as the steps of one token that it stands for, up to the first
        sample that differs from the draft after it. The KV of the other drafts is not used: the
        next row of the sequence begins where this one ended, and writes over it."""
        sequence, state = piece.sequence, piece.sequence.state
        drafts, accepted = piece.drafts, 0
        step_result.num_tokens += len(drafts)
        for draft, token in zip((*drafts, None), result.samples, strict=True):
            if not sequence.running:
                break  # the sequence ended, maybe while the step was in flight
            sequence.note_computed(1)
            sequence.launched = sequence.computed
            self._fill(sequence, sequence.computed - 1, sequence.computed, step_result)
            if sequence is state.leader:
                self._report_progress(sequence, step_result)
            if self._windowed:
                self._requests.release_window_blocks(sequence)
            self._append(state, sequence.choice, token, step_result)
            if token.id != draft:
                break
            accepted += 1
        request, acceptance = state.request, sequence.acceptance
        forced = acceptance is not None and acceptance.forced
        step_result.drafts.append(
            Drafts(request.id, request.attempt, len(drafts), accepted, forced)
        )
        if acceptance is not None:
            acceptance.note(len(drafts), accepted)
        if self._requests.states.get(state.request.id) is not state:
            return  # the request failed
        if sequence.running:
            sequence.note_token_read()
        self._requests.forget_if_ended(state, step_result)

    def _fill(self, sequence: Sequence, begin: int, end: int, step_result: StepResult) -> None:
        """The KV of tokens [begin, end) is written: register full blocks, report full chunks."""
        full = sequence.computed // self._layout.block_size
        if full > sequence.registered_spans:
            run = (sequence.registered_spans, full)
            register(self._pool, sequence.blocks, sequence.hash_spans(full), run, self._layout)
            sequence.registered_spans = full
        state = sequence.state
        # Most beams are dropped, and no later attempt looks for their KV.
        if state.report_filled and not (state.beams is not None and state.prompt_done):
            step_result.filled += take_filled(sequence, begin, end, self._layout)

    def _report_progress(self, leader: Sequence, step_result: StepResult) -> None:
        """Report how many of the request's given tokens the leader has computed."""
        state = leader.state
        if state.track and not state.given_done:
            spans = blocks_for(state.given_len, self._layout.block_size)
            blocks = leader.blocks[: spans * self._layout.num_groups]
            computed = min(leader.computed, state.given_len)
            step_result.progress.append(Progress(state.request.id, computed, tuple(blocks)))
            state.given_done = computed == state.given_len
        if not state.prompt_done and leader.computed >= state.prompt_len:
            state.prompt_done = True
            step_result.prompts.append(state.prompt_use())

    def _answer(self, sequence: Sequence, vector: bytes, step_result: StepResult) -> None:
        """A pooling request has its vector: end it. Its blocks are free, and like all free blocks
        they are found by the prefix cache until they are reused."""
        state, choice = sequence.state, sequence.choice
        ids = state.request.id, state.request.attempt
        step_result.complete.append(Complete(*ids, choice, 0, "stop", vector=vector))
        self._requests.end(state, choice, linger=state.keeps_blocks)

    def _append(
        self, state: RequestState, choice: int, token: Sampled, step_result: StepResult
    ) -> None:
        """Report a choice's new token, and end the choice if a stop condition holds. If its grammar
        has no continuation, the request fails."""
        if self._requests.states.get(state.request.id) is not state:
            return  # another choice failed in this step
        if state.beams is not None:
            self._beams.take(state, state.beams, choice, token, step_result)
            return
        sequence = state.live.get(choice)
        starts = sequence is None
        if sequence is None:
            if choice not in state.pending:
                return  # the choice ended while the step was in flight
            sequence = self._requests.make(state, choice)
        sequence.append_token(token.id)
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
            self._requests.fail(state, error, step_result)
            return
        step_result.tokens.append(
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
