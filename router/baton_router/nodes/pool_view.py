"""The router's view of its pool, and the load it has booked itself.

In: hellos, loads and cache events from links, and bookings of placements. Out: the node groups that
placement chooses from, and the figures of /pool and /metrics. When a node falls silent, its last
report is kept, so an old view degrades to least-requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import ROLES, DataInstance, Kind, NodeLoad, NodeReport, Role, kind_of
from baton_router.nodes.prefix_index import ChunkIndex, Lengths
from baton_router.placement.costs import SPEEDS, Ints, NodeGroup, select_nodes

LOADS = ("queued_tokens", "sequences", "requests")
FIRST_ROWS = 16


class NodeArrays:
    """The figures of all nodes as arrays, one row per node, to price all nodes at once.

    In: a node's figures whenever the view learns them. Out: a NodeGroup of some rows, as copies
    that later changes do not affect. Rows of forgotten nodes are reused.
    """

    def __init__(self) -> None:
        self._figures = np.zeros((len(LOADS) + len(SPEEDS), FIRST_ROWS))
        self._store_up = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self._slots = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._free = list(range(FIRST_ROWS))
        self._unmeasured: set[int] = set()

    def add(self) -> int:
        """Reserve a row for one node."""
        if not self._free:
            rows = self._figures.shape[1]
            self._figures = np.concatenate((self._figures, np.zeros_like(self._figures)), axis=1)
            self._store_up = np.concatenate((self._store_up, np.zeros_like(self._store_up)))
            self._slots = np.concatenate((self._slots, np.zeros_like(self._slots)))
            self._free = list(range(rows, 2 * rows))
        return self._free.pop()

    def remove(self, row: int) -> None:
        self._free.append(row)
        self._unmeasured.discard(row)

    def set_report(self, row: int, report: NodeReport) -> None:
        """Set a node's speeds and store state."""
        speeds = [getattr(report.speeds, name) for name in SPEEDS]
        self._figures[len(LOADS) :, row] = speeds
        if min(speeds) > 0:
            self._unmeasured.discard(row)
        else:
            self._unmeasured.add(row)
        self._store_up[row] = report.store == "up"

    def set_load(self, row: int, queued_tokens: int, sequences: int, requests: int) -> None:
        self._figures[: len(LOADS), row] = (queued_tokens, sequences, requests)

    def set_slot(self, row: int, slot: int) -> None:
        """Set a node's bit in the chunk index."""
        self._slots[row] = slot

    def group(self, nodes: Sequence[NodeId], rows: Ints, lengths: Lengths) -> NodeGroup:
        """A group of `nodes`, which have these `rows`. `lengths`: prompt chunks held, per slot."""
        figures = self._figures.take(rows, axis=1)
        return NodeGroup(
            nodes=nodes,
            cached_chunks=lengths[self._slots[rows]],
            store_up=self._store_up[rows],
            measured=not self._unmeasured,
            **dict(zip(LOADS + SPEEDS, figures, strict=True)),
        )


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
    the arrays. `readiness_changed` is called when `usable` changes.
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
    events: int = 0
    others_tokens: int = 0
    others_sequences: int = 0
    others_requests: int = 0
    booked_tokens: int = 0
    booked_sequences: int = 0
    booked: dict[RequestId, Booking] = field(default_factory=dict)
    kind: Kind = field(init=False)  # constant per engine; each placement reads it
    _usable: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.kind = kind_of(self.report)

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
    return view.report.state if view.usable else "starting"


__all__ = ["BOOKING_ARRIVES_S", "LOAD_NUMBERS", "NodeView", "PoolView", "state_of"]

# How many rolled-out kinds are remembered: requests of older ones have ended long ago.
MOST_ROLLED = 16

NOBODY = NodeArrays().group((), np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))

LOAD_NUMBERS = NodeLoad.__struct_fields__  # numbers that metrics sum up


