"""What a decode node takes.

Its work is a batch that runs for long, so its measure is how many requests stand before it. The
bound only keeps a flood from filling the node's memory: admission by deadlines and budgets is the
router's business.

In: a job, the node's load. Out: a refusal, or nothing.
"""

from __future__ import annotations

from baton_node.server.role import saturated
from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Load, PrefillJob, RunJob
from baton_protocol.store import Role

MAX_QUEUED = 4096
RETRY_AFTER_S = 1.0


class DecodeRole:
    """Bounds sequences that do not run yet: waiting ones and parked ones."""

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued

    @property
    def name(self) -> Role:
        return "decode"

    def refuse(self, job: PrefillJob | RunJob, load: Load) -> ErrorRecord | None:
        queued = load.load.waiting + load.load.parked
        if queued < self._max_queued:
            return None
        return saturated(
            f"{queued} sequences wait on this node; at most {self._max_queued}",
            retry_after=RETRY_AFTER_S,
        )
