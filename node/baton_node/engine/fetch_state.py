"""How a request closes its gap from the store before it runs: one pure state machine.

A parked request costs the running batch nothing. It learns which of its prompt's full chunks exist
(announced by its prefill partner, or found by a lookup and worth it), takes blocks for its whole
prompt when the first of them can be fetched, fetches, and is admitted with the chunks it then has,
holes between them or not: the engine computes the holes. The same machine serves a hand-off
(`await_first`), a whole request and a prefill job.

In: events, in any order the world likes. Out: the next state and actions for the step loop.

    Announced Ended Reserved Landed Lost FirstKnown Timeout GiveBack Abort
      -> Fetch(chunk)  Admit(runs, chunks)  Release  Forget

What holds whatever the order (tests/node/engine/test_fetch_state.py):
  - no fetch without blocks; blocks are released, and handed to the engine, only when no fetch is in
    flight into them, also on abort and timeout;
  - Admit names landed chunks and no others, and comes at most once; after Forget or Admit comes
    nothing;
  - a lost chunk is a hole and no more: what lies behind it is fetched and used. Announced anew, it
    is fetched again. Nobody waits for it.

Sets of chunks are bit sets in ints: immutable, and 8,192 chunks are 1 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Fetches of one request in flight: enough to fill the transfer threads, few enough that an abort
# settles soon and that requests share the link.
WINDOW = 16


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """These chunks exist (a bit set). A lost chunk announced anew was put again."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Ended:
    """No more will be announced: the partner is through or dead, or the lookup was answered."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The request got blocks for all its tokens; the first `cached` hold KV already."""

    cached: int


@dataclass(frozen=True, slots=True)
class Landed:
    chunk: int


@dataclass(frozen=True, slots=True)
class Lost:
    chunk: int


@dataclass(frozen=True, slots=True)
class FirstKnown:
    """The router's word for this attempt: FirstTokens or NoFirstTokens."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """Waited long enough for chunks. Ignored while FirstTokens is awaited: only the router ends
    that."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The running batch needs the blocks."""


@dataclass(frozen=True, slots=True)
class Abort:
    pass


Event = Announced | Ended | Reserved | Landed | Lost | FirstKnown | Timeout | GiveBack | Abort


# --- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    chunk: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Run it. `chunks` fetched chunks have landed; `runs` are where: [start, end) in blocks behind
    the cached ones, ascending and apart."""

    runs: tuple[tuple[int, int], ...] = ()
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Give the reservation back; nothing is in flight into it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The request is gone."""


Action = Fetch | Admit | Release | Forget


