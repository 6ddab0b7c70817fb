"""Running requests: their choices, their leader, and how they end.

In: requests with the choices to run. Out: sequences in the scheduler's queues, released blocks, and
the requests that ended. A step in flight may still use the blocks of an ended choice; these are
released when the step is read.
"""

from __future__ import annotations

import logging
from collections import Counter

from baton_engine.core.in_flight import InFlightSteps
from baton_engine.core.reservations import NOTHING, Landed, Reservations
from baton_engine.interface import Failed, Reservation, StepResult
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import RequestState, Sequence
from baton_protocol.errors import BatonError
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.layout import KVLayout

logger = logging.getLogger(__name__)


class RunningRequests:
    """`states` has the running requests by id."""

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        scheduler: Scheduler,
        reservations: Reservations,
        in_flight: InFlightSteps,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._scheduler = scheduler
        self._reservations = reservations
        self._in_flight = in_flight
        self.states: dict[RequestId, RequestState] = {}
        # Blocks of choices that ended in the last step, and blocks that a window left in it. They
        # stay referenced until the next step, because the step loop may still take a hold on them
        # for a transfer.
        self.lingering: list[list[BlockId]] = []

    def start_leader(
        self,
        state: RequestState,
        reservation: Reservation | None = None,
        landed: Landed = NOTHING,
    ) -> None:
        """Make a pending choice the leader and queue it. It starts from the reservation, if any,
        and from what landed in it. Without a pending choice, release the reservation."""
        if not state.pending:
            if reservation is not None:
                self._reservations.release(reservation)
            return
        # Prefer a choice without outputs: its last prompt row gives the others' first tokens.
        fresh = [choice for choice in state.pending if not state.outputs_of(choice)]
        state.leader = self.make(state, fresh[0] if fresh else state.pending[0])
        if reservation is not None:
            self._reservations.use(state.leader, reservation, landed)
        self._scheduler.add(state.leader)

    def make(self, state: RequestState, choice: int) -> Sequence:
        """Create the sequence of a pending choice. The caller queues it."""
        state.pending.remove(choice)
        sequence = state.live[choice] = Sequence(state, choice)
        if state.leader is not None:  # do not report the prompt's chunks again
            prompt_chunks = state.prompt_len // self._layout.chunk_tokens
            sequence.reported_chunks = min(state.leader.reported_chunks, prompt_chunks)
        return sequence

    def start_others(self, state: RequestState) -> None:
        """Queue all pending choices, now that the prompt is computed."""
        for choice in tuple(state.pending):
            self._scheduler.add(self.make(state, choice))

    def end(self, state: RequestState, choice: int, *, linger: bool = False) -> None:
        """End a live choice. With `linger`, its blocks stay referenced until the next step. If the
        leader ends before the prompt is computed, a pending choice becomes the leader."""
        sequence = state.live.pop(choice)
        self.take_out(sequence, linger=linger)
        if sequence is state.leader and not state.prompt_done:
            self.start_leader(state)

    def leave_out_answer(self, state: RequestState, choice: int) -> None:
        """Report no answer of this number. End the search if no other is wanted."""
        state.finished = {*state.finished, choice}
        if len(state.finished) == state.params.n:
            state.pending.clear()
            for beam in list(state.live):
                self.end(state, beam)

    def forget(self, state: RequestState) -> None:
        """End all choices of a request, and forget it."""
        self.states.pop(state.request.id, None)
        for sequence in state.live.values():
            self.take_out(sequence)

    def take_out(self, sequence: Sequence, *, linger: bool = False) -> None:
        """Remove a sequence that has ended from the queues, and release its blocks as soon as no
        step uses them."""
        blocks = self._scheduler.end(sequence)
        if self._in_flight.release(sequence, blocks):
            return
        if linger:
            self.lingering.append(blocks)
        else:
            self._pool.release(blocks)

    def release_window_blocks(self, sequence: Sequence) -> None:
        """Release the blocks that a window has left."""
        blocks = sequence.drop_window_blocks()
        if blocks and sequence.state.keeps_blocks:
            self.lingering.append(blocks)
        elif blocks:
            self._pool.release(blocks)

    def fail(self, state: RequestState, error: BatonError, result: StepResult) -> None:
        """End a request that cannot go on, and report it."""
        logger.warning("request %s fails: %s", state.request.id, error)
        self.forget(state)
        result.failed.append(Failed(state.request.id, error))
        result.finished.append(state.request.id)

    def forget_if_ended(self, state: RequestState, result: StepResult) -> None:
        """Forget the request and report it as finished, if all its choices have ended."""
        if state.ended and self.states.pop(state.request.id, None) is not None:
            result.finished.append(state.request.id)

    def release_lingering(self) -> None:
        """Release lingering blocks. By now the step loop has its own references to those it
        needs."""
        for blocks in self.lingering:
            self._pool.release(blocks)
        self.lingering = []

    def references(self) -> Counter[BlockId]:
        """Number of references to each block by running and ended requests."""
        references = Counter(self._in_flight.blocks())
        for state in self.states.values():
            for sequence in state.live.values():
                references.update(id for id in sequence.blocks if id)
        for blocks in self.lingering:
            references.update(blocks)
        return references
