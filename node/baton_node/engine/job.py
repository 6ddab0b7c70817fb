"""What the step loop remembers about one request in one attempt.

In: a job frame. Out: `Job`, which the fetcher, the publisher and the loop share, and what it
tells about itself in the end. Only the step loop's thread touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton_engine.interface import EngineInfo, PromptUse, Reservation
from baton_node.engine.counters import BlockCounts
from baton_node.engine.fetch_policy import FetchDecision
from baton_node.engine.fetch_state import Admission, FetchState
from baton_node.engine.publish_state import PublishState
from baton_node.store.base import PADDING, ChunkRef
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.link import RequestStats
from baton_protocol.request import Request
from baton_protocol.sampling import MAX_PROMPT_CANDIDATES
from baton_protocol.store import Marker, Priority

JobKey = tuple[RequestId, int]
# The server finds a stop string a step or two after its place: until so many tokens have followed
# one, nobody knows that it is an answer's.
STOP_LAG = 8


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise InvalidRequest for ids that cannot even be hashed or looked at; the engine checks the
    rest when it gets the request."""
    if request.outputs and len(request.outputs) != request.params.n:
        raise InvalidRequest(f"{len(request.outputs)} outputs for n={request.params.n}", param="n")
    asked = request.params.prompt_logprobs
    if asked is not None and len(request.prompt_ids) * (1 + asked) > MAX_PROMPT_CANDIDATES:
        raise InvalidRequest(
            f"prompt_logprobs is {asked} for {len(request.prompt_ids)} prompt tokens; "
            f"(1 + prompt_logprobs) x prompt tokens may be at most {MAX_PROMPT_CANDIDATES}",
            param="prompt_logprobs",
        )
    for ids in (request.prompt_ids, *request.outputs):
        for id in (min(ids), max(ids)) if ids else ():
            if not 0 <= id < info.vocab_size:
                raise InvalidRequest(
                    f"token id {id} is not in the vocabulary (0..{info.vocab_size - 1})",
                    param="prompt",
                )


@dataclass(slots=True)
class Times:
    """Seconds of the loop's clock; 0.0 until it happened. `handed_off` is when the router said what
    a prefill partner's first tokens are, or that there are none."""

    arrived: float
    fetch_began: float = 0.0
    fetch_ended: float = 0.0
    handed_off: float = 0.0
    admitted: float = 0.0

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """RequestStats says what each time is."""
        fetch = max(0.0, self.fetch_ended - self.fetch_began) if self.fetch_began else 0.0
        prefill = max(0.0, now - self.admitted)
        handoff = max(0.0, self.handed_off - self.arrived - self._fetching_until_handed_off())
        queue = max(0.0, now - self.arrived - handoff - fetch - prefill)
        return RequestStats(
            prompt_tokens=use.prompt,
            cached_tokens=use.cached,
            host_tokens=use.host,
            fetched_tokens=use.fetched,
            computed_tokens=use.computed,
            queue_ms=round(queue * 1e3, 3),
            fetch_ms=round(fetch * 1e3, 3),
            prefill_ms=round(prefill * 1e3, 3),
            handoff_ms=round(handoff * 1e3, 3),
        )

    def _fetching_until_handed_off(self) -> float:
        if not self.fetch_began:
            return 0.0
        return max(0.0, min(self.fetch_ended, self.handed_off) - self.fetch_began)