# --- the machine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchState:
    """One request's state. `cached_blocks`, the leading ones that this node's cache holds, is a
    hint until the reservation says it for sure."""

    chunks: int  # full chunks of what it knows
    chunk_blocks: int
    awaits_first: bool = False
    cached_blocks: int = 0
    exists: int = 0
    flying: int = 0
    renewed: int = 0  # announced anew while in flight
    landed: int = 0
    lost: int = 0
    held: bool = False
    ended: bool = False
    expired: bool = False
    returning: bool = False  # asked to give its blocks back
    aborted: bool = False
    over: bool = False  # admitted or forgotten

    @property
    def own(self) -> int:
        """Leading chunks that the own cache holds whole."""
        return min(self.chunks, self.cached_blocks // self.chunk_blocks)

    @property
    def have(self) -> int:
        return _ones(self.own) | self.landed

    @property
    def fetchable(self) -> int:
        """Chunks that exist, as far as is known, and are not here."""
        return self.exists & ~self.have & ~self.flying & ~self.lost

    @property
    def wants_blocks(self) -> bool:
        """True when a fetch could start if there were blocks. Grant them in order of arrival."""
        return not (self.held or self.over or self.aborted or self.expired) and self.fetchable != 0

    @property
    def missing(self) -> int:
        """Chunks that may still come: in flight, to be fetched, or not announced yet."""
        coming = self.flying | self.fetchable
        if not self.ended:
            coming |= _ones(self.chunks) & ~self.have & ~self.lost
        return coming


def park(chunks: int, chunk_blocks: int, *, await_first: bool, cached: int = 0) -> FetchState:
    """A new request with `chunks` full chunks, of whose blocks `cached` are in the own cache."""
    return FetchState(chunks, chunk_blocks, awaits_first=await_first, cached_blocks=cached)


def start(state: FetchState) -> tuple[FetchState, list[Action]]:
    """What a new request can do before any event."""
    return _advance(state)


def step(state: FetchState, event: Event) -> tuple[FetchState, list[Action]]:
    """The next state and what to do now. Events that come too late change nothing."""
    if state.over:
        return state, []
    return _advance(_absorb(state, event))


def _absorb(state: FetchState, event: Event) -> FetchState:
    match event:
        case Announced(chunks):
            known = chunks & _ones(state.chunks)
            return replace(
                state,
                exists=state.exists | known,
                lost=state.lost & ~known,
                renewed=state.renewed | (known & state.flying),
            )
        case Ended():
            return replace(state, ended=True)
        case Reserved(cached):
            return replace(state, held=True, cached_blocks=cached)
        case Landed(chunk) | Lost(chunk):
            return _settled(state, 1 << chunk, isinstance(event, Landed))
        case FirstKnown():
            return replace(state, awaits_first=False)
        case Timeout():
            return state if state.awaits_first else replace(state, expired=True)
        case GiveBack():
            return replace(state, returning=state.held)
        case Abort():
            return replace(state, aborted=True)


def _settled(state: FetchState, bit: int, landed: bool) -> FetchState:
    bit &= state.flying
    if landed:
        state = replace(state, landed=state.landed | bit)
    elif not bit & state.renewed:  # else it was put again meanwhile, and can be fetched again
        state = replace(state, lost=state.lost | bit)
    return replace(state, flying=state.flying & ~bit, renewed=state.renewed & ~bit)


def _advance(state: FetchState) -> tuple[FetchState, list[Action]]:
    actions: list[Action] = []
    if state.aborted:
        if not state.flying:
            if state.held:
                actions.append(Release())
            actions.append(Forget())
            state = replace(state, held=False, over=True)
        return state, actions
    if state.returning:
        if state.flying:
            return state, actions
        # The chunks still exist in the store; what had landed here is gone with the blocks.
        state = replace(state, held=False, returning=False, landed=0)
        actions.append(Release())
    if state.held and not state.expired:
        state = _fetch_more(state, actions)
    if _may_run(state):
        actions.append(_admission(state))
        state = replace(state, over=True)
    return state, actions


def _fetch_more(state: FetchState, actions: list[Action]) -> FetchState:
    """Start fetches in chunk order, at most WINDOW in flight."""
    room = WINDOW - state.flying.bit_count()
    left = state.fetchable
    while left and room > 0:
        chunk = _lowest(left)
        left &= left - 1
        room -= 1
        state = replace(state, flying=state.flying | (1 << chunk))
        actions.append(Fetch(chunk))
    return state


def _may_run(state: FetchState) -> bool:
    if state.awaits_first or state.flying:
        return False
    return state.expired or not state.missing


def _admission(state: FetchState) -> Admit:
    """Of a chunk that is partly cached only the rest counts. Without blocks nothing has landed."""
    runs: list[tuple[int, int]] = []
    size, left = state.chunk_blocks, state.landed
    while left:
        first = _lowest(left)
        count = _lowest(~(left >> first))
        runs.append((max(first * size, state.cached_blocks), (first + count) * size))
        left &= ~(_ones(count) << first)
    return Admit(tuple(runs), state.landed.bit_count())


def _ones(count: int) -> int:
    return (1 << count) - 1


def _lowest(bits: int) -> int:
    """Index of the lowest one; `bits` is not 0."""
    return (bits & -bits).bit_length() - 1
