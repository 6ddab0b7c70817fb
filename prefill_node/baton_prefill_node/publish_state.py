"""Which chunks of a prefill job to put, what to announce, when to end: a pure state machine.

In: a job's events. Out: the next state, and the actions that the Publisher carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from baton_node.engine.chunk_sets import chunks_of, first_chunks, runs_of

PublishTransition: TypeAlias = "tuple[PublishState, PublishActions]"


@dataclass(frozen=True, slots=True)
class PublishActions:
    """What the Publisher does next, in the order of the fields."""

    announce: tuple[tuple[int, int], ...] = ()  # runs (first, count) of chunks already stored
    publish: tuple[int, ...] = ()  # chunks to put; hold their blocks before the next step
    end: bool = False  # announce that no more chunks follow; set once, as the last action


@dataclass(frozen=True, slots=True)
class PublishState:
    """Pure state machine of one prefill job: which chunks to put, what to announce, when to end.

    It has one method per event: the lookup's result, computed chunks, the result of a put, the end
    of the job. Each returns the next state and the actions. Chunks that exist are announced at
    once. Other chunks are put as soon as a step has filled them or found them in the node's cache;
    the connector announces such a chunk once its value and marker are stored. `end` follows when no
    more chunks can come. A failed put ends the publishing of the job: the decode node computes the
    rest.

    Sets of chunks are bit sets (see `baton_node.engine.chunk_sets`).
    """

    chunks: int  # number of full chunks in the prompt
    unneeded: int = 0  # chunks whose KV nobody needs, a bit set
    computed: int = 0  # number of leading chunks whose KV is in this node's blocks
    exists: int = 0  # chunks known to be in the store, a bit set
    flying: int = 0  # chunks whose put is in flight, a bit set
    looked_up: bool = False
    failed: bool = False  # a put has failed
    closed: bool = False  # the job computes no more
    ended: bool = False  # `end` was returned

    def find(self, chunks: int) -> PublishTransition:
        """The lookup found markers of these chunks (a bit set); 0 if the index is unreachable."""
        stored = chunks & self._needed & ~self.exists
        return self._become(runs_of(stored), exists=self.exists | stored, looked_up=True)

    def compute(self, chunks: int) -> PublishTransition:
        """This node's blocks now hold the KV of the prompt's first `chunks` chunks."""
        return self._become(computed=max(self.computed, min(chunks, self.chunks)))

    def miss(self, chunk: int) -> PublishTransition:
        """The store has lost a chunk whose marker was found: put it again once computed."""
        return self._become(exists=self.exists & ~(1 << chunk))

    def settle(self, chunk: int, ok: bool) -> PublishTransition:
        """The put of a chunk has succeeded (`ok`) or failed."""
        bit = (1 << chunk) & self.flying
        return self._become(
            flying=self.flying & ~bit,
            failed=self.failed or not ok,
            exists=self.exists | (bit if ok else 0),
        )

    def close(self) -> PublishTransition:
        """The job has ended or was aborted: it computes no more chunks."""
        return self._become(closed=True)

    @property
    def _needed(self) -> int:
        return first_chunks(self.chunks) & ~self.unneeded

    def _become(
        self, announce: tuple[tuple[int, int], ...] = (), **changes: Any
    ) -> PublishTransition:
        """Return the state with these changes, and the actions. After `end` there are none."""
        if self.ended:
            return self, PublishActions()
        return replace(self, **changes)._advance(announce)

    def _advance(self, announce: tuple[tuple[int, int], ...]) -> PublishTransition:
        due = 0
        if self.looked_up and not self.failed and not self.closed:
            due = first_chunks(self.computed) & self._needed & ~self.exists & ~self.flying
        flying = self.flying | due
        # Even if all chunks exist from the start, wait until the prompt is computed: a chunk may
        # turn out to be missing, and an earlier end would not make the first token come earlier.
        complete = self.computed == self.chunks and self.exists == self._needed
        complete = complete and self.looked_up
        ended = not flying and (complete or self.failed or self.closed)
        state = replace(self, flying=flying, ended=ended)
        return state, PublishActions(announce, chunks_of(due), ended)
