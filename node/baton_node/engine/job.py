"""What the step loop remembers about one request in one attempt.

In: a job frame. Out: `Job`, which fetching, publishing and the loop share, and what it tells about
itself in the end. Only the step loop's thread touches it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton_engine.interface import EngineInfo, PromptUse
from baton_node.engine.measurements import BlockCounts
from baton_node.store.base import ChunkRef
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import RequestStats
from baton_protocol.request import Request
from baton_protocol.sampling import MAX_PROMPT_CANDIDATES
from baton_protocol.store import Marker

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


@dataclass(frozen=True, slots=True)
class FetchSummary:
    """What became of a request's chunks in the store, once it is admitted. `lost` chunks (a bit
    set) had a marker and were not there. The times are predicted ones (see FetchDecision)."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    lost: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One request in one attempt. `seq` is its place in the order of arrival.

    `chunks` are the names of the full chunks of all it knows, which has `full_blocks` full blocks;
    `markers` say where chunks are, as far as is known. What only fetching or only publishing has to
    know, they keep themselves.
    """

    request: Request
    kind: Literal["prefill", "run"]
    seq: int
    layout: KVLayout
    chunks: list[BlockHash]
    full_blocks: int
    times: Times
    inbox: tuple[str, str] | None = None  # of a prefill job's decode node
    markers: dict[int, Marker] = field(default_factory=dict)
    handed_off: bool = False  # the router's FirstTokens arrived
    fetched: FetchSummary = field(default_factory=FetchSummary)
    finished: frozenset[int] = frozenset()  # choices that ended elsewhere
    open_choices: set[int] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)  # token of a choice, with stop strings

    @property
    def key(self) -> JobKey:
        return self.request.id, self.request.attempt

    def is_late(self, now: float) -> bool:
        """Whether its time is over, by the loop's clock."""
        left = self.request.time_left
        return left is not None and self.times.arrived + left <= now

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
        size = self.layout.chunk_blocks
        return blocks[chunk * size : (chunk + 1) * size]

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """How the gap was closed, once the prompt is computed."""
        size, found = self.layout.block_size, self.fetched
        return msgspec.structs.replace(
            self.times.stats(use, now),
            matched_tokens=min(use.prompt, found.blocks.matched * size),
            declined_tokens=min(use.prompt, found.blocks.declined * size),
            fetch_predicted_ms=round(found.fetch_ms, 3),
            compute_predicted_ms=round(found.compute_ms, 3),
        )