@dataclass(frozen=True, slots=True)
class _Members:
    """The ready nodes of one kind, with the names and rows per role."""

    views: list[NodeView]
    roles: dict[Role, tuple[list[NodeId], Ints]]


class PoolView:
    """All known nodes, and the kinds that the pool serves."""

    def __init__(self, clock: Callable[[], float], max_chunks: int) -> None:
        self._clock = clock
        self.chunks = ChunkIndex(max_chunks)
        self.nodes: dict[NodeId, NodeView] = {}
        self._arrays = NodeArrays()
        self._members: dict[Kind, _Members] | None = None  # cached ready nodes; None after a change
        self._kind: Kind | None = None
        self._rolled: dict[Kind, str] = {}  # revision that replaced each kind of forgotten nodes
        self.eased: Callable[[], None] = lambda: None  # called when booked load shrinks

    # --- events from links ------------------------------------------------------------------

    def hello(self, report: NodeReport) -> NodeView:
        """A link came up. A new epoch is a new node that inherits nothing from the old one."""
        old = self.nodes.get(report.node)
        now = self._clock()
        if old is not None and old.report.epoch == report.epoch:
            old.report, old.connected, old.loaded_at, old.moved_at = report, True, now, now
            self._add_to_arrays(old)
            return old
        if old is not None:
            self._remove(old)
        node = NodeView(
            report,
            self.chunks.new_slot(),
            self._arrays.add(),
            self._forget_ready,
            loaded_at=now,
            moved_at=now,
        )
        self._add_to_arrays(node)
        if not report.replaced_by:
            self._rolled.pop(node.kind, None)
        self.nodes[report.node] = node
        return node

    def _add_to_arrays(self, view: NodeView) -> None:
        self._arrays.set_slot(view.row, view.slot)
        self._reported(view)
        self._forget_ready()

    def _reported(self, view: NodeView) -> None:
        view.compare(view.loaded_at)
        self._arrays.set_report(view.row, view.report)
        self._loaded(view)

    def _loaded(self, view: NodeView) -> None:
        self._arrays.set_load(view.row, view.queued_tokens, view.sequences, view.requests)

    def _forget_ready(self) -> None:
        """Invalidate the cached ready nodes."""
        self._members = None

    def lost(self, node: NodeId) -> None:
        if node in self.nodes:
            self.nodes[node].connected = False
            self._forget_ready()

    def forget(self, node: NodeId) -> None:
        view = self.nodes.pop(node, None)
        if view is not None:
            self._remove(view)

    def _remove(self, view: NodeView) -> None:
        self.chunks.drop_slot(view.slot)
        self._arrays.remove(view.row)
        self._forget_ready()
        if view.report.replaced_by:
            self._rolled.pop(view.kind, None)
            self._rolled[view.kind] = view.report.replaced_by
            if len(self._rolled) > MOST_ROLLED:
                del self._rolled[next(iter(self._rolled))]
        else:
            self._rolled.pop(view.kind, None)  # nodes of the kind may come back under other names

    def load(self, node: NodeId, frame: Load) -> None:
        """Apply a load report; ignore one of another epoch than the hello's."""
        view = self.nodes.get(node)
        if view is None or view.report.epoch != frame.epoch:
            return
        steps, load = view.report.load.engine_steps_total, frame.load
        state = view.report.state
        view.report = msgspec.structs.replace(
            view.report,
            state=frame.state,
            speeds=frame.speeds,
            load=load,
            store=frame.store,
            instances=frame.instances,
            reason=frame.reason,
            replaced_by=frame.replaced_by,
        )
        view.loaded_at = self._clock()
        self._reported(view)
        if frame.state != state:
            self._forget_ready()
        if load.engine_steps_total != steps or not load.running + load.waiting:
            self.moved(node)

    def moved(self, node: NodeId) -> None:
        """The engine made a step or has none to make."""
        view = self.nodes.get(node)
        if view is not None:
            view.moved_at = self._clock()
            if view.stalled:
                view.stalled = False
                self._forget_ready()

    def find_stalled(self, limit_s: float) -> list[NodeId]:
        """Mark nodes without a step for more than `limit_s` seconds as stalled; return new ones."""
        now, stalled = self._clock(), []
        for node, view in self.nodes.items():
            if view.connected and not view.stalled and now - view.moved_at > limit_s:
                view.stalled = True
                self._forget_ready()
                stalled.append(node)
        return stalled

    def skip_time(self, seconds: float) -> None:
        """This process was blocked for `seconds`: do not count them against any node."""
        for view in self.nodes.values():
            view.moved_at += seconds

    def cache(self, node: NodeId, frame: CacheEvents) -> bool:
        """Apply cache events. Return False without applying them if earlier ones are missing."""
        view = self.nodes.get(node)
        if view is None or view.report.epoch != frame.epoch:
            return True
        if frame.reset:
            self.forget_chunks(node)
        elif frame.seq and frame.seq != view.events + 1:
            return False
        view.events = frame.seq
        self.chunks.store(view.slot, frame.stored)
        self.chunks.evict(view.slot, frame.evicted)
        view.chunks = max(0, view.chunks + len(frame.stored) - len(frame.evicted))
        return True

    def forget_chunks(self, node: NodeId) -> None:
        """Treat the node's cache as empty."""
        view = self.nodes.get(node)
        if view is not None:
            self.chunks.drop_slot(view.slot)
            view.slot, view.chunks = self.chunks.new_slot(), 0
            self._arrays.set_slot(view.row, view.slot)

    # --- bookings ---------------------------------------------------------------------------

    def book(self, node: NodeId, request: RequestId, tokens: int, sequences: int) -> None:
        """Book load for a request. Do not await between the decision and this call."""
        view = self.nodes[node]
        self._unbook(view, request)
        view.booked[request] = Booking(tokens, sequences, self._clock())
        view.booked_tokens += tokens
        view.booked_sequences += sequences
        self._loaded(view)

    def prefilled(self, node: NodeId, request: RequestId) -> None:
        """The node has computed the request's prompt: release its tokens."""
        view = self.nodes.get(node)
        booking = view.booked.get(request) if view is not None else None
        if view is not None and booking is not None and booking.tokens:
            view.booked_tokens -= booking.tokens
            booking.tokens = 0
            self._loaded(view)
            self.eased()

    def sequence_ended(self, node: NodeId, request: RequestId) -> None:
        """Release one of the request's sequences."""
        view = self.nodes.get(node)
        booking = view.booked.get(request) if view is not None else None
        if view is not None and booking is not None and booking.sequences:
            view.booked_sequences -= 1
            booking.sequences -= 1
            self._loaded(view)
            self.eased()

    def release(self, node: NodeId, request: RequestId) -> None:
        view = self.nodes.get(node)
        if view is not None and self._unbook(view, request):
            self._loaded(view)
            self.eased()

    def _unbook(self, view: NodeView, request: RequestId) -> bool:
        booking = view.booked.pop(request, None)
        if booking is None:
            return False
        view.booked_tokens -= booking.tokens
        view.booked_sequences -= booking.sequences
        return True

    # --- what placement sees ------------------------------------------------------------------

    def kind(self) -> Kind | None:
        """The kind served longest. It stays while a ready node is of it, then becomes the kind of
        most ready nodes (the first met among equals). None before any node was ready."""
        self._by_kind()
        return self._kind

    def sample(self) -> NodeView | None:
        """A node of the kind served longest, in any state."""
        kind = self.kind()
        return next((view for view in self.nodes.values() if view.kind == kind), None)

    def whole(self) -> dict[Kind, list[NodeView]]:
        """The ready nodes of each kind that may get new requests. A kind needs a node of each role
        that the kind served longest has, so a stray node is no pool. If one kind has decode nodes,
        kinds without them are left out."""
        kinds = self._by_kind()
        if self._kind is None or not kinds:
            return {}
        required_roles = kinds[self._kind].roles.keys()
        complete = {
            kind: members
            for kind, members in kinds.items()
            if required_roles <= members.roles.keys()
        }
        serving = {
            kind: members for kind, members in complete.items() if "decode" in members.roles
        } or complete
        return {kind: members.views for kind, members in serving.items()}

    def can_spare(self, going: Container[NodeId]) -> bool:
        """Whether some kind keeps all its roles without the nodes in `going`. Also True if no kind
        serves at all, because then nothing is lost."""
        kinds = self.whole().values()
        return not kinds or any(
            {view.report.role for view in views if view.report.node not in going}
            == {view.report.role for view in views}
            for views in kinds
        )

    def ready(self, kind: Kind | None = None) -> Iterator[NodeView]:
        """Nodes that may get requests of this kind; by default, new requests of any kind."""
        if kind is None:
            return (view for nodes in self.whole().values() for view in nodes)
        members = self._by_kind().get(kind)
        return iter(members.views if members is not None else ())

    def rolled_out(self, kind: Kind) -> str:
        """The revision that has replaced all nodes of this kind for good, by their own reports. ""
        if one may come back, or while no other kind is ready."""
        revisions = [view.report.replaced_by for view in self.nodes.values() if view.kind == kind]
        others = any(view.ready and view.kind != kind for view in self.nodes.values())
        if not others or not all(revisions):
            return ""
        return revisions[-1] if revisions else self._rolled.get(kind, "")

    def groups(
        self, hashes: Sequence[BlockHash], kind: Kind, without: Container[NodeId] = ()
    ) -> dict[Role, NodeGroup]:
        """Ready nodes by role, except those in `without`, with the prefix of `hashes` they hold."""
        lengths = self.chunks.prefixes(hashes)
        groups: dict[Role, NodeGroup] = {}
        members = self._by_kind().get(kind)
        for role in ROLES:
            if members is None or role not in members.roles:
                groups[role] = NOBODY
                continue
            names, rows = members.roles[role]
            group = self._arrays.group(names, rows, lengths)
            if without:
                group = select_nodes(
                    group, np.array([node not in without for node in names], np.bool_)
                )
            groups[role] = group
        return groups

    def instances(self) -> list[dict[NodeId, DataInstance]]:
        """Each data server, in the order of the data URLs, as each connected node of the pool's
        kind sees it. The node with the latest report comes last."""
        kind = self.kind()
        connected = [view for view in self.nodes.values() if view.connected and view.kind == kind]
        seen: list[dict[NodeId, DataInstance]] = []
        for view in sorted(connected, key=lambda view: view.loaded_at):
            for index, instance in enumerate(view.report.instances):
                if index == len(seen):
                    seen.append({})
                seen[index][view.report.node] = instance
        return seen

    def _by_kind(self) -> dict[Kind, _Members]:
        """The ready nodes by kind, cached."""
        if self._members is None:
            kinds: dict[Kind, list[NodeView]] = {}
            for view in self.nodes.values():
                if view.ready:
                    kinds.setdefault(view.kind, []).append(view)
            self._members = {kind: _members(views) for kind, views in kinds.items()}
            if kinds and self._kind not in kinds:
                self._kind = max(kinds, key=lambda kind: len(kinds[kind]))
        return self._members

    def states(self) -> str:
        """Number of nodes in each state, as text."""
        states = Counter(state_of(view) for view in self.nodes.values())
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))

    def why_not_ready(self) -> str:
        """One line on why no node is ready, for /ready and 503 answers."""
        if not self.nodes:
            return "no node has connected yet"
        return f"none of the {len(self.nodes)} nodes is ready ({self.states()})"


def _members(views: list[NodeView]) -> _Members:
    roles: dict[Role, tuple[list[NodeId], Ints]] = {}
    for role in ROLES:
        nodes = [view for view in views if view.report.role == role]
        if nodes:
            rows = np.array([view.row for view in nodes])
            roles[role] = ([view.report.node for view in nodes], rows)
    return _Members(views, roles)
