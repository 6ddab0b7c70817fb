"""A request in flight: its record, and what runs it: output queue, admission ticket and task.

The dispatcher holds each until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton_protocol.errors import Unavailable
from baton_protocol.ids import NodeId, RequestId
from baton_router.nodes.pool_view import PoolView
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.prepared import Prepared
from baton_router.requests.state import RequestRecord
from baton_router.requests.ticket import Ticket


@dataclass(slots=True)
class InFlightRequest:
    """A request's record and what runs it. `slot` is its index in the output. It waits for its
    first place until `give_up_at`. `refused` maps a node to the time until which it is not tried
    again. `task` looks for a place. Times are of the dispatcher's clock."""

    record: RequestRecord
    prepared: Prepared
    ticket: Ticket
    output: OutputQueue
    slot: int
    give_up_at: float
    refused: dict[NodeId, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> RequestId:
        return self.record.request.id

    def placement_line(self) -> str:
        """The current value of the `x-baton-placement` header."""
        record = self.record
        if record.current is None:
            return f"prefill=- decode=- reason=waiting: {record.waits_for}"
        cause = record.replaced_for
        return record.current.placement.header_line() + (
            f"; placed again: {cause}" if cause else ""
        )


def rolled_out_error(revision: str) -> Unavailable:
    """The error for a request whose kind of nodes a roll-out has removed for good."""
    return Unavailable(
        f"the pool rolled out to revision {revision} while this request ran, and a running "
        "stream cannot move to it; send the request again",
        code="rolled_out",
    )


def count_held(requests: Iterable[InFlightRequest], view: PoolView) -> int:
    """Count requests that no node can take: new ones without a place, and earlier placed ones with
    no ready node of their kind. A request that is only between two attempts does not count."""
    served = {node.kind for node in view.nodes.values() if node.ready}
    return sum(
        request.record.current is None
        and (request.record.attempt == 0 or request.prepared.kind not in served)
        for request in requests
    )
