"""What a node measures of itself: counters of its transfers, and how fast it is.

In: what the step loop sees happen; each step's duration and what it computed. Out: the node's
NodeLoad, which is the engine's figures with the counters added; Speeds, moving averages over steps,
which placement predicts with. They start with what the self-benchmark (`build_engine`) measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from baton_engine.interface import StepResult
from baton_protocol.store import NodeLoad, Speeds

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
