"""A node's role, prefill or decode, decides which jobs the node refuses.

Every node can run both kinds of jobs. In: a job and the node's load. Out: a refusal, or None.
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
        """Return why this node refuses the job, or None to accept it. The error is retryable:
        another node may accept the job."""
        ...


def saturation_error(message: str, retry_after: float) -> ErrorRecord:
    """Return a retryable refusal because of missing capacity. `retry_after` is in seconds."""
    return ErrorRecord(
        message=message,
        code="saturated",
        status=429,
        type="rate_limit_error",
        retryable=True,
        retry_after=retry_after,
    )
