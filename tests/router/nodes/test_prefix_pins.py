"""Which node receives a pinned prefix, and when: the router's table, without links."""

from __future__ import annotations

import msgspec
import pytest

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import (
    PINS_SINCE,
    Load,
    PinPrefix,
    PinReport,
    PinState,
    ToNode,
    UnpinPrefix,
)
from baton_protocol.store import NodeLoad, PinnedPrefix, Role, Speeds
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_view import PoolView
from baton_router.nodes.prefix_pins import RESEND_S, PrefixPins
from tests.support.clock import Clock
from tests.support.nodes.fake_node import make_report

ID, UNTIL = "a" * 16, 1000
RECORD = PinnedPrefix(
    id=ID, model="m", tokenizer="t", prompt_ids=(1, 2, 3, 4), until=UNTIL, changed=1
)
ARTIFACTS = {"tokenizer.json": "t"}


class Pool:
    """A table of pins over a view, and the frames that it sent: of Unix time `clock.now`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.view = PoolView(self.clock, max_chunks=100)
        self.sent: list[tuple[str, ToNode]] = []
        salts: dict[str, str | None] = {"": "", "acme": "salt", "gone": None}
        self.pins = PrefixPins(
            self.view,
            lambda node, frame: self.sent.append((node, frame)),
            salts.__getitem__,
            now=self.clock,
            clock=self.clock,
        )

    def node(
        self, name: str, role: Role = "decode", *, tokenizer: str = "t", protocol: int = PINS_SINCE
    ) -> NodeView:
        artifacts = {"tokenizer.json": tokenizer}
        report = make_report(name, role, artifacts=artifacts, protocol=protocol)
        view = self.view.hello(report)
        view.usable = True
        return view

    def says(self, name: str, *states: PinState, until: int = UNTIL, tokens: int = 0) -> None:
        pins = tuple(PinReport(ID, until, state, "why") for state in states)
        load = NodeLoad(queued_tokens=tokens)
        self.view.load(NodeId(name), Load(Epoch("epoch-1"), "ready", Speeds(), load, pins=pins))

    def told(self) -> list[str]:
        """The nodes that receive the prefix now."""
        self.sent.clear()
        self.pins.send_missing()
        return [name for name, frame in self.sent if isinstance(frame, PinPrefix)]


def test_the_idlest_prefill_node_gets_a_prefix_first_and_the_others_when_it_has_it() -> None:
    pool = Pool()
    pool.node("decode-0")
    for name, tokens in (("prefill-0", 90), ("prefill-1", 10)):
        pool.node(name, "prefill")
        pool.says(name, tokens=tokens)
    pool.pins.learn(RECORD)
    assert pool.told() == ["prefill-1"]
    assert pool.sent == [("prefill-1", PinPrefix(ID, (1, 2, 3, 4), UNTIL - pool.clock(), UNTIL))]
    assert pool.told() == []
    pool.says("prefill-1", "loading")
    assert pool.told() == []
    pool.says("prefill-1", "pinned")
    assert pool.told() == ["decode-0", "prefill-0"]
    assert pool.told() == []
    pool.node("decode-1")
    assert pool.told() == ["decode-1"]


@pytest.mark.parametrize("state", ["refused", "released"])
def test_if_a_node_does_not_keep_a_prefix_the_next_one_gets_it(state: PinState) -> None:
    pool = Pool()
    for name in ("decode-0", "decode-1"):
        pool.node(name)
    pool.pins.learn(RECORD)
    assert pool.told() == ["decode-0"]
    pool.says("decode-0", state)
    assert pool.told() == ["decode-1"]
    pool.says("decode-1", "pinned")
    pool.clock.now += RESEND_S
    assert pool.told() == []
    pool.says("decode-0")  # it has forgotten that
    assert pool.told() == ["decode-0"]


def test_a_node_that_does_not_answer_or_forgets_receives_the_prefix_again_after_a_while() -> None:
    pool = Pool()
    pool.node("decode-0")
    pool.pins.learn(RECORD)
    assert (pool.told(), pool.told()) == (["decode-0"], [])
    pool.clock.now += RESEND_S
    assert pool.told() == ["decode-0"]
    pool.says("decode-0", "pinned")
    pool.clock.now += RESEND_S
    assert pool.told() == []
    pool.says("decode-0")  # its cache was reset, or it slept
    assert pool.told() == ["decode-0"]


def test_only_ready_nodes_whose_ids_mean_the_same_and_that_know_the_frame_receive_it() -> None:
    pool = Pool()
    pool.node("old", protocol=PINS_SINCE - 1)
    pool.node("other-tokenizer", tokenizer="u")
    pool.node("lost").connected = False
    pool.node("starting").usable = False
    pool.pins.learn(RECORD)
    assert pool.told() == []
    assert pool.pins.reports(RECORD) == {}


def test_a_tenants_prefix_is_sent_with_its_salt_and_that_of_an_unknown_tenant_is_not() -> None:
    pool = Pool()
    pool.node("decode-0")
    pool.pins.learn(msgspec.structs.replace(RECORD, tenant="gone"))
    assert pool.told() == []
    pool.pins.learn(msgspec.structs.replace(RECORD, tenant="acme", changed=2))
    assert pool.told() == ["decode-0"]
    [(_, frame)] = pool.sent
    assert isinstance(frame, PinPrefix)
    assert frame.salt == "salt"


def test_the_later_change_counts_and_another_end_goes_to_all_again() -> None:
    pool = Pool()
    pool.node("decode-0")
    pool.pins.learn(RECORD)
    pool.told()
    pool.says("decode-0", "pinned")
    renewed = msgspec.structs.replace(RECORD, until=UNTIL + 5, changed=3)
    pool.pins.learn(renewed)
    pool.pins.learn(msgspec.structs.replace(RECORD, until=UNTIL + 9, changed=2))
    assert pool.pins.pinned() == [renewed]
    assert pool.pins.reports(renewed) == {"decode-0": None}
    assert pool.told() == ["decode-0"]
    pool.says("decode-0", "pinned", until=UNTIL + 5)
    assert [report and report.state for report in pool.pins.reports(renewed).values()] == ["pinned"]


def test_a_removed_prefix_is_unpinned_on_each_node_that_still_reports_it() -> None:
    pool = Pool()
    for name in ("decode-0", "decode-1"):
        pool.node(name)
        pool.says(name, "pinned")
    pool.pins.learn(RECORD)
    removed = pool.pins.remove(RECORD)
    assert removed == msgspec.structs.replace(
        RECORD, removed=True, prompt_ids=(), changed=removed.changed
    )
    assert removed.changed > RECORD.changed
    assert pool.sent == [(f"decode-{n}", UnpinPrefix(ID)) for n in range(2)]
    assert (pool.pins.pinned(), pool.pins.find(ID)) == ([], None)
    pool.pins.learn(RECORD)  # another router does not know of it yet
    assert pool.pins.pinned() == []
    for name in ("decode-0", "decode-1"):
        pool.says(name)
    assert (pool.told(), pool.sent) == ([], [])


def test_a_prefix_whose_time_is_over_is_forgotten() -> None:
    pool = Pool()
    pool.node("decode-0")
    pool.pins.learn(RECORD)
    pool.clock.now = float(UNTIL)
    assert (pool.told(), pool.pins.pinned(), list(pool.pins.records)) == ([], [], [])
