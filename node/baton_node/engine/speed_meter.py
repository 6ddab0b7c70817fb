"""Measures this node's speeds while it works.

In: the time and the tokens of each step; the data plane's speeds. Out: Speeds for load reports.
"""

from __future__ import annotations

from baton_engine.interface import StepResult
from baton_protocol.store import Speeds

WEIGHT = 0.1  # weight of the newest step in the moving averages
# With fewer prompt tokens, a step's fixed cost dominates its time.
ENOUGH_PROMPT_TOKENS = 32


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
