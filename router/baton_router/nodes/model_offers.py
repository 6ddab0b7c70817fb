"""Which models the pool offers, and which of them serves a request.

In: the view's ready nodes, their models, and the name that a client wants. Out: a Serving, or why
there is none. In a roll-out the pool offers two kinds, and new requests draw one by its nodes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from baton_protocol.errors import NotFound, Unavailable
from baton_protocol.pooling import Pooling
from baton_protocol.store import Kind, NodeReport
from baton_router.nodes.model_store import ModelStore
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_model import PoolModel
from baton_router.nodes.pool_view import PoolView

KEPT_OFFERS = 4  # lists of nodes whose offer is kept; a roll-out uses two


@dataclass(frozen=True, slots=True)
class Serving:
    """One kind that the pool serves: a model, its limits, and one of its nodes.

    `weight` is its share of new requests. It answers under `name`, one of its `names`. `made` is
    when its model files were written, in Unix seconds; 0 if no node reports it."""

    kind: Kind
    model: PoolModel
    names: tuple[str, ...]
    name: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    sample: NodeReport
    weight: int
    made: int = 0


class ModelOffers:
    """The offers of the ready nodes, by kind. `served_names`, if there are any, replace the models'
    own names; answers show the first of them."""

    def __init__(
        self, view: PoolView, models: ModelStore, served_names: Sequence[str], rng: random.Random
    ) -> None:
        self._view = view
        self._models = models
        self._served_names = tuple(served_names)
        self._rng = rng
        self._last: list[Serving] = []  # the last known offer
        self._cached: deque[tuple[Sequence[NodeView], Serving]] = deque(maxlen=KEPT_OFFERS)

    def choose(self, wanted: str | None, tasks: Container[Pooling] = ("",)) -> Serving:
        """Choose what serves a new request for the model `wanted` (None: any), if possible with
        nodes that do one of `tasks`. While no node is ready, this is the last known offer, because
        a request may wait. Raise Unavailable if no model is known yet, NotFound if no model has
        that name."""
        self.remember_offer()
        if not self._last:
            raise Unavailable(f"the router cannot serve requests now: {self._view.why_not_ready()}")
        able = [serving for serving in self._last if serving.kind.pooling in tasks]
        drawn = self._draw(able, wanted) or self._draw(self._last, wanted)
        if drawn is None:
            raise self.no_model(wanted)
        return drawn

    def of_kind(self, kind: Kind, name: str) -> Serving:
        """What serves nodes of this kind, under the name `name`. Raise Unavailable if none does."""
        self.remember_offer()
        for serving in self._last:
            if serving.kind == kind:
                return serving if serving.name == name else replace(serving, name=name)
        raise Unavailable(
            f"the nodes that can continue this stream of {name!r} are not here now:"
            f" {self._view.why_not_ready() or 'the pool serves others'}"
        )

    def check_name(self, wanted: str | None) -> None:
        """Raise NotFound for a name that none of the known models has."""
        if wanted and (names := self.names()) and wanted not in names:
            raise self.no_model(wanted)

    def find_successor(
        self, kind: Kind, wanted: str | None, fits: Callable[[Serving], bool]
    ) -> Serving | None:
        """The replacement for a request whose kind gets no new requests any more. Use it only while
        the client has no output."""
        if not self.is_superseded(kind):
            return None
        return self._draw([serving for serving in self.current() if fits(serving)], wanted)

    def is_superseded(self, kind: Kind) -> bool:
        """True if new requests go only to other kinds."""
        serving_kinds = self._view.whole()
        return bool(serving_kinds) and kind not in serving_kinds

    def current(self) -> list[Serving]:
        """What may serve new requests: one kind, two in a roll-out, none without ready nodes."""
        return [
            serving for nodes in self._view.whole().values() if (serving := self._offer_of(nodes))
        ]

    def why_unready(self) -> str | None:
        """Why no node is ready; None if one is."""
        return None if self.current() else self._view.why_not_ready()

    def names(self) -> list[str]:
        """Names of the served models, even while their nodes are away."""
        if self._served_names:
            return list(self._served_names)
        return list(
            dict.fromkeys(name for serving in self.current_or_last() for name in serving.names)
        )

    def current_or_last(self) -> list[Serving]:
        """The current offer, or the last one if there is none."""
        return self.current() or self._last

    def no_model(self, wanted: str | None) -> NotFound:
        """The error for a name that no served model has."""
        names = " and ".join(map(repr, self.names())) or "nothing yet"
        message = f"model {wanted!r} does not exist; this pool serves {names}"
        return NotFound(message, param="model", code="model_not_found")

    def _offer_of(self, nodes: Sequence[NodeView]) -> Serving | None:
        """The offer of ready nodes of one kind; None without their model. Cached by list."""
        for cached_nodes, serving in self._cached:
            if cached_nodes is nodes:
                return serving
        reports = [view.report for view in nodes]
        model = self._models.find_built(reports[0])
        if model is None:
            return None
        model_names = tuple(dict.fromkeys(report.model for report in reports))
        names = self._served_names or model_names
        offer = Serving(
            kind=nodes[0].kind,
            model=replace(model, pooling=reports[0].pooling),
            names=names,
            name=names[0],
            max_model_len=min(report.max_model_len for report in reports),
            vocab_size=reports[0].vocab_size,
            max_logprobs=min(report.max_logprobs for report in reports),
            sample=reports[0],
            weight=sum(report.role == "decode" for report in reports) or len(reports),
            made=min((made for report in reports if (made := report.model_made)), default=0),
        )
        self._cached.append((nodes, offer))
        return offer

    def _draw(self, offered: Sequence[Serving], wanted: str | None) -> Serving | None:
        matching = [serving for serving in offered if not wanted or wanted in serving.names]
        if not matching:
            return None
        drawn = matching[0]
        if len(matching) > 1:
            [drawn] = self._rng.choices(matching, [serving.weight for serving in matching])
        if self._served_names or wanted in (None, "", drawn.name):
            return drawn
        return replace(drawn, name=wanted)

    def remember_offer(self) -> None:
        """Remember the current offer, for requests that come while no node is ready."""
        self._last = self.current_or_last()
