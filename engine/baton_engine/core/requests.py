"""The requests that run: their choices, who leads, and how they end.

In: requests with their choices to run. Out: sequences in the scheduler's queues, blocks given back
when they end, and which requests ended. A step may still use blocks of a choice that has ended:
they are given back when it was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from baton_engine.core.in_flight import InFlightSteps
from baton_engine.core.reservations import Reservations
from baton_engine.interface import Reservation
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.ranges import Run
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import RequestState, Sequence
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.layout import KVLayout


class RunningRequests:
    """`states` are the requests that run, by id."""

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
        # Blocks of requests that ended in the last step, which the step loop may still hold.
        self.lingering: list[list[BlockId]] = []

    def start_leader(
        self,
        state: RequestState,
        reservation: Reservation | None = None,
        landed: Seq[Run] = (),
    ) -> None:
        """Let a pending choice compute the prompt, from the reservation if there is one."""
        if not state.pending:
            if reservation is not None:
                self._reservations.release(reservation)
            return
        # One without outputs is best: the others' first tokens come from its last row.
        fresh = [choice for choice in state.pending if not state.outputs_of(choice)]
        state.leader = self.make(state, fresh[0] if fresh else state.pending[0])
        if reservation is not None:
            self._reservations.use(state.leader, reservation, landed)
        self._scheduler.add(state.leader)

    def make(self, state: RequestState, choice: int) -> Sequence:
        """A sequence for a pending choice, to be queued by the caller."""
        state.pending.remove(choice)
        sequence = state.live[choice] = Sequence(state, choice)
        if state.leader is not None:  # what it has told of the prompt is not told again
            prompt_chunks = state.prompt_len // self._layout.chunk_tokens
            sequence.passed = min(state.leader.passed, prompt_chunks)
        return sequence

    def start_others(self, state: RequestState) -> None:
        """The prompt is computed: all choices run."""
        for choice in tuple(state.pending):
            self._scheduler.add(self.make(state, choice))

    def end(self, state: RequestState, choice: int, *, linger: bool = False) -> None:
        """End a live choice. Its blocks may be held until the next step if they are to `linger`."""
        sequence = state.live.pop(choice)
        self.take_out(sequence, linger=linger)
        if sequence is state.leader and not state.prompt_done:
            self.start_leader(state)

    def take_out(self, sequence: Sequence, *, linger: bool = False) -> None:
        """Out of the queues, and its blocks given back as soon as that may be."""
        blocks = self._scheduler.remove(sequence)
        if self._in_flight.release(sequence, blocks):
            return
        if linger:
            self.lingering.append(blocks)
        else:
            self._pool.release(blocks)

    def forget_if_ended(self, state: RequestState, ended: list[RequestId]) -> None:
        """A request none of whose choices runs any more is no longer known, and told in `ended`."""
        if state.ended and self.states.pop(state.request.id, None) is not None:
            ended.append(state.request.id)

    def release_lingering(self) -> None:
        """The step loop holds by now what it wants of blocks that linger."""
        for blocks in self.lingering:
            self._pool.release(blocks)
        self.lingering = []

    def references(self) -> Counter[BlockId]:
        """How often each block is held for requests that run or have ended."""
        found = Counter(self._in_flight.blocks())
        for state in self.states.values():
            for sequence in state.live.values():
                found.update(sequence.blocks)
        for blocks in self.lingering:
            found.update(blocks)
        return found
