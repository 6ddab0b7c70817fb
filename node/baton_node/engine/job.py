"""The step loop's record of one request in one attempt, and what the loop's parts share.

In: a job frame. Out: `Job`, shared by the loop, fetching and publishing, and the request's final
statistics. Only the step loop's thread uses it.

The shared parts are LoopContext, the node's counters and speeds, and bit sets of a prompt's chunks.
A bit set is an int whose bit i stands for chunk i: immutable, and 8,192 chunks take 1 KiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from baton_engine.interface import Engine, EngineInfo, PromptUse, StepResult
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.store.base import ChunkRef, KVConnector
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import BlockHash, BlockId, Epoch, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import RequestStats
from baton_protocol.policies import FetchPolicy
from baton_protocol.request import Request
from baton_protocol.sampling import MAX_PROMPT_CANDIDATES
from baton_protocol.store import Marker, NodeLoad, Speeds

if TYPE_CHECKING:
    from baton_text.grammar import Matcher


def first_chunks(count: int) -> int:
    """Return the set of chunks 0 to count - 1."""
    return (1 << count) - 1


def chunks_of(bits: int, most: int | None = None) -> tuple[int, ...]:
    """Return the chunks in the set, ascending; at most the first `most`."""
    chunks: list[int] = []
    while bits and (most is None or len(chunks) < most):
        chunks.append(_lowest(bits))
        bits &= bits - 1
    return tuple(chunks)


def runs_of(bits: int) -> tuple[tuple[int, int], ...]:
    """Return (first, count) of each run of neighbouring chunks, ascending."""
    runs: list[tuple[int, int]] = []
    while bits:
        first = _lowest(bits)
        count = _lowest(~(bits >> first))
        runs.append((first, count))
        bits &= ~(first_chunks(count) << first)
    return tuple(runs)


def _lowest(bits: int) -> int:
    """Return the index of the lowest bit that is set. `bits` must not be 0."""
    return (bits & -bits).bit_length() - 1


WEIGHT = 0.1  # weight of the newest step in the moving averages
# With fewer prompt tokens, a step's fixed cost dominates its time.
ENOUGH_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Counts of one request's full blocks, as in NodeLoad: looked up; found in this node's cache or
    with a marker; fetched from the store; used by the request; found in the store, but declined
    because computing them was cheaper."""

    queried: int = 0
    matched: int = 0
    fetched: int = 0
    used: int = 0
    declined: int = 0


@dataclass(slots=True)
class Counters:
    """Counts since the node's start. The fields are those of NodeLoad without `_total`."""

    published_bytes: int = 0
    published_chunks: int = 0
    announced_chunks: int = 0
    fetched_bytes: int = 0
    fetched_chunks: int = 0
    reused_chunks: int = 0
    lost_chunks: int = 0
    queried_blocks: int = 0
    matched_blocks: int = 0
    fetched_blocks: int = 0
    used_blocks: int = 0
    declined_blocks: int = 0
    behind_chunks: int = 0
    behind_bytes: int = 0
    behind_skipped: int = 0
    handoffs: int = 0
    jobs: int = 0
    grammars_compiled: int = 0
    grammar_hits: int = 0
    grammar_compile_seconds: float = 0.0

    def count(self, tally: BlockCounts) -> None:
        """Add the counts of one request. Call it once per request."""
        self.queried_blocks += tally.queried
        self.matched_blocks += tally.matched
        self.fetched_blocks += tally.fetched
        self.used_blocks += tally.used
        self.declined_blocks += tally.declined

    def merge(self, engine: NodeLoad, parked: int, parked_tokens: int) -> NodeLoad:
        """Return the node's load. `engine` is the result of Engine.load(); `parked` counts parked
        sequences, `parked_tokens` the tokens that this node will compute for them."""
        totals = {f"{name}_total": value for name, value in asdict(self).items()}
        queued = engine.queued_tokens + parked_tokens
        return msgspec.structs.replace(engine, parked=parked, queued_tokens=queued, **totals)


