"""A request on its way through the pool: its record, and its output queue, ticket and task.

In: a prepared request, its answer's queue. Out: the line that tells its client where it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton_protocol.errors import Unavailable
from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.request import Request
from baton_protocol.store import Kind
from baton_router.nodes.model_artifacts import Serving
from baton_router.nodes.pool_view import PoolView
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.state import RequestRecord
from baton_router.settings import Ranking


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is tokenized and hashed. `chunks` name its full chunks; only nodes of `kind`
    can run it. By `deadline`, a time of the router's clock, it is to be over; None is any time.
    `wanted` is the model's name, where its client gave one; with `fills` its answer may
    be as long as the context leaves. `ranking` is the placement policy that it asked for."""

    request: Request
    chunks: tuple[BlockHash, ...]
    serving: Serving
    wanted: str | None
    fills: bool
    ranking: Ranking | None = None
    deadline: float | None = None

    @property
    def kind(self) -> Kind:
        return self.serving.kind


class Ticket:
    """One prompt that was let in, with so many `sequences`, one of each choice. The dispatcher says
    once it is `placed`, and which of its sequences have `ended`: `free` hears of them."""

    def __init__(
        self,
        sequences: int,
        placed: Callable[[], None] = lambda: None,
        free: Callable[[int], None] = lambda sequences: None,
    ) -> None:
        self._sequences = sequences
        self._placed: Callable[[], None] | None = placed
        self._free = free

    def placed(self) -> None:
        """It is booked on nodes, or waits for nodes, or is given up."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed()

    def ended(self, sequences: int) -> None:
        """So many more of its choices are complete."""
        self._sequences -= sequences
        self._free(sequences)

    def over(self) -> None:
        """All of it is, whatever became of it."""
        self.placed()
        if self._sequences:
            self.ended(self._sequences)


@dataclass(slots=True)
class InFlightRequest:
    """A request's record beside what runs it. `slot` is its place in the output. Where it waits for
    its first place, it does until `give_up_at`. Nodes in `refused` are left alone until then.
    `task` is at work to find a place. Times are the dispatcher's."""

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

    def line(self) -> str:
        """The value of x-baton-placement, as of now."""
        record = self.record
        if record.current is None:
            return f"prefill=- decode=- reason=waiting: {record.waits_for}"
        again = record.replaced_for
        return record.current.placement.line() + (f"; placed again: {again}" if again else "")


def rolled_out(revision: str) -> Unavailable:
    """What ends a request whose kind of nodes is gone for good."""
    return Unavailable(
        f"the pool rolled out to revision {revision} while this request ran, and no stream crosses"
        " over to it; send the request again",
        code="rolled_out",
    )


def count_held(requests: Iterable[InFlightRequest], view: PoolView) -> int:
    """How many of them have no place since no node can take them: new ones that wait, and others
    with no ready node of their kind. One that just looks for its next place is not held."""
    served = {node.kind for node in view.nodes.values() if node.ready}
    return sum(
        request.record.current is None
        and (request.record.attempt == 0 or request.prepared.kind not in served)
        for request in requests
    )
