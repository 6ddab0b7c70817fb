"""Which chunks of a prefill job are put into the store, announced, and when the job has ended.

Pure. In: what the lookup found, how far the prompt is computed, how each put went; one method each.
Out: the next state, and what the step loop does now. Chunks that exist are announced at once; the
others are put as soon as a step has filled them (or found them in the node's own cache). Who puts
them also announces them, as soon as the store has acknowledged value and marker. `end` follows when
nothing more will come. A failed put ends the publishing of this job: the decode node computes from
there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton_node.engine.chunk_bits import chunks_of, first_chunks, runs_of


@dataclass(frozen=True, slots=True)
class PublishActions:
    """What the step loop does now, in the order of the fields."""

    announce: tuple[tuple[int, int], ...] = ()  # (first, count) of chunks that exist
    publish: tuple[int, ...] = ()  # hold their blocks before the next step, put them, announce them
    end: bool = False  # tell the decode node that no more will come; once, and last


Outcome = tuple["PublishState", PublishActions]


@dataclass(frozen=True, slots=True)
class PublishState:
    """One prefill job's chunks, as bit sets. `computed` is a count."""

    chunks: int
    computed: int = 0
    exists: int = 0
    flying: int = 0
    looked_up: bool = False
    failed: bool = False
    closed: bool = False
    ended: bool = False

    def find(self, chunks: int) -> Outcome:
        """The lookup found a marker of these chunks (a bit set); 0 where the index is out of
        reach."""
        found = chunks & first_chunks(self.chunks) & ~self.exists
        return self._become(runs_of(found), exists=self.exists | found, looked_up=True)

    def compute(self, chunks: int) -> Outcome:
        """The prompt's first `chunks` full chunks are in this node's blocks now."""
        return self._become(computed=max(self.computed, min(chunks, self.chunks)))

    def miss(self, chunk: int) -> Outcome:
        """A chunk whose marker was seen is not there after all: it is put again once computed."""
        return self._become(exists=self.exists & ~(1 << chunk))

    def settle(self, chunk: int, ok: bool) -> Outcome:
        """A put has ended."""
        bit = (1 << chunk) & self.flying
        return self._become(
            flying=self.flying & ~bit,
            failed=self.failed or not ok,
            exists=self.exists | (bit if ok else 0),
        )

    def close(self) -> Outcome:
        """No more will be computed for this job (it has ended, or was aborted)."""
        return self._become(closed=True)

    def _become(self, announce: tuple[tuple[int, int], ...] = (), **changes: Any) -> Outcome:
        """The state with these changes, and what to do now. After `end` nothing comes any more."""
        if self.ended:
            return self, PublishActions()
        return replace(self, **changes)._advance(announce)

    def _advance(self, announce: tuple[tuple[int, int], ...]) -> Outcome:
        due = 0
        if self.looked_up and not self.failed and not self.closed:
            due = first_chunks(self.computed) & ~self.exists & ~self.flying
        flying = self.flying | due
        # Not before the prompt is computed, though all chunks may exist from the start: one of them
        # may turn out to be missing, and the first token comes no sooner.
        complete = self.computed == self.chunks and self.exists == first_chunks(self.chunks)
        complete = complete and self.looked_up
        ended = not flying and (complete or self.failed or self.closed)
        state = replace(self, flying=flying, ended=ended)
        return state, PublishActions(announce, chunks_of(due), ended)