class SpeedMeter:
    """This node's speeds, which placement uses for its predictions.

    The compute speeds are moving averages over steps; the transfer speeds come from the data plane.
    All start with the values that `build_engine` measured.
    """

    def __init__(self, start: Speeds) -> None:
        self._prefill = start.prefill_tokens_per_s
        self._decode_ms = start.decode_step_ms
        self._put = start.put_bytes_per_s
        self._get = start.get_bytes_per_s
        self._latency_ms = start.get_latency_ms

    def observe(self, seconds: float, result: StepResult) -> None:
        """Add one step, which took `seconds`."""
        if seconds <= 0.0 or result.num_tokens == 0:
            return
        if result.num_prompt_tokens >= ENOUGH_PROMPT_TOKENS:
            # In a mixed step this includes the decoding rows. They cost little next to the prompt.
            self._prefill = _blend(self._prefill, result.num_prompt_tokens / seconds)
        elif result.num_prompt_tokens == 0:
            self._decode_ms = _blend(self._decode_ms, seconds * 1e3)

    def transfers(
        self, put_bytes_per_s: float, get_bytes_per_s: float, get_latency_ms: float
    ) -> None:
        """Set the speeds that the data plane measured. 0 (not measured) keeps the old value."""
        self._put = put_bytes_per_s or self._put
        self._get = get_bytes_per_s or self._get
        self._latency_ms = get_latency_ms or self._latency_ms

    def speeds(self) -> Speeds:
        return Speeds(
            prefill_tokens_per_s=round(self._prefill, 1),
            decode_step_ms=round(self._decode_ms, 3),
            put_bytes_per_s=round(self._put),
            get_bytes_per_s=round(self._get),
            get_latency_ms=round(self._latency_ms, 3),
        )


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the step loop. Waits and periods are in seconds."""

    epoch: Epoch
    lookup_wait_s: float = 0.1  # longest wait for a lookup, and for chunks in an unhealthy store
    first_wait_s: float = 2.0  # longest wait for chunks, plus time for their bytes
    blocks_wait_s: float = 30.0  # longest wait for free blocks of the paged cache
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    fetch: FetchPolicy = "auto"  # whether to fetch chunks that a lookup found
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(slots=True)
class LoopContext:
    """The objects that all parts of one step loop share.

    `speeds` starts with the speeds in `options`, `counters` with zeros.
    """

    engine: Engine
    connector: KVConnector
    socket: EngineSocket
    options: LoopOptions
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    speeds: SpeedMeter = field(init=False)

    def __post_init__(self) -> None:
        self.speeds = SpeedMeter(self.options.speeds)

    @property
    def layout(self) -> KVLayout:
        return self.engine.info.layout

    @property
    def has_store(self) -> bool:
        """False if the node has no store configured."""
        return self.connector.store_health() != "none"


JobKey = tuple[RequestId, int]  # request and attempt
# The server finds a stop string a step or two after the engine sampled it. So a token counts as
# part of the answer only when this many tokens follow it.
STOP_LAG = 8


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise InvalidRequest for token ids outside the vocabulary, a wrong number of outputs, or too
    many prompt logprobs. The engine checks the rest when the request is submitted."""
    if request.outputs and len(request.outputs) != request.params.n:
        raise InvalidRequest(
            f"the request has {len(request.outputs)} outputs for n={request.params.n}", param="n"
        )
    requested = request.params.prompt_logprobs
    if requested is not None and len(request.prompt_ids) * (1 + requested) > MAX_PROMPT_CANDIDATES:
        raise InvalidRequest(
            f"prompt_logprobs is {requested} for {len(request.prompt_ids)} prompt tokens; "
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
    """When a job's events happened, in seconds of the loop's clock; 0.0 if not yet. `handed_off` is
    when FirstTokens or NoFirstTokens arrived."""

    arrived: float
    fetch_began: float = 0.0
    fetch_ended: float = 0.0
    handed_off: float = 0.0
    admitted: float = 0.0

    def stats(self, use: PromptUse, now: float) -> RequestStats:
        """Return the token counts in `use`, and the phases up to `now` as RequestStats defines
        them."""
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
    kind: Literal["prefill", "run"]
    seq: int
    layout: KVLayout
    chunks: list[BlockHash]
    full_blocks: int
    times: Times
    inbox: tuple[str, str] | None = None  # (node, epoch) of a prefill job's decode node
    matcher: Matcher | None = None  # at the start of the request's grammar, if it has one
    markers: dict[int, Marker] = field(default_factory=dict)
    handed_off: bool = False  # the router's FirstTokens arrived
    fetched: FetchSummary = field(default_factory=FetchSummary)
    finished: frozenset[int] = frozenset()  # choices that ended on another node
    open_choices: set[int] = field(default_factory=set)
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
    def sequences(self) -> int:
        """Number of sequences that it will run: its open choices, or 1 for a prefill job."""
        return len(self.open_choices) if self.kind == "run" else 1

    def is_late(self, now: float) -> bool:
        """Return whether its deadline has passed. `now` is in seconds of the loop's clock."""
        left = self.request.time_left
        return left is not None and self.times.arrived + left <= now

    def given(self, choice: int) -> int:
        """Return how many tokens of a choice, including the prompt, were known on arrival."""
        outputs = self.request.outputs
        return len(self.request.prompt_ids) + (len(outputs[choice]) if outputs else 0)

    def certain(self, choice: int) -> int:
        """Return how many tokens of a choice, including the prompt, no stop string can cut off any
        more. Valid only for requests with stop strings."""
        made = self.newest.get(choice, -1) + 1
        return max(self.given(choice), len(self.request.prompt_ids) + made - STOP_LAG)

    def ref(self, chunk: int) -> ChunkRef:
        return ChunkRef(self.request.id, self.request.attempt, chunk, self.chunks[chunk])

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
        size, found = self.layout.block_size, self.fetched
        return msgspec.structs.replace(
            self.times.stats(use, now),
            matched_tokens=min(use.prompt, found.blocks.matched * size),
            declined_tokens=min(use.prompt, found.blocks.declined * size),
            fetch_predicted_ms=round(found.fetch_ms, 3),
            compute_predicted_ms=round(found.compute_ms, 3),
        )