@dataclass(slots=True, eq=False)
class Job:
    """One request in one attempt. `seq` is its place in the order of arrival.

    `chunks` are the names of the full chunks of all it knows, which has `full_blocks` full blocks;
    `markers` say where chunks are, as far as is known. `inbox` and `ledger` belong to prefill jobs.
    """

    request: Request
    kind: Literal["prefill", "run"]
    seq: int
    chunks: list[BlockHash]
    chunk_blocks: int
    full_blocks: int
    block_size: int
    parked: FetchState
    times: Times
    priority: Priority  # of its fetches
    inbox: tuple[str, str] | None = None
    ledger: PublishState | None = None
    looking: bool = False  # a lookup is unanswered
    handed_off: bool = False  # the router's FirstTokens arrived
    markers: dict[int, Marker] = field(default_factory=dict)
    decision: FetchDecision = field(default_factory=FetchDecision)  # about what the lookup found
    brought: int = 0  # chunks that were fetched, as a bit set
    tally: BlockCounts = field(default_factory=BlockCounts)  # since it left the parking lot
    reservation: Reservation | None = None
    finished: frozenset[int] = frozenset()  # choices that ended elsewhere
    open_choices: set[int] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)  # token of a choice, with stop strings
    running: bool = False  # the engine has it
    wait: tuple[float, str] | None = None  # deadline and what is waited for

    @property
    def key(self) -> JobKey:
        return self.request.id, self.request.attempt

    @property
    def uncached(self) -> int:
        """Tokens that it will compute here, as far as is known; none while a partner does."""
        if self.parked.aborted or (self.kind == "run" and self.parked.awaits_first):
            return 0
        found = self.parked.cached_blocks + self._blocks_of(_bits(self.parked.exists))
        return max(0, max(map(self.given, self.open_choices), default=0) - found * self.block_size)

    def is_late(self, now: float) -> bool:
        """Whether its time is over (by the loop's clock) and nobody has ended it yet."""
        left = self.request.time_left
        if left is None or self.parked.aborted:
            return False
        return self.times.arrived + left <= now

    def given(self, choice: int) -> int:
        """How many tokens of a choice it came with."""
        outputs = self.request.outputs
        return len(self.request.prompt_ids) + (len(outputs[choice]) if outputs else 0)

    def certain(self, choice: int) -> int:
        """How many tokens of a choice, of a request with stop strings, are surely part of it."""
        made = self.newest.get(choice, -1) + 1
        return max(self.given(choice), len(self.request.prompt_ids) + made - STOP_LAG)

    def ref(self, chunk: int) -> ChunkRef:
        return ChunkRef(self.request.id, self.request.attempt, chunk, self.chunks[chunk])

    def chunk_of(self, blocks: tuple[BlockId, ...], chunk: int) -> tuple[BlockId, ...]:
        """The blocks of one chunk among those of the prompt."""
        return blocks[chunk * self.chunk_blocks : (chunk + 1) * self.chunk_blocks]

    def destination(self, chunk: int) -> tuple[BlockId, ...]:
        """Where a fetched chunk goes. Blocks that hold KV already are shared with other requests
        and must not be written: padding stands in their place."""
        if self.reservation is None:
            raise RuntimeError(f"fetch of chunk {chunk} of {self.key} without blocks")
        first = chunk * self.chunk_blocks
        blocks = self.chunk_of(self.reservation.blocks, chunk)
        cached = self.reservation.cached
        return tuple(PADDING if first + i < cached else block for i, block in enumerate(blocks))

    def count(self, admitted: Admission | None) -> BlockCounts:
        """What became of its full blocks. One call, when it leaves the parking lot."""
        self.tally = BlockCounts(
            queried=self.full_blocks,
            matched=self.parked.cached_blocks + self._blocks_of(self.markers),
            fetched=self._blocks_of(_bits(self.brought)),
            used=sum(end - start for start, end in admitted.runs) if admitted is not None else 0,
            declined=self._blocks_of(_bits(self.decision.declined)),
        )
        return self.tally

    def _blocks_of(self, chunks: Iterable[int]) -> int:
        """How many blocks these chunks hold that the own cache does not."""
        size, cached = self.chunk_blocks, self.parked.cached_blocks
        return sum(max(0, (c + 1) * size - max(c * size, cached)) for c in chunks)

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """How the gap was closed, once the prompt is computed."""
        return msgspec.structs.replace(
            self.times.stats(use, now),
            matched_tokens=min(use.prompt, self.tally.matched * self.block_size),
            declined_tokens=min(use.prompt, self.tally.declined * self.block_size),
            fetch_predicted_ms=round(self.decision.fetch_ms, 3),
            compute_predicted_ms=round(self.decision.compute_ms, 3),
        )


def _bits(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
