"""What the router knows of one node: its last report, and the load that the router booked there.

In: reports, bookings. Out: the node's current load and state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton_protocol.ids import RequestId
from baton_protocol.link import PinReport
from baton_protocol.store import Kind, NodeReport, kind_of

# A booking this many seconds older than a load report is certainly counted in it.
BOOKING_ARRIVES_S = 0.05


@dataclass(slots=True)
class Booking:
    """One of this router's requests on a node: uncomputed prompt tokens, running sequences, and
    when it was booked, by the view's clock."""

    tokens: int
    sequences: int
    at: float


@dataclass(slots=True)
class NodeView:
    """What the router knows of one node: its last report, and the load the router booked there.

    In: reports, bookings. Out: the current load. The router knows its own requests exactly, and
    takes the load of other routers from the node's report.

    `connected`: the link is up. `usable`: the router has its tokenizer. `stalled`: its engine made
    no step for too long. `moved_at`: when it last made one or had none to make. `booked` holds this
    router's requests, `booked_*` their sums, `others_*` the rest of its last report. `events` is
    the number of its last cache event frame, `slot` its bit in the chunk index, `row` its row in
    the arrays. `pins` are the pinned prefixes of its last load. `readiness_changed` is called when
    `usable` changes.
    """

    report: NodeReport
    slot: int
    row: int
    readiness_changed: Callable[[], None]
    connected: bool = True
    stalled: bool = False
    moved_at: float = 0.0
    loaded_at: float = 0.0
    chunks: int = 0
    pins: tuple[PinReport, ...] = ()
    events: int = 0
    others_tokens: int = 0
    others_sequences: int = 0
    others_requests: int = 0
    booked_tokens: int = 0
    booked_sequences: int = 0
    booked: dict[RequestId, Booking] = field(default_factory=dict)
    # Constant per engine; each placement reads them.
    kind: Kind = field(init=False)
    chunk_tokens: int = field(init=False)
    chunk_bytes: int = field(init=False)
    _usable: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.kind, layout = kind_of(self.report), self.report.layout
        self.chunk_tokens, self.chunk_bytes = layout.chunk_tokens, layout.chunk_bytes

    @property
    def usable(self) -> bool:
        return self._usable

    @usable.setter
    def usable(self, value: bool) -> None:
        self._usable = value
        self.readiness_changed()

    @property
    def ready(self) -> bool:
        serves = self.connected and self._usable and not self.stalled
        return serves and self.report.state == "ready"

    @property
    def wakes(self) -> bool:
        """Whether it sleeps, or is about to, until a request needs it."""
        return self.connected and self._usable and self.report.wakes

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute there."""
        return self.others_tokens + self.booked_tokens

    @property
    def sequences(self) -> int:
        return self.others_sequences + self.booked_sequences

    @property
    def requests(self) -> int:
        """Requests there, including prefill jobs."""
        return self.others_requests + len(self.booked)

    def compare(self, now: float) -> None:
        """Split a new report into our load and others'. Whatever exceeds our bookings is others'.
        Bookings on their way to the node count as reported; otherwise their load would look like
        others' for one report after they end. If the report has fewer tokens than we booked, our
        prompts progressed. An engine computes prompts in order of arrival, so the remaining tokens
        belong to the youngest bookings that had arrived."""
        load = self.report.load
        total = load.running + load.waiting + load.parked
        self.others_tokens = max(0, load.queued_tokens - self.booked_tokens)
        self.others_sequences = max(0, total - self.booked_sequences)
        self.others_requests = max(0, load.requests - len(self.booked))
        arrived = [b for b in self.booked.values() if b.at < now - BOOKING_ARRIVES_S]
        remaining = load.queued_tokens
        for booking in reversed(arrived):
            remaining_here = min(booking.tokens, remaining)
            remaining -= remaining_here
            self.booked_tokens += remaining_here - booking.tokens
            booking.tokens = remaining_here


def state_of(view: NodeView) -> str:
    """The node's state as /pool shows it."""
    if not view.connected:
        return "lost"
    if view.stalled:
        return "stalled"
    if view.usable and view.report.asleep:
        return "asleep"
    return view.report.state if view.usable else "starting"
