"""Which chunks of a prefill job are put into the store, announced, and when the job has ended.

Pure. In: what the lookup found, how far the prompt is computed, how each put went. Out: actions for
the step loop. Chunks that exist are announced at once; the others are put as soon as a step has
filled them (or found them in the node's own cache). Who puts them also announces them, as soon as
the store has acknowledged value and marker. "end" follows when nothing more will come. A failed put
ends the publishing of this job: the decode node computes from there.

    LookedUp Computed Missing Settled Closed  ->  Publish(chunk)  Announce(first, count)  End
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LookedUp:
    """These chunks have a marker (a bit set); 0 where the index is out of reach."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt's first `chunks` full chunks are in this node's blocks now."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A chunk whose marker was seen is not there after all: it is put again once computed."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Settled:
    chunk: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """No more will be computed for this job (it has ended, or was aborted)."""


Event = LookedUp | Computed | Missing | Settled | Closed


@dataclass(frozen=True, slots=True)
class Publish:
    """Hold the chunk's blocks now, before the next step, put them, and announce what was put."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the decode node that chunks [first, first + count) exist."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class End:
    """Tell the decode node that no more will come. Comes once, and last."""


Action = Publish | Announce | End


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


def step(state: PublishState, event: Event) -> tuple[PublishState, list[Action]]:
    """The next state and what to do now. After End nothing comes any more."""
    if state.ended:
        return state, []
    actions: list[Action] = []
    match event:
        case LookedUp(chunks):
            found = chunks & _ones(state.chunks) & ~state.exists
            actions.extend(_runs(found))
            state = replace(state, exists=state.exists | found, looked_up=True)
        case Computed(chunks):
            state = replace(state, computed=max(state.computed, min(chunks, state.chunks)))
        case Missing(chunk):
            state = replace(state, exists=state.exists & ~(1 << chunk))
        case Settled(chunk, ok):
            bit = (1 << chunk) & state.flying
            state = replace(state, flying=state.flying & ~bit, failed=state.failed or not ok)
            if bit and ok:
                state = replace(state, exists=state.exists | bit)
        case Closed():
            state = replace(state, closed=True)
    return _advance(state, actions)


def _advance(state: PublishState, actions: list[Action]) -> tuple[PublishState, list[Action]]:
    if state.looked_up and not state.failed and not state.closed:
        due = _ones(state.computed) & ~state.exists & ~state.flying
        actions.extend(Publish(chunk) for chunk in _bits(due))
        state = replace(state, flying=state.flying | due)
    # Not before the prompt is computed, though all chunks may exist from the start: one of them may
    # turn out to be missing, and the first token comes no sooner.
    complete = state.computed == state.chunks and state.exists == _ones(state.chunks)
    complete = complete and state.looked_up
    if not state.flying and (complete or state.failed or state.closed):
        actions.append(End())
        state = replace(state, ended=True)
    return state, actions


def _ones(count: int) -> int:
    return (1 << count) - 1


def _bits(bits: int) -> list[int]:
    found = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found


def _runs(bits: int) -> list[Action]:
    """One Announce per run of neighbouring chunks."""
    runs: list[Action] = []
    while bits:
        first = (bits & -bits).bit_length() - 1
        rest = ~(bits >> first)
        count = (rest & -rest).bit_length() - 1
        runs.append(Announce(first, count))
        bits &= ~(_ones(count) << first)
    return runs
