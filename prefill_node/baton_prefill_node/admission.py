"""Which jobs a prefill node accepts.

The node's work is a queue of prompt tokens, and its limit is the predicted time to compute that
queue at the node's measured prefill speed. A job that would wait longer is better computed by the
decode node: the refusal is retryable, and the router then sends NoFirstTokens to the decode node.
"""

from __future__ import annotations

from baton_node.server.role import saturation_error
from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Load, PrefillJob, RunJob
from baton_protocol.store import Role

MAX_QUEUE_S = 60.0


class PrefillRole:
    """Refuses jobs while the queue holds more than `max_queue_s` seconds of predicted work."""

    def __init__(self, max_queue_s: float = MAX_QUEUE_S) -> None:
        self._max_queue_s = max_queue_s

    @property
    def name(self) -> Role:
        return "prefill"

    def refuse(self, job: PrefillJob | RunJob, load: Load) -> ErrorRecord | None:
        speed = load.speeds.prefill_tokens_per_s
        if speed <= 0.0:
            return None
        wait_s = load.load.queued_tokens / speed
        if wait_s <= self._max_queue_s:
            return None
        return saturation_error(
            f"{load.load.queued_tokens} prompt tokens are queued here, {wait_s:.0f} s of work; "
            f"at most {self._max_queue_s:.0f} s",
            retry_after=wait_s - self._max_queue_s,
        )
