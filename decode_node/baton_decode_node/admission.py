"""Which jobs a decode node accepts.

The node limits how many sequences wait to run. The limit only keeps a flood of requests from
filling the node's memory: the router handles admission by deadlines and budgets.
"""

from __future__ import annotations

from baton_node.server.role import saturation_error
from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Load, PrefillJob, RunJob
from baton_protocol.store import Role

MAX_QUEUED = 4096
RETRY_AFTER_S = 1.0


class DecodeRole:
    """Refuses jobs while `max_queued` or more sequences wait or are parked."""

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued

    @property
    def name(self) -> Role:
        return "decode"

    def refuse(self, job: PrefillJob | RunJob, load: Load) -> ErrorRecord | None:
        queued = load.load.waiting + load.load.parked
        if queued < self._max_queued:
            return None
        return saturation_error(
            f"{queued} sequences wait on this node; at most {self._max_queued}",
            retry_after=RETRY_AFTER_S,
        )
