"""What the router believes about its pool, and the load it has booked itself.

In: hellos, loads and cache events of the links, bookings of placements. Out: the candidates of a
placement, and the figures of /pool and /metrics. A router knows its own requests to the moment; of
a node's report it takes what is others'. The last known report is kept when a node falls silent, so
that an old view ages into least-requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import DataInstance, Kind, NodeLoad, NodeReport, kind_of
from baton_router.chunks import ChunkIndex
from baton_router.prices import Candidate

# A booking this much older than a node's load report is surely counted in it.
BOOKING_ARRIVES_S = 0.05

# Fields of NodeLoad that can be summed and drawn.
LOAD_NUMBERS = tuple(
    field.name for field in msgspec.structs.fields(NodeLoad) if field.type in (int, float)
)


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
    are our requests there; `others_*` is what its last report counts beside them."""

    report: NodeReport
    slot: int
    connected: bool = True
    usable: bool = False
    stalled: bool = False
    moved_at: float = 0.0
    loaded_at: float = 0.0
    chunks: int = 0
    others_tokens: int = 0
    others_sequences: int = 0
    booked: dict[RequestId, Booking] = field(default_factory=dict)
    kind: Kind = field(init=False)  # of one engine it never changes; each placement asks for it

    def __post_init__(self) -> None:
        self.kind = kind_of(self.report)

    @property
    def ready(self) -> bool:
        serves = self.connected and self.usable and not self.stalled
        return serves and self.report.state == "ready"

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are to be computed there, as of now."""
        return self.others_tokens + sum(booking.tokens for booking in self.booked.values())

    @property
    def sequences(self) -> int:
        return self.others_sequences + sum(booking.sequences for booking in self.booked.values())

    def compare(self, now: float) -> None:
        """A report came: what in it is more than ours is others'. A booking on its way there is
        taken as counted: were it not, its place would look taken for one report after its end.
        Where the report has fewer tokens than are booked, ours are under way: what is left is
        shared out among the bookings that had arrived."""
        load = self.report.load
        total = load.running + load.waiting + load.parked
        ours = self.booked.values()
        self.others_tokens = max(0, load.queued_tokens - sum(b.tokens for b in ours))
        self.others_sequences = max(0, total - sum(b.sequences for b in ours))
        arrived = [b for b in ours if b.at < now - BOOKING_ARRIVES_S]
        tokens = sum(b.tokens for b in arrived)
        if load.queued_tokens < tokens:
            for booking in arrived:
                booking.tokens = booking.tokens * load.queued_tokens // tokens


class PoolView:
    """All nodes ever met and not forgotten, and which kinds of them the pool serves with."""

    def __init__(self, clock: Callable[[], float], max_chunks: int) -> None:
        self._clock = clock
        self.chunks = ChunkIndex(max_chunks)
        self.nodes: dict[NodeId, NodeView] = {}
        self._kind: Kind | None = None
        self._rolled: dict[Kind, str] = {}  # what the last forgotten node of a kind said

    # --- what links say ---------------------------------------------------------------------

    def hello(self, report: NodeReport) -> NodeView:
        """A link came up. Another epoch is another node: nothing of the old one is kept."""
        old = self.nodes.get(report.node)
        now = self._clock()
        if old is not None and old.report.epoch == report.epoch:
            old.report, old.connected, old.loaded_at, old.moved_at = report, True, now, now
            old.compare(now)
            return old
        if old is not None:
            self._gone(old)
        node = NodeView(report, self.chunks.new_slot(), loaded_at=now, moved_at=now)
        node.compare(now)
        if not report.replaced_by:
            self._rolled.pop(node.kind, None)
        self.nodes[report.node] = node
        return node

    def lost(self, node: NodeId) -> None:
        if node in self.nodes:
            self.nodes[node].connected = False

    def forget(self, node: NodeId) -> None:
        view = self.nodes.pop(node, None)
        if view is not None:
            self._gone(view)

    def _gone(self, view: NodeView) -> None:
        self.chunks.drop_slot(view.slot)
        if view.report.replaced_by:
            self._rolled[view.kind] = view.report.replaced_by
        else:
            self._rolled.pop(view.kind, None)  # it may come back under another name

    def load(self, node: NodeId, frame: Load) -> None:
        """Loads of another epoch than the hello's are nobody's."""
        view = self.nodes.get(node)
        if view is None or view.report.epoch != frame.epoch:
            return
        steps, load = view.report.load.engine_steps_total, frame.load
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
        view.compare(view.loaded_at)
        if load.engine_steps_total != steps or not load.running + load.waiting:
            self.moved(node)

    def moved(self, node: NodeId) -> None:
        """Its engine made a step, or it has none to make."""
        view = self.nodes.get(node)
        if view is not None:
            view.moved_at, view.stalled = self._clock(), False

    def standing(self, limit_s: float) -> list[NodeId]:
        """The nodes that have made no step for so long since the last call; they are stalled."""
        now, found = self._clock(), []
        for node, view in self.nodes.items():
            if view.connected and not view.stalled and now - view.moved_at > limit_s:
                view.stalled = True
                found.append(node)
        return found

    def stood_still(self, seconds: float) -> None:
        """It was this process that heard nothing for so long."""
        for view in self.nodes.values():
            view.moved_at += seconds

    def cache(self, node: NodeId, frame: CacheEvents) -> None:
        view = self.nodes.get(node)
        if view is None or view.report.epoch != frame.epoch:
            return
        if frame.reset:
            self.chunks.drop_slot(view.slot)
            view.slot, view.chunks = self.chunks.new_slot(), 0
        self.chunks.store(view.slot, frame.stored)
        self.chunks.evict(view.slot, frame.evicted)
        view.chunks = max(0, view.chunks + len(frame.stored) - len(frame.evicted))

    # --- bookings ---------------------------------------------------------------------------

    def book(self, node: NodeId, request: RequestId, tokens: int, sequences: int) -> None:
        """In the same act as the decision: no await may stand between the two."""
        self.nodes[node].booked[request] = Booking(tokens, sequences, self._clock())

    def prefilled(self, node: NodeId, request: RequestId) -> None:
        """The request's prompt is computed there: its tokens are no queue any more."""
        view = self.nodes.get(node)
        if view is not None and request in view.booked:
            view.booked[request].tokens = 0

    def release(self, node: NodeId, request: RequestId) -> None:
        view = self.nodes.get(node)
        if view is not None:
            view.booked.pop(request, None)

    # --- what placement sees ------------------------------------------------------------------

    def kind(self) -> Kind | None:
        """The kind served longest: kept while a ready node is of it, else that of most ready nodes
        (the first met among equals); None before any node was ready."""
        self._by_kind()
        return self._kind

    def whole(self) -> dict[Kind, list[NodeView]]:
        """The ready nodes of each kind that new requests may be of. Such a kind has nodes of each
        role of which the kind served longest has some: one stray node is no pool. None is without
        decode nodes where another has them."""
        kinds = self._by_kind()
        if self._kind is None or not kinds:
            return {}
        roles = {kind: {view.report.role for view in nodes} for kind, nodes in kinds.items()}
        whole = {kind: nodes for kind, nodes in kinds.items() if roles[self._kind] <= roles[kind]}
        return {kind: whole[kind] for kind in whole if "decode" in roles[kind]} or whole

    def ready(self, kind: Kind | None = None) -> Iterator[NodeView]:
        """Nodes that may get requests of that kind; by default, new requests of any."""
        if kind is None:
            return (view for nodes in self.whole().values() for view in nodes)
        return (view for view in self.nodes.values() if view.ready and view.kind == kind)

    def rolled_out(self, kind: Kind) -> str:
        """The revision that has taken the place of all nodes of that kind for good, by their own
        last words; "" while one may come back, or as long as nothing else is seen to serve."""
        words = [view.report.replaced_by for view in self.nodes.values() if view.kind == kind]
        others = any(view.ready and view.kind != kind for view in self.nodes.values())
        if not others or not all(words):
            return ""
        return words[-1] if words else self._rolled.get(kind, "")

    def candidates(self, hashes: Sequence[BlockHash], kind: Kind) -> list[Candidate]:
        """Ready nodes with what they hold of the prompt whose chunks are `hashes`."""
        held = self.chunks.prefixes(hashes)
        return [
            Candidate(
                node=view.report.node,
                role=view.report.role,
                queued_tokens=view.queued_tokens,
                sequences=view.sequences,
                speeds=view.report.speeds,
                cached_chunks=held.get(view.slot, 0),
                store=view.report.store,
            )
            for view in self.ready(kind)
        ]

    def instances(self) -> list[dict[NodeId, DataInstance]]:
        """Each data server, in the order of the data URLs, as the pool's nodes see it: the node
        that was heard of last comes last. Links that are down say nothing any more."""
        kind = self.kind()
        heard = [view for view in self.nodes.values() if view.connected and view.kind == kind]
        seen: list[dict[NodeId, DataInstance]] = []
        for view in sorted(heard, key=lambda view: view.loaded_at):
            for number, instance in enumerate(view.report.instances):
                if number == len(seen):
                    seen.append({})
                seen[number][view.report.node] = instance
        return seen

    def _by_kind(self) -> dict[Kind, list[NodeView]]:
        """The ready nodes."""
        kinds: dict[Kind, list[NodeView]] = {}
        for view in self.nodes.values():
            if view.ready:
                kinds.setdefault(view.kind, []).append(view)
        if kinds and self._kind not in kinds:
            self._kind = max(kinds, key=lambda kind: len(kinds[kind]))
        return kinds

    def states(self) -> str:
        """How many nodes are in which state, for people."""
        states = Counter(state_of(view) for view in self.nodes.values())
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))

    def why_not_ready(self) -> str:
        """One line on what the pool waits for, for /ready and 503s."""
        if not self.nodes:
            return "no node has connected yet"
        return f"none of {len(self.nodes)} nodes is ready ({self.states()})"


def state_of(view: NodeView) -> str:
    """The node's state as /pool shows it."""
    if not view.connected:
        return "lost"
    if view.stalled:
        return "stalled"
    return view.report.state if view.usable else "starting"
