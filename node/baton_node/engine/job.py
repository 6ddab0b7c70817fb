"""The step loop's record of one request in one attempt.

In: a job frame. Out: `Job`, shared by the loop, fetching and publishing, and the request's final
statistics. Only the step loop's thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from baton_engine.interface import PromptUse
from baton_engine.scheduling.time_account import TimeAccount
from baton_node.engine.chunk_sets import first_chunks
from baton_node.engine.counters import BlockCounts
from baton_node.engine.time_ledger import time_spent
from baton_node.ipc.messages import FinishChoice
from baton_node.store.base import ChunkRef
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import FirstTokens, NoFirstTokens, RequestStats
from baton_protocol.request import Request
from baton_protocol.store import Marker

if TYPE_CHECKING:
    from baton_text.grammars.matcher import Matcher

JobKey = tuple[RequestId, int]  # request and attempt
JobKind = Literal["prefill", "run"]
# "compiling": it waits for its grammar. "parked": it waits for KV or for the router's first tokens.
# "running": the engine has it. "ended": it computes no more.
JobState = Literal["compiling", "parked", "running", "ended"]
# The frames that wait behind a job whose grammar is being compiled.
LaterFrame = FirstTokens | NoFirstTokens | FinishChoice
# The server finds a stop string a step or two after the engine sampled it. So a token counts as
# part of the answer only when this many tokens follow it.
STOP_LAG = 8


@dataclass(slots=True)
class Times:
    """When a job's events happened, in seconds of the loop's clock; 0.0 if not yet. `handed_off` is
    when FirstTokens or NoFirstTokens arrived."""

    arrived: float
    fetch_began: float = 0.0
    fetch_ended: float = 0.0
    handed_off: float = 0.0
    admitted: float = 0.0
    started: float = 0.0  # the first step that computed a token of it

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """Return the token counts in `use`, and the phases up to `now` as RequestStats defines
        them."""
        fetch = max(0.0, self.fetch_ended - self.fetch_began) if self.fetch_began else 0.0
        prefill = max(0.0, now - (self.started or self.admitted))
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
    """The result of a request's fetching, set when it stops being parked. `lost` is the bit set of
    chunks whose fetch failed. The times are the predictions of its FetchDecision."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    lost: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One request in one attempt.

    `seq` numbers jobs in order of arrival. The request's known tokens fill `full_blocks` blocks;
    `chunks` holds the hashes of their full chunks. `markers` maps the index of each chunk that is
    known to be in the store to its marker. Fetching and publishing keep their own state elsewhere.

    From chunk `first_complete` on KV is needed in all groups of layers (see KVLayout), of earlier
    chunks only in the groups without a window. `complete_bytes` is the size of a chunk with all.
    """

    request: Request
    kind: JobKind
    seq: int
    layout: KVLayout
    chunks: list[BlockHash]
    full_blocks: int
    times: Times
    state: JobState = "parked"  # set by the JobTable
    await_first: bool = False  # a prefill node computes the prompt of this whole request
    inbox: tuple[str, str] | None = None  # (node, epoch) of a prefill job's decode node
    kept_until: int = 0  # Unix seconds; the chunks of a pinned prefix stay in the store until then
    matcher: Matcher | None = None  # at the start of the request's grammar, if it has one
    # While it waits for its grammar: the hashes of its full blocks, the number of tokens that this
    # node will compute for it, and the frames about it that arrived after it.
    hashes: Sequence[BlockHash] = ()
    uncached: int = 0
    later_frames: list[LaterFrame] = field(default_factory=list)
    markers: dict[int, Marker] = field(default_factory=dict)
    handed_off: bool = False  # the router's FirstTokens arrived
    fetched: FetchSummary = field(default_factory=FetchSummary)
    finished: frozenset[int] = frozenset()  # choices that ended on another node
    open_choices: set[int] = field(default_factory=set)
    account: TimeAccount = field(default_factory=TimeAccount)  # of steps that computed its tokens
    # Offset of each choice's newest token, if the request has stop strings.
    newest: dict[int, int] = field(default_factory=dict)
    first_complete: int = field(init=False)
    complete_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_complete = self.layout.first_complete(len(self.chunks))
        self.complete_bytes = self.layout.chunk_bytes

    @property
    def key(self) -> JobKey:
        return self.request.id, self.request.attempt

    @property
    def kept_in_store(self) -> bool:
        """Whether the chunks that it fills are written behind. Nothing continues after a vector."""
        return self.kind == "run" and self.request.pooling is None

    @property
    def sequences(self) -> int:
        """Number of sequences that it will run: its open choices, or 1 for a prefill job."""
        return len(self.open_choices) if self.kind == "run" else 1

    def is_late(self, now: float) -> bool:
        """Return whether its deadline has passed. `now` is in seconds of the loop's clock."""
        left = self.request.time_left
        return left is not None and self.times.arrived + left <= now

    def known_tokens(self, choice: int) -> int:
        """Return how many tokens of a choice, including the prompt, were known on arrival."""
        outputs = self.request.outputs
        return len(self.request.prompt_ids) + (len(outputs[choice]) if outputs else 0)

    def certain_tokens(self, choice: int) -> int:
        """Return how many tokens of a choice, including the prompt, no stop string can cut off any
        more. Valid only for requests with stop strings."""
        made = self.newest.get(choice, -1) + 1
        return max(self.known_tokens(choice), len(self.request.prompt_ids) + made - STOP_LAG)

    def ref(self, chunk: int) -> ChunkRef:
        request = self.request
        return ChunkRef(request.id, request.attempt, chunk, self.chunks[chunk], self.kept_until)

    def chunk_of(self, blocks: tuple[BlockId, ...], chunk: int) -> tuple[BlockId, ...]:
        """Return the blocks of one chunk, in the order of its payload. `blocks` are those of the
        prompt."""
        return self.layout.chunk_of(blocks, chunk)

    @property
    def unneeded(self) -> int:
        """The set of chunks of which no KV is needed once the later ones have it."""
        return 0 if self.layout.num_full_groups else first_chunks(self.first_complete)

    def suffices(self, chunk: int, marker: Marker) -> bool:
        """Return whether the marker's value has all KV of this chunk that is needed once the later
        chunks have theirs."""
        return chunk < self.first_complete or marker.payload_bytes == self.complete_bytes

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """Return the request's statistics when its prompt is computed, at `now`."""
        size, summary = self.layout.block_size, self.fetched
        return msgspec.structs.replace(
            self.times.stats(use, now),
            matched_tokens=min(use.prompt, summary.blocks.matched * size),
            declined_tokens=min(use.prompt, summary.blocks.declined * size),
            fetch_predicted_ms=round(summary.fetch_ms, 3),
            compute_predicted_ms=round(summary.compute_ms, 3),
            spent=time_spent(self.account),
        )
