"""What makes a node one of the two roles: what it is for first, and what it refuses.

Every node takes both kinds of jobs. In: a job and the node's load. Out: a refusal, or nothing.
"""

from __future__ import annotations

from typing import Protocol

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Load, PrefillJob, RunJob
from baton_protocol.store import Role


class NodeRole(Protocol):
    """Implemented by baton_prefill_node and baton_decode_node."""

    @property
    def name(self) -> Role: ...

    def refuse(self, job: PrefillJob | RunJob, load: Load) -> ErrorRecord | None:
        """Why this job is not taken, or None. Retryable: another node may take it."""
        ...


def saturated(message: str, retry_after: float) -> ErrorRecord:
    """A refusal for want of capacity."""
    return ErrorRecord(
        message=message,
        code="saturated",
        status=429,
        type="rate_limit_error",
        retryable=True,
        retry_after=retry_after,
    )
