"""The prefixes that the pool keeps in its caches: which there are, and which nodes still lack one.

In: records of admins and of other routers, the pins in the nodes' loads, a clock. Out: PinPrefix
and UnpinPrefix frames. Nodes forget a pin when their engine ends, sleeps or empties its cache, and
new ones have none. So nothing is remembered of what was sent: whatever a ready node's load lacks is
sent to it, again after RESEND_S. One node gets a prefix first. The others get it when that one has
it, so they fetch from the store what it computed and put there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.link import PINS_SINCE, PinPrefix, PinReport, ToNode, UnpinPrefix
from baton_protocol.store import PinnedPrefix
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_view import PoolView

RESEND_S = 5.0


class PrefixPins:
    """The pinned prefixes of the pool, as this router knows them. `salt_of` returns the salt of a
    tenant's blocks; None for an unknown tenant, whose prefixes are not sent. `now` is Unix time."""

    def __init__(
        self,
        view: PoolView,
        send_frame: Callable[[NodeId, ToNode], None],
        salt_of: Callable[[str], str | None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._send_frame = send_frame
        self._salt_of = salt_of
        self.now = now
        self._clock = clock
        self._records: dict[str, PinnedPrefix] = {}  # those that are removed, too
        # When a frame was sent, by node, its epoch, and the record that it was about.
        self._sent: dict[tuple[NodeId, str, str, int], float] = {}

    @property
    def records(self) -> Iterable[PinnedPrefix]:
        """What is known now, removed ones included."""
        now = self.now()
        self._records = {id: each for id, each in self._records.items() if each.until > now}
        return self._records.values()

    def pinned(self) -> list[PinnedPrefix]:
        """The prefixes that nodes are to keep."""
        return [record for record in self.records if not record.removed]

    def find(self, id: str) -> PinnedPrefix | None:
        return next((record for record in self.pinned() if record.id == id), None)

    def learn(self, record: PinnedPrefix) -> None:
        """A record of this router or of another one. The later change of a prefix counts."""
        known = self._records.get(record.id)
        if known is None or known.changed < record.changed:
            self._records[record.id] = record

    def remove(self, record: PinnedPrefix) -> PinnedPrefix:
        """Unpin a prefix; return the record that tells other routers."""
        changed = max(int(self.now() * 1000), record.changed + 1)
        removed = msgspec.structs.replace(record, removed=True, prompt_ids=(), changed=changed)
        self.learn(removed)
        self.send_missing()
        return removed

    def reports(self, record: PinnedPrefix) -> dict[NodeId, PinReport | None]:
        """What each node says of a prefix, of those that are to keep it; None: nothing yet."""
        views = {view.report.node: view for view in self._keepers(record)}
        return {name: _report_of(view, record) for name, view in sorted(views.items())}

    def send_missing(self) -> None:
        """Tell nodes what they lack, and what they may let go. Call it often."""
        now = self._clock()
        self._sent = {key: at for key, at in self._sent.items() if at + RESEND_S > now}
        for record in list(self.records):
            if record.removed:
                for view in self._view.nodes.values():
                    if view.connected and any(pin.id == record.id for pin in view.pins):
                        self._send(view, record, UnpinPrefix(record.id))
            elif (salt := self._salt_of(record.tenant)) is not None:
                self._send_missing(record, salt)

    def _send_missing(self, record: PinnedPrefix, salt: str) -> None:
        missing, loading, pinned = [], False, False
        for view in self._keepers(record):
            report = _report_of(view, record)
            if report is not None:
                loading |= report.state == "loading"
                pinned |= report.state == "pinned"
            elif self._key(view, record) in self._sent:
                loading = True
            else:
                missing.append(view)
        if not pinned:
            missing = [] if loading else sorted(missing, key=_readiness)[:1]
        ttl_s = record.until - self.now()
        for view in missing:
            frame = PinPrefix(record.id, record.prompt_ids, ttl_s, record.until, salt)
            self._send(view, record, frame)

    def _keepers(self, record: PinnedPrefix) -> list[NodeView]:
        """The nodes that are to keep a prefix: whose token ids mean the same."""
        return [
            view
            for view in self._view.nodes.values()
            if view.ready
            and view.report.protocol >= PINS_SINCE
            and view.kind.tokenizer == record.tokenizer
        ]

    def _send(self, view: NodeView, record: PinnedPrefix, frame: PinPrefix | UnpinPrefix) -> None:
        key = self._key(view, record)
        if key not in self._sent:
            self._sent[key] = self._clock()
            self._send_frame(view.report.node, frame)

    @staticmethod
    def _key(view: NodeView, record: PinnedPrefix) -> tuple[NodeId, str, str, int]:
        return view.report.node, view.report.epoch, record.id, record.changed


def _report_of(view: NodeView, record: PinnedPrefix) -> PinReport | None:
    """What a node says of this version of a prefix."""
    for report in view.pins:
        if report.id == record.id and report.until == record.until:
            return report
    return None


def _readiness(view: NodeView) -> tuple[bool, int, str]:
    """The order in which nodes compute a prefix for the others: prefill nodes, the idlest first."""
    return view.report.role != "prefill", view.queued_tokens, view.report.node
