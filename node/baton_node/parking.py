"""How a request closes its gap from the store before it runs: one pure state machine.

A parked request costs the running batch nothing. It learns which of its prompt's full chunks exist
(announced by its prefill partner, or by a lookup), takes blocks for its whole prompt when the first
of them can be fetched, fetches, and is admitted with the leading chunks it then has. The same
machine serves a hand-off (`await_first`), a whole request and a prefill job.

In: events, in any order the world likes. Out: the next state and actions for the step loop.

    Announced Ended Reserved Landed Lost FirstKnown Timeout GiveBack Abort
      -> Fetch(chunk)  Admit(blocks, chunks)  Release  Forget

What holds whatever the order (tests/node/test_parking.py):
  - no fetch without blocks; blocks are released only when no fetch is in flight;
  - Admit names a contiguous prefix, and comes at most once; after Forget or Admit comes nothing;
  - a lost chunk only shortens the prefix.

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
    """The request got blocks for its whole known prompt; the first `cached` hold KV already."""

    cached: int


@dataclass(frozen=True, slots=True)
class Landed:
    chunk: int


@dataclass(frozen=True, slots=True)
class Lost:
    chunk: int


@dataclass(frozen=True, slots=True)
class FirstKnown:
    """The router's word for this attempt: First or NoFirst."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """Waited long enough for chunks. Ignored while First is awaited: only the router ends that."""


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
    """Run it: the first `blocks` blocks hold KV; `chunks` of the fetched chunks are among them."""

    blocks: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the reservation back; nothing is in flight into it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The request is gone."""


Action = Fetch | Admit | Release | Forget


# --- the machine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parked:
    """One request's state. `own` is how many leading chunks this node's cache holds: a hint until
    the reservation says it for sure."""

    chunks: int  # full chunks of the prompt
    chunk_blocks: int
    awaits_first: bool = False
    own: int = 0
    exists: int = 0
    flying: int = 0
    landed: int = 0
    lost: int = 0
    cached_blocks: int = 0
    held: bool = False
    ended: bool = False
    expired: bool = False
    returning: bool = False  # asked to give its blocks back
    aborted: bool = False
    over: bool = False  # admitted or forgotten

    @property
    def wants_blocks(self) -> bool:
        """True when a fetch could start if there were blocks. Grant them in order of arrival."""
        return not (self.held or self.over or self.aborted or self.expired) and self.fetchable != 0

    @property
    def fetchable(self) -> int:
        """Chunks that exist and would lengthen the prefix, as far as is known."""
        have = _ones(self.own) | self.landed
        useful = self.chunks
        if self.ended:
            useful = min(useful, _leading(have | self.flying | (self.exists & ~self.lost)))
        if lost := self.lost & ~have:
            useful = min(useful, _lowest(lost))
        return self.exists & ~have & ~self.flying & ~self.lost & _ones(useful)

    @property
    def complete(self) -> bool:
        """True when no chunk is missing."""
        return _leading(_ones(self.own) | self.landed) >= self.chunks


def park(chunks: int, chunk_blocks: int, *, await_first: bool, cached: int = 0) -> Parked:
    """A new request with `chunks` full chunks, of whose blocks `cached` are in the own cache."""
    own = min(chunks, cached // chunk_blocks)
    return Parked(chunks=chunks, chunk_blocks=chunk_blocks, awaits_first=await_first, own=own)


def start(state: Parked) -> tuple[Parked, list[Action]]:
    """What a new request can do before any event."""
    return _advance(state)


def step(state: Parked, event: Event) -> tuple[Parked, list[Action]]:
    """The next state and what to do now. Events that come too late change nothing."""
    if state.over:
        return state, []
    return _advance(_absorb(state, event))


def _absorb(state: Parked, event: Event) -> Parked:
    match event:
        case Announced(chunks):
            known = chunks & _ones(state.chunks)
            return replace(state, exists=state.exists | known, lost=state.lost & ~known)
        case Ended():
            return replace(state, ended=True)
        case Reserved(cached):
            own = min(state.chunks, cached // state.chunk_blocks)
            return replace(state, held=True, cached_blocks=cached, own=own)
        case Landed(chunk):
            bit = (1 << chunk) & state.flying
            return replace(state, flying=state.flying & ~bit, landed=state.landed | bit)
        case Lost(chunk):
            bit = (1 << chunk) & state.flying
            return replace(state, flying=state.flying & ~bit, lost=state.lost | bit)
        case FirstKnown():
            return replace(state, awaits_first=False)
        case Timeout():
            return state if state.awaits_first else replace(state, expired=True)
        case GiveBack():
            return replace(state, returning=state.held)
        case Abort():
            return replace(state, aborted=True)


def _advance(state: Parked) -> tuple[Parked, list[Action]]:
    actions: list[Action] = []
    if state.aborted:
        if not state.flying:
            if state.held:
                actions.append(Release())
            actions.append(Forget())
            state = replace(state, held=False, over=True)
        return state, actions
    if state.returning:
        if not state.flying:
            # The chunks still exist in the store; what had landed here is gone with the blocks.
            state = replace(state, held=False, returning=False, landed=0, cached_blocks=0)
            actions.append(Release())
        else:
            return state, actions
    if state.held and not state.expired:
        state = _fetch_more(state, actions)
    if _may_run(state):
        state, admit = _admit(state)
        actions.append(admit)
    return state, actions


def _fetch_more(state: Parked, actions: list[Action]) -> Parked:
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


def _may_run(state: Parked) -> bool:
    if state.awaits_first or state.flying:
        return False
    if state.complete or state.expired:
        return True
    return state.ended and not state.fetchable


def _admit(state: Parked) -> tuple[Parked, Admit]:
    run = _leading(_ones(state.own) | state.landed) if state.held else 0
    blocks = max(state.cached_blocks, run * state.chunk_blocks)
    used = (state.landed & _ones(run)).bit_count()
    return replace(state, over=True), Admit(blocks=blocks, chunks=used)


def _ones(count: int) -> int:
    return (1 << count) - 1


def _leading(bits: int) -> int:
    """Length of the run of ones from bit 0."""
    return _lowest(~bits)


def _lowest(bits: int) -> int:
    """Index of the lowest one; `bits` is not 0."""
    return (bits & -bits).bit_length() - 1
