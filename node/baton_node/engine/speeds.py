"""How fast this node is, as moving averages over its steps.

In: each step's duration and what it computed. Out: Speeds, which placement predicts with. The
start values come from the self-benchmark (`startup`).
"""

from __future__ import annotations

from baton_engine.interface import StepResult
from baton_protocol.store import Speeds

WEIGHT = 0.1  # of the newest step
# Steps with fewer prompt tokens say more about the step's fixed cost than about prefill.
ENOUGH_PROMPT_TOKENS = 32


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
