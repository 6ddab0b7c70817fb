"""EngineCore: api.Engine over one scheduler, one block pool and any Runner.

In: requests, reservations, runs of blocks that landed. Out: per step the new tokens, how far
tracked requests are, which chunks are full, and who ended. One thread, no clock, no torch.

A request of n choices is n sequences that share the prompt's full blocks. Its leader (the first
choice that runs) computes the prompt; at the prompt's end one row of logits is sampled for every
choice that has no token yet, and the others start from there.

Errors: InvalidRequest and PromptTooLong for what a client may have sent; ValueError for calls that
break the contract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton_engine.api import (
    CacheChange,
    Complete,
    EngineInfo,
    Filled,
    KVMemory,
    Progress,
    Reservation,
    Runner,
    Sampled,
    StepResult,
    TokenOut,
)
from baton_engine.blocks import BlockPool
from baton_engine.chunks import full_chunks, take_filled
from baton_engine.host_tier import HostMemory, HostTier
from baton_engine.limits import Limits
from baton_engine.outcome import Outcome, Totals, finish_of
from baton_engine.rows import make_row
from baton_engine.runs import Run, check_runs, merged, within
from baton_engine.scheduler import Piece, Scheduler
from baton_engine.sequence import RequestState, blocks_for, given_ids
from baton_engine.sequence import Sequence as Choice
from baton_protocol.hashing import extend_hashes, root_hash
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.request import Request
from baton_protocol.store import NodeLoad


class EngineCore:
    """The engine's state between steps. See api.Engine for the contract of each method."""

    def __init__(self, info: EngineInfo, runner: Runner, host: HostMemory | None = None) -> None:
        if runner.memory.layout != info.layout:
            raise ValueError(f"the runner's pool is {runner.memory.layout}, not {info.layout}")
        self.info = info
        self.memory: KVMemory = runner.memory
        self._runner = runner
        self._block_size = info.layout.block_size
        self._pool = BlockPool(info.num_blocks, HostTier(host))
        self._scheduler = Scheduler(
            self._pool,
            block_size=self._block_size,
            max_batched_tokens=info.max_batched_tokens,
            max_num_seqs=info.max_num_seqs,
        )
        self._limits = Limits(info)
        self._states: dict[RequestId, RequestState] = {}
        self._reservations: dict[RequestId, Reservation] = {}
        self._holds: Counter[BlockId] = Counter()
        # Blocks of requests that ended in the last step, which the step loop may still hold.
        self._lingering: list[list[BlockId]] = []
        # Ended between steps, or came complete; the next step reports them.
        self._ended: list[RequestId] = []
        self._complete: list[Complete] = []
        self._arrivals = 0
        self._totals = Totals()

    @property
    def runner(self) -> Runner:
        """Computes the steps; a node asks it how fast it is before it takes requests."""
        return self._runner

    # --- before a request runs ------------------------------------------------------------------

    def block_hashes(self, request: Request) -> tuple[BlockHash, ...]:
        root = root_hash(self.info.fingerprint, request.adapter, request.salt)
        return tuple(extend_hashes(root, given_ids(request), self._block_size))

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        return self._pool.cached(hashes)

    def reserve(self, request: Request) -> Reservation | None:
        """See api.Engine. All that is known may be cached here (the next token may still come from
        elsewhere); submit() leaves one token to compute. None also while free blocks are owed to a
        waiting request. Nothing is cached for a request that asks for prompt_logprobs. Raises like
        submit() for a request that can never run."""
        self._limits.check(request)
        if request.id in self._reservations:
            raise ValueError(f"request {request.id} has a reservation already")
        hashes = self.block_hashes(request)
        findable = hashes if request.params.prompt_logprobs is None else ()
        # One that came with all its tokens may know one more than the pool holds: its last.
        size = min(blocks_for(len(given_ids(request)), self._block_size), self.info.num_blocks)
        if self._scheduler.owes_blocks:
            return None
        taken = self._pool.take(size, findable, spare=self._scheduler.spare)
        if taken is None:
            return None
        self._pool.host.settle()  # transfers may write into the blocks from now on
        found = taken.cached + taken.loaded
        reservation = Reservation(request.id, tuple(taken.blocks), hashes, found, taken.loaded)
        self._reservations[request.id] = reservation
        return reservation

    def release(self, reservation: Reservation) -> None:
        if self._reservations.get(reservation.request) is reservation:
            del self._reservations[reservation.request]
            self._pool.release(reservation.blocks)

    def submit(
        self,
        request: Request,
        *,
        reservation: Reservation | None = None,
        landed: Sequence[Run] = (),
        prefill_only: bool = False,
        track: bool = False,
        report_filled: bool = False,
        finished: Sequence[int] = (),
    ) -> None:
        """See api.Engine. Where this raises, the reservation is still the caller's."""
        self._limits.check(request)
        if request.id in self._states:
            raise ValueError(f"request {request.id} is running already")
        if reservation is not None:
            if self._reservations.get(request.id) is not reservation:
                raise ValueError(f"request {request.id} does not own this reservation")
            check_runs(landed, len(reservation.hashes))
        self._arrivals += 1
        state = RequestState(
            request,
            arrival=self._arrivals,
            root=root_hash(self.info.fingerprint, request.adapter, request.salt),
            given_hashes=reservation.hashes if reservation else self.block_hashes(request),
            block_size=self._block_size,
            prefill_only=prefill_only,
            track=track,
            report_filled=report_filled,
        )
        self._states[request.id] = state
        # An earlier attempt that ended between steps is known to whoever ended it: the next step's
        # `finished` must not name this one.
        self._ended = [ended for ended in self._ended if ended != request.id]
        self._complete = [each for each in self._complete if each.request != request.id]
        for choice in range(request.params.n):
            if choice in finished:
                continue
            complete = self._limits.complete(request, choice)
            if complete is None:
                state.pending.append(choice)
            else:
                self._complete.append(complete)
        self._start_leader(state, reservation, () if state.asks_prompt else landed)
        self._forget_if_ended(state, self._ended)

    def _start_leader(
        self,
        state: RequestState,
        reservation: Reservation | None = None,
        landed: Sequence[Run] = (),
    ) -> None:
        if reservation is not None:
            del self._reservations[reservation.request]
        if not state.pending:
            if reservation is not None:
                self._pool.release(reservation.blocks)
            return
        # One without outputs is best: the others' first tokens come from its last row.
        fresh = [choice for choice in state.pending if not state.outputs_of(choice)]
        state.leader = self._make_choice(state, fresh[0] if fresh else state.pending[0])
        if reservation is not None:
            self._place_landed(state.leader, reservation, landed)
        self._scheduler.add(state.leader)

    def _make_choice(self, state: RequestState, choice: int) -> Choice:
        state.pending.remove(choice)
        sequence = state.live[choice] = Choice(state, choice)
        if state.leader is not None:  # what it has told of the prompt is not told again
            prompt_chunks = state.prompt_len // self.info.layout.chunk_tokens
            sequence.passed = min(state.leader.passed, prompt_chunks)
        return sequence

    def _place_landed(
        self, leader: Choice, reservation: Reservation, landed: Sequence[Run]
    ) -> None:
        """Start from a reservation: register what landed, and keep one token to compute."""
        size, cached = self._block_size, reservation.cached
        blocks, computable = list(reservation.blocks), leader.known - 1
        # The block of the last known token is not registered: it will be written.
        whole = computable // size
        for start, end in within(landed, cached, whole):
            self._register(blocks, reservation.hashes, start, end)
        if cached > whole:
            # All that is known is cached. What others may read is never rewritten: the last block
            # is computed anew, in another place.
            self._pool.release([blocks.pop()])
            computable = whole * size
        found = merged([(0, cached), *landed])
        runs = within([(start * size, end * size) for start, end in found], 0, computable)
        leader.place(blocks, runs)
        own, shared = (cached - reservation.loaded) * size, min(cached * size, computable)
        leader.state.placed(
            leader,
            cached=within([(0, own)], 0, shared),
            host=within([(own, shared)], 0, shared),
            fetched=within(runs, shared, computable),
        )

    def _register(
        self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        chunk = self.info.layout.chunk_blocks
        for index in range(start, end):
            self._pool.register(blocks[index], hashes[index], ends_chunk=(index + 1) % chunk == 0)

    # --- ending early ---------------------------------------------------------------------------

    def finish_choice(self, request: RequestId, choice: int) -> None:
        """See api.Engine. If this ended the request, the next step's `finished` names it."""
        state = self._states.get(request)
        if state is None:
            return
        if choice in state.pending:
            state.pending.remove(choice)
        elif choice in state.live:
            self._pool.release(self._end_choice(state, choice))
        self._forget_if_ended(state, self._ended)

    def abort(self, request: RequestId) -> None:
        state = self._states.pop(request, None)
        if state is None:
            return
        for sequence in state.live.values():
            self._pool.release(self._scheduler.remove(sequence))

    def _end_choice(self, state: RequestState, choice: int) -> list[BlockId]:
        """Take a live choice out and return its blocks, still referenced."""
        sequence = state.live.pop(choice)
        blocks = self._scheduler.remove(sequence)
        if sequence is state.leader and not state.prompt_done:
            self._start_leader(state)
        return blocks

    def _forget_if_ended(self, state: RequestState, ended: list[RequestId]) -> None:
        if state.ended and self._states.pop(state.request.id, None) is not None:
            ended.append(state.request.id)

    # --- blocks in transfer -----------------------------------------------------------------------

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self._pool.touch(blocks)
        self._holds.update(blocks)

    def unhold(self, blocks: Sequence[BlockId]) -> None:
        missing = Counter(blocks) - self._holds
        if missing:
            raise ValueError(f"blocks {sorted(missing)} are given back and were not held")
        self._holds.subtract(blocks)
        self._pool.release(blocks)

    # --- steps ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._states or self._ended or self._lingering)

    def step(self) -> StepResult:
        """See api.Engine. If the runner raises, nothing is lost: the step can be tried again."""
        for blocks in self._lingering:
            self._pool.release(blocks)
        self._lingering = []
        pieces = self._scheduler.schedule()
        self._pool.host.move()
        rows = [make_row(piece, self.info) for piece in pieces]
        results = self._runner.launch(rows).read() if rows else []
        outcome = Outcome(ended=self._ended, complete=self._complete)
        self._ended, self._complete = [], []
        for piece, row, result in zip(pieces, rows, results, strict=True):
            state = piece.sequence.state
            if state.asks_prompt:
                state.take_prompt_logprobs(row.start, result.prompt)
            self._advance(piece, outcome)
            for sample, token in zip(row.samples, result.samples, strict=True):
                self._append(state, sample.choice, token, outcome)
            if state.prompt_done:
                for choice in list(state.pending):
                    self._scheduler.add(self._make_choice(state, choice))
            self._forget_if_ended(state, outcome.ended)
        outcome.add_to(self._totals)
        return outcome.result()

    def _advance(self, piece: Piece, outcome: Outcome) -> None:
        """The piece's KV is written: register its full blocks, and tell what is there now."""
        sequence, state = piece.sequence, piece.sequence.state
        outcome.num_tokens += piece.count
        outcome.num_prompt_tokens += min(piece.count, sequence.prompt_missing)
        outcome.num_seqs += 1
        begin, end = sequence.computed, sequence.computed + piece.count
        sequence.advance(piece.count)
        full = sequence.computed // self._block_size
        if full > sequence.registered:
            hashes = sequence.hashes_of(full)
            self._register(sequence.blocks, hashes, sequence.registered, full)
            sequence.registered = full
        if state.report_filled:
            outcome.filled += take_filled(sequence, begin, end, self.info.layout)
        if sequence is not state.leader:
            return
        if state.track and not state.given_done:
            blocks = sequence.blocks[: blocks_for(state.given_len, self._block_size)]
            computed = min(sequence.computed, state.given_len)
            outcome.progress.append(Progress(state.request.id, computed, tuple(blocks)))
            state.given_done = computed == state.given_len
        if not state.prompt_done and sequence.computed >= state.prompt_len:
            state.prompt_done = True
            outcome.prompts.append(state.prompt_use())

    def _append(self, state: RequestState, choice: int, token: Sampled, outcome: Outcome) -> None:
        """A choice has a new token: tell, and end the choice or let it go on."""
        sequence = state.live.get(choice)
        starts = sequence is None
        if sequence is None:
            sequence = self._make_choice(state, choice)
        sequence.append(token.id)
        count = sequence.num_outputs
        finish = finish_of(
            state.params,
            self.info.eos_ids,
            token.id,
            num_outputs=count,
            room=self._limits.max_tokens - sequence.known,
        )
        outcome.tokens.append(
            TokenOut(
                state.request.id,
                choice,
                offset=count - 1,
                id=token.id,
                logprobs=token.logprobs,
                finish=finish,
                stop_id=token.id if finish == "stop" else None,
            )
        )
        if starts:
            self._scheduler.add(sequence)
        if finish is not None or state.prefill_only:
            blocks = self._end_choice(state, choice)
            if state.keeps_blocks:
                self._lingering.append(blocks)
            else:
                self._pool.release(blocks)

    def starved(self) -> bool:
        """See api.Engine. Not for a request that merely waits its turn while others run: parked
        requests would lose their blocks to every queue."""
        return self._scheduler.starved

    # --- what it tells ----------------------------------------------------------------------------

    def cache_changes(self) -> CacheChange:
        return self._pool.take_changes()

    def full_chunks(self, request: RequestId) -> tuple[Filled, ...]:
        state = self._states.get(request)
        return full_chunks(state, self.info.layout) if state is not None else ()

    def cached_chunks(self) -> tuple[BlockHash, ...]:
        return self._pool.cached_chunks()

    def load(self) -> NodeLoad:
        scheduler = self._scheduler
        return NodeLoad(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            queued_tokens=sum(each.prompt_missing for each in scheduler.sequences()),
            preemptions_total=scheduler.preemptions,
            **self._pool.figures(),
            **self._totals.figures(),
        )

    def check_integrity(self) -> None:
        expected = Counter(self._holds)
        for state in self._states.values():
            for sequence in state.live.values():
                expected.update(sequence.blocks)
        for reservation in self._reservations.values():
            expected.update(reservation.blocks)
        for blocks in self._lingering:
            expected.update(blocks)
        self._pool.check_integrity(expected)
