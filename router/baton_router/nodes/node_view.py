"""What the router believes of one node: its last report, and the load the router booked there.

In: reports, bookings. Out: the load as of now. A router knows its own requests to the moment; of a
node's report it takes what is others'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton_protocol.ids import RequestId
from baton_protocol.store import Kind, NodeReport, kind_of

# A booking this much older than a node's load report is surely counted in it.
BOOKING_ARRIVES_S = 0.05


@dataclass(slots=True)
class Booking:
    """A request of ours on a node: prompt tokens it has yet to compute, its sequences, and when it
    was given, by the view's clock."""

    tokens: int
    sequences: int
    at: float


@dataclass(slots=True)
class NodeView:
    """One node. `connected`: its link is up. `usable`: its tokenizer is here too. `stalled`: its
    engine has made no step for long, `moved_at` is when it last did or had none to make. `booked`
    are our requests there, `booked_*` their sums; `others_*` is what its last report counts beside
    them. `events` is the number of its last frame of cache events, `row` its place in the roster;
    `standing` is called when `usable` changes."""

    report: NodeReport
    slot: int
    row: int
    standing: Callable[[], None]
    connected: bool = True
    stalled: bool = False
    moved_at: float = 0.0
    loaded_at: float = 0.0
    chunks: int = 0
    events: int = 0
    others_tokens: int = 0
    others_sequences: int = 0
    others_requests: int = 0
    booked_tokens: int = 0
    booked_sequences: int = 0
    booked: dict[RequestId, Booking] = field(default_factory=dict)
    kind: Kind = field(init=False)  # of one engine it never changes; each placement asks for it
    _usable: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.kind = kind_of(self.report)

    @property
    def usable(self) -> bool:
        return self._usable

    @usable.setter
    def usable(self, value: bool) -> None:
        self._usable = value
        self.standing()

    @property
    def ready(self) -> bool:
        serves = self.connected and self._usable and not self.stalled
        return serves and self.report.state == "ready"

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are to be computed there, as of now."""
        return self.others_tokens + self.booked_tokens

    @property
    def sequences(self) -> int:
        return self.others_sequences + self.booked_sequences

    @property
    def requests(self) -> int:
        """Prefill jobs are among them."""
        return self.others_requests + len(self.booked)

    def compare(self, now: float) -> None:
        """A report came: what in it is more than ours is others'. A booking on its way there is
        taken as counted: were it not, its place would look taken for one report after its end.
        Where the report has fewer tokens than are booked, ours are under way. An engine computes
        prompts in the order in which they came: what is left belongs to the youngest bookings of
        those that had arrived."""
        load = self.report.load
        total = load.running + load.waiting + load.parked
        self.others_tokens = max(0, load.queued_tokens - self.booked_tokens)
        self.others_sequences = max(0, total - self.booked_sequences)
        self.others_requests = max(0, load.requests - len(self.booked))
        arrived = [b for b in self.booked.values() if b.at < now - BOOKING_ARRIVES_S]
        left = load.queued_tokens
        for booking in reversed(arrived):
            kept = min(booking.tokens, left)
            left -= kept
            self.booked_tokens += kept - booking.tokens
            booking.tokens = kept


def state_of(view: NodeView) -> str:
    """The node's state as /pool shows it."""
    if not view.connected:
        return "lost"
    if view.stalled:
        return "stalled"
    return view.report.state if view.usable else "starting"
