"""What the step loop remembers about one request in one attempt.

In: a job frame. Out: `Job`, which fetching, publishing and the loop share, and what it tells about
itself in the end. Only the step loop's thread touches it.

Here too is what the parts of a step loop share: LoopContext, the node's counters and speeds, and
sets of a prompt's chunks. A set is an int whose bit i stands for chunk i: immutable, and 1 KiB for
8,192 chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from baton_engine.interface import Engine, EngineInfo, PromptUse, StepResult
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.settings import FetchPolicy
from baton_node.store.base import ChunkRef, KVConnector
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import BlockHash, BlockId, Epoch, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import RequestStats
from baton_protocol.request import Request
from baton_protocol.sampling import MAX_PROMPT_CANDIDATES
from baton_protocol.store import Marker, NodeLoad, Speeds

if TYPE_CHECKING:
    from baton_text.grammar import Matcher


def first_chunks(count: int) -> int:
    """The set of the chunks 0 to count - 1."""
    return (1 << count) - 1


def chunks_of(bits: int, most: int | None = None) -> tuple[int, ...]:
    """The chunks of the set, ascending; the first `most` of them."""
    chunks: list[int] = []
    while bits and (most is None or len(chunks) < most):
        chunks.append(_lowest(bits))
        bits &= bits - 1
    return tuple(chunks)


def runs_of(bits: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of each run of neighbouring chunks, ascending."""
    runs: list[tuple[int, int]] = []
    while bits:
        first = _lowest(bits)
        count = _lowest(~(bits >> first))
        runs.append((first, count))
        bits &= ~(first_chunks(count) << first)
    return tuple(runs)


def _lowest(bits: int) -> int:
    """Index of the lowest bit that is set; `bits` is not 0."""
    return (bits & -bits).bit_length() - 1


WEIGHT = 0.1  # of the newest step
# Steps with fewer prompt tokens say more about the step's fixed cost than about prefill.
ENOUGH_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What became of one request's full blocks (see NodeLoad): asked for, found in the own cache or
    by a marker, brought from the store, given to the engine, found and cheaper to compute."""

    queried: int = 0
    matched: int = 0
    fetched: int = 0
    used: int = 0
    declined: int = 0


@dataclass(slots=True)
class Counters:
    """Since start. Names as in NodeLoad, without `_total`."""

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
        """Once per request."""
        self.queried_blocks += tally.queried
        self.matched_blocks += tally.matched
        self.fetched_blocks += tally.fetched
        self.used_blocks += tally.used
        self.declined_blocks += tally.declined

    def merge(self, engine: NodeLoad, parked: int, parked_tokens: int) -> NodeLoad:
        """The node's load: `engine` is Engine.load(). `parked_tokens` of the parked requests' are
        to be computed."""
        totals = {f"{name}_total": value for name, value in asdict(self).items()}
        queued = engine.queued_tokens + parked_tokens
        return msgspec.structs.replace(engine, parked=parked, queued_tokens=queued, **totals)


class SpeedMeter:
    """How fast this node is: moving averages over steps, by which placement predicts. They start
    with what the self-benchmark (`build_engine`) measured.
    """

    def __init__(self, start: Speeds) -> None:
        self._prefill = start.prefill_tokens_per_s
        self._decode_ms = start.decode_step_ms
        self._put = start.put_bytes_per_s
        self._get = start.get_bytes_per_s
        self._latency_ms = start.get_latency_ms

    def observe(self, seconds: float, result: StepResult) -> None:
        """One step took so long."""
        if seconds <= 0.0 or result.num_tokens == 0:
            return
        if result.num_prompt_tokens >= ENOUGH_PROMPT_TOKENS:
            # Decoding rows of a mixed step are paid for here; they cost little beside the prompt.
            self._prefill = _blend(self._prefill, result.num_prompt_tokens / seconds)
        elif result.num_prompt_tokens == 0:
            self._decode_ms = _blend(self._decode_ms, seconds * 1e3)

    def transfers(
        self, put_bytes_per_s: float, get_bytes_per_s: float, get_latency_ms: float
    ) -> None:
        """What the data plane measures itself; 0 keeps what is known."""
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
    """Waits and periods in seconds."""

    epoch: Epoch
    lookup_wait_s: float = 0.1  # for a lookup's answer, and for chunks of a store in trouble
    first_wait_s: float = 2.0  # for announced chunks, and besides for their bytes
    blocks_wait_s: float = 30.0  # for blocks of the paged cache
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    fetch: FetchPolicy = "auto"  # of what a lookup found
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(slots=True)
class LoopContext:
    """What all parts of one step loop share: each part is given this one record.

    In: the engine, the connector, the server's socket, options. Out: LoopContext.

    `speeds` starts with those of the options, `counters` at zero.
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
        """False where nothing can ever be published."""
        return self.connector.store_health() != "none"


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
    matcher: Matcher | None = None  # at the beginning of its grammar, if it has one
    markers: dict[int, Marker] = field(default_factory=dict)
    handed_off: bool = False  # the router's FirstTokens arrived
    fetched: FetchSummary = field(default_factory=FetchSummary)
    finished: frozenset[int] = frozenset()  # choices that ended elsewhere
    open_choices: set[int] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)  # token of a choice, with stop strings

    @property
    def key(self) -> JobKey:
        return self.request.id, self.request.attempt

    @property
    def sequences(self) -> int:
        """What it is going to run: each open choice, or the one prompt of a prefill job."""
        return len(self.open_choices) if self.kind == "run" else 1

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
