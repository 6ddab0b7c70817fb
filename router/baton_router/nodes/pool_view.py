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
from baton_protocol.store import ROLES, DataInstance, Kind, NodeLoad, NodeReport, Role
from baton_router.nodes.node_arrays import NOBODY, NodeArrays
from baton_router.nodes.node_view import Booking, NodeView, state_of
from baton_router.nodes.prefix_index import PrefixIndex
from baton_router.placement.costs import Floats, Ints, NodeGroup, fill_speeds, select_nodes

# How many rolled-out kinds are remembered: requests of older ones have ended long ago.
MOST_ROLLED = 16
LOAD_NUMBERS = NodeLoad.__struct_fields__  # numbers that metrics sum up


@dataclass(slots=True)
class _Members:
    """The ready nodes of one kind, with the names and rows per role. `speeds`: those of each role,
    as of this number of the arrays' changes, without a 0."""

    views: list[NodeView]
    roles: dict[Role, tuple[list[NodeId], Ints]]
    speeds: dict[Role, Floats] = field(default_factory=dict)
    speeds_as_of: int = -1


class PoolView:
    """All known nodes, and the kinds that the pool serves."""

    def __init__(self, clock: Callable[[], float], max_chunks: int) -> None:
        self._clock = clock
        self.chunks = PrefixIndex(max_chunks)
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
            asleep=frame.asleep,
            wakes=frame.wakes,
        )
        view.pins = frame.pins
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
        """Mark nodes without a step for more than `limit_s` seconds as stalled; return new ones. A
        node that sleeps is none: it may load its weights for long when it wakes up."""
        now, stalled = self._clock(), []
        for node, view in self.nodes.items():
            still = view.connected and not view.stalled and not view.report.asleep
            if still and now - view.moved_at > limit_s:
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
            speeds = self._filled_speeds(members)[role]
            group = self._arrays.group(names, rows, lengths, speeds)
            if without:
                group = select_nodes(
                    group, np.array([node not in without for node in names], np.bool_)
                )
            groups[role] = group
        return groups

    def _filled_speeds(self, members: _Members) -> dict[Role, Floats]:
        """The speeds of these nodes, without a 0. Computed again only after a change of any speed:
        most requests come in between."""
        arrays = self._arrays
        if members.speeds_as_of != arrays.speed_changes:
            members.speeds_as_of = arrays.speed_changes
            reported = [arrays.speeds(rows) for _, rows in members.roles.values()]
            members.speeds = dict(zip(members.roles, fill_speeds(reported), strict=True))
        return members.speeds

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
