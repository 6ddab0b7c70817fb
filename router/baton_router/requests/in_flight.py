"""A request on its way through the pool: its record, and its output queue, ticket and task.

In: a prepared request, its answer's queue. Out: the line that tells its client where it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton_protocol.errors import ErrorRecord, Unavailable
from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.link import Delta
from baton_protocol.request import Request
from baton_protocol.store import Kind
from baton_router.errors import RequestFailed
from baton_router.nodes.model_artifacts import Serving
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.reading import AnswerReading
from baton_router.requests.state import RequestRecord
from baton_router.settings import Ranking

Batch = list[tuple[int, Delta]]
Pour = Callable[[Batch], bool]


class OutputQueue:
    """What the nodes produced for one HTTP answer, until its handler writes it. One writer, one
    reader.

    In: deltas of the answer's requests, each with its slot (the prompt's index), their ends, or one
    error. Out: batches, as large as what arrived since the reader last looked. A reader that does
    not look, since its client does not read, is reported: what waits for it is bounded.

    A reader that has begun to write may leave a `pour` for what comes while it waits: waking a
    handler costs more than writing a token does.

    `open` counts the requests that have not ended. With more than `most` tokens unread (None: there
    is no bound) `overflow` is called, once. `pour` takes a batch, or says False, and then the
    reader is woken for it; ends and errors are the reader's.
    """

    def __init__(
        self,
        requests: int,
        most: int | None = None,
        overflow: Callable[[], object] = lambda: None,
    ) -> None:
        self.open = requests
        self.pour: Pour | None = None
        self._most = most
        self._overflow = overflow
        self._unread = 0
        self._items: Batch = []
        self._error: ErrorRecord | None = None
        self._reader: asyncio.Future[bool] | None = None  # waits; False: for too long
        self._since = 0.0  # when it began to, in the loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._pouring: asyncio.Handle | None = None

    def put(self, slot: int, delta: Delta) -> None:
        self._items.append((slot, delta))
        self._unread += len(delta.ids)
        if self._most is not None and self._unread > self._most:
            self._most = None
            self._overflow()
        if self.pour is None:
            self._wake()
        elif self._pouring is None and self._reader is not None:
            self._pouring = self._reader.get_loop().call_soon(self._pour, self.pour)

    def end(self) -> None:
        self.open -= 1
        self._wake()

    def fail(self, error: ErrorRecord) -> None:
        """The first error counts; what arrived before it is still delivered."""
        if self._error is None:
            self._error = error
        self._wake()

    @property
    def over(self) -> bool:
        """All requests have ended well, and everything of them was taken."""
        return self.open <= 0 and not self._items and self._error is None

    async def next(self, patience_s: float | None = None) -> Batch:
        """Wait for more; an empty batch means that all requests ended. Raise RequestFailed, or
        TimeoutError where nothing came for `patience_s`, which is the same for all calls; a later
        call goes on waiting."""
        while not self._items:
            if self._error is not None:
                raise RequestFailed(self._error)
            if self.open <= 0:
                return []
            if not await self._woken(patience_s):
                raise TimeoutError
        batch, self._items, self._unread = self._items, [], 0
        return batch

    def close(self) -> None:
        """Nobody reads any more."""
        for handle in (self._timer, self._pouring):
            if handle is not None:
                handle.cancel()

    def _wake(self, put: bool = True) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(put)
        self._reader = None

    def _pour(self, pour: Pour) -> None:
        self._pouring = None
        reader = self._reader
        if reader is None or reader.done():
            return  # it takes the batch itself
        try:
            taken = pour(self._items)
        except Exception as error:  # our bug, told where the reader's own would be
            reader.set_exception(error)
            return
        if taken:
            self._items, self._unread = [], 0
            self._since = reader.get_loop().time()
        else:
            self._wake()

    async def _woken(self, patience_s: float | None) -> bool:
        """One timer serves many waits, and is set again when it has run: one for each token costs
        as much as the token."""
        loop = asyncio.get_running_loop()
        if patience_s is not None:
            self._since = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(patience_s, self._look, loop, patience_s)
        self._reader = loop.create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _look(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        """Whether the reader has waited for so long."""
        self._timer = None
        if self._reader is None:
            return
        due = self._since + patience_s
        if loop.time() < due:
            self._timer = loop.call_at(due, self._look, loop, patience_s)
        else:
            self._wake(False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is tokenized and hashed. `chunks` name its full chunks; only nodes of `kind`
    can run it. By `deadline`, a time of the router's clock, it is to be over; None is any time.
    `wanted` is the model's name, where its client gave one; with `fills` its answer may
    be as long as the context leaves. `ranking` is the placement policy that it asked for.
    `reading` is how its answers are read, None where they are text."""

    request: Request
    chunks: tuple[BlockHash, ...]
    serving: Serving
    wanted: str | None
    fills: bool
    ranking: Ranking | None = None
    deadline: float | None = None
    reading: AnswerReading | None = None

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
