"""A request's node drains, is replaced, dies or loses its link: which nodes finish the request. One
row for each case in which the client gets the whole reply; cases with a script of their own are in
test_drain, test_rollout and test_failover."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from baton_protocol.ids import Fingerprint
from baton_protocol.link import (
    Abort,
    DrainNode,
    FirstTokens,
    NoFirstTokens,
    PrefillJob,
    RunJob,
    ToNode,
)
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

NEW = Fingerprint("0" * 32)
NODES: dict[str, dict[str, Any]] = {
    "decode-0": {"role": "decode"},
    "decode-1": {"role": "decode"},
    "decode-new": {"role": "decode", "fingerprint": NEW, "revision": "r2"},
    "prefill-0": {"role": "prefill"},
    "prefill-1": {"role": "prefill"},
}


async def leaves(client: pools.Client, node: FakeNode) -> None:
    """The node drains, and its drain deadline is over."""
    await node.say_load("draining", leaving=True)


async def is_replaced(client: pools.Client, node: FakeNode) -> None:
    """Like `leaves`, for a roll-out to r2."""
    await pools.drain_as_replaced(client, node)


async def dies(client: pools.Client, node: FakeNode) -> None:
    await node.stop()


async def loses_its_link(client: pools.Client, node: FakeNode) -> None:
    node.cut_links()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: `event` happens to `node`.

    `at`: before the event, the router has half of the answer, or both nodes have their jobs of a
    hand-off. `beside`: more nodes that run from the start. `joins`: nodes that join before the
    event. `frames`: all frames that each node gets ("run 2 from 6": the second attempt, behind 6
    tokens). `placement` and `again`: the last placement in the answer's header, and the reason for
    the second attempt."""

    at: Literal["half", "handing off"]
    node: str
    event: Callable[[Any, FakeNode], Awaitable[None]]
    frames: Mapping[str, list[str]]
    beside: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    placement: str
    again: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        beside = "".join(f"_with_{name}" for name in (*self.beside, *self.joins))
        patience = "_at_once" if self.settings.get("link_patience_s") == 0.0 else ""
        at = self.at.replace(" ", "_")
        return f"{at}_{self.node}_{self.event.__name__}{beside}{patience}"


ROWS = (
    Row(
        at="half",
        node="decode-0",
        event=leaves,
        joins=("decode-1",),
        frames={"decode-0": ["run 1", "abort 1"], "decode-1": ["run 2 from 6"]},
        placement="prefill=- decode=decode-1 reason=resumed",
        again="drained",
    ),
    Row(
        at="half",
        node="decode-0",
        event=leaves,
        beside=("prefill-0",),
        settings={"handoff": "never", "missing_role": "queue"},
        frames={"decode-0": ["run 1", "abort 1"], "prefill-0": ["run 2 from 6"]},
        placement="prefill=- decode=prefill-0 reason=no_decode",
        again="drained",
    ),
    Row(
        at="half",
        node="decode-0",
        event=is_replaced,
        joins=("decode-1", "decode-new"),
        frames={
            "decode-0": ["run 1", "drain", "abort 1"],
            "decode-1": ["run 2 from 6"],
            "decode-new": [],
        },
        placement="prefill=- decode=decode-1 reason=resumed",
        again="drained",
    ),
    Row(
        at="half",
        node="decode-0",
        event=dies,
        joins=("decode-1",),
        frames={"decode-0": ["run 1"], "decode-1": ["run 2 from 6"]},
        placement="prefill=- decode=decode-1 reason=resumed",
        again="link",
    ),
    Row(
        at="half",
        node="decode-0",
        event=dies,
        beside=("prefill-0",),
        joins=("decode-1",),
        settings={"handoff": "always"},
        frames={
            "decode-0": ["run 1", "first"],
            "prefill-0": ["prefill 1 for decode-0"],
            "decode-1": ["run 2 from 6"],
        },
        placement="prefill=- decode=decode-1 reason=resumed",
        again="link",
    ),
    Row(
        at="half",
        node="decode-0",
        event=loses_its_link,
        joins=("decode-1",),
        settings={"link_patience_s": 20.0},
        frames={"decode-0": ["run 1", "run 1 from 6"], "decode-1": []},
        placement="prefill=- decode=decode-0 reason=no_prefill",
    ),
    Row(
        at="half",
        node="decode-0",
        event=loses_its_link,
        settings={"link_patience_s": 0.0},
        frames={"decode-0": ["run 1", "abort 1", "run 2 from 6"]},
        placement="prefill=- decode=decode-0 reason=resumed",
        again="link",
    ),
    Row(
        at="handing off",
        node="decode-0",
        event=leaves,
        joins=("decode-1",),
        frames={
            "decode-0": ["run 1", "abort 1"],
            "prefill-0": ["prefill 1 for decode-0", "abort 1", "prefill 2 for decode-1"],
            "decode-1": ["run 2", "first"],
        },
        placement="prefill=prefill-0 decode=decode-1 reason=always",
        again="drained",
    ),
    Row(
        at="handing off",
        node="decode-0",
        event=dies,
        joins=("decode-1",),
        frames={
            "decode-0": ["run 1"],
            "prefill-0": ["prefill 1 for decode-0", "abort 1", "prefill 2 for decode-1"],
            "decode-1": ["run 2", "first"],
        },
        placement="prefill=prefill-0 decode=decode-1 reason=always",
        again="link",
    ),
    Row(
        at="handing off",
        node="prefill-0",
        event=leaves,
        joins=("prefill-1",),
        frames={
            "decode-0": ["run 1", "abort 1", "run 2", "first"],
            "prefill-0": ["prefill 1 for decode-0", "abort 1"],
            "prefill-1": ["prefill 2 for decode-0"],
        },
        placement="prefill=prefill-1 decode=decode-0 reason=always",
        again="drained",
    ),
    Row(
        at="handing off",
        node="prefill-0",
        event=leaves,
        frames={
            "decode-0": ["run 1", "no first"],
            "prefill-0": ["prefill 1 for decode-0", "abort 1"],
        },
        placement="prefill=prefill-0 decode=decode-0 reason=always",
    ),
    Row(
        at="handing off",
        node="prefill-0",
        event=dies,
        joins=("prefill-1",),
        frames={
            "decode-0": ["run 1", "abort 1", "run 2", "first"],
            "prefill-0": ["prefill 1 for decode-0"],
            "prefill-1": ["prefill 2 for decode-0"],
        },
        placement="prefill=prefill-1 decode=decode-0 reason=always",
        again="link",
    ),
    Row(
        at="handing off",
        node="prefill-0",
        event=dies,
        frames={"decode-0": ["run 1", "no first"], "prefill-0": ["prefill 1 for decode-0"]},
        placement="prefill=prefill-0 decode=decode-0 reason=always",
    ),
    Row(
        at="handing off",
        node="prefill-0",
        event=loses_its_link,
        settings={"link_patience_s": 20.0},
        frames={
            "decode-0": ["run 1", "first"],
            "prefill-0": ["prefill 1 for decode-0", "prefill 1 for decode-0"],
        },
        placement="prefill=prefill-0 decode=decode-0 reason=always",
    ),
)


def summary(frames: Iterable[ToNode]) -> list[str]:
    """Frames in the form of `Row.frames`."""
    lines = []
    for frame in frames:
        if isinstance(frame, RunJob):
            length = len(frame.request.outputs[0])
            lines.append(f"run {frame.request.attempt}" + (f" from {length}" if length else ""))
        elif isinstance(frame, PrefillJob):
            lines.append(f"prefill {frame.request.attempt} for {frame.decode_node}")
        elif isinstance(frame, Abort):
            lines.append(f"abort {frame.attempt}")
        else:
            lines.append(
                {FirstTokens: "first", NoFirstTokens: "no first", DrainNode: "drain"}[type(frame)]
            )
    return lines


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_the_client_gets_the_whole_reply_and_nodes_get_only_the_needed_frames(
    row: Row,
) -> None:
    opened = pools.half_answered if row.at == "half" else pools.handing_off
    async with AsyncExitStack() as stack:
        initial = ("decode-0", *(("prefill-0",) if row.at == "handing off" else ()), *row.beside)
        nodes = {
            name: await stack.enter_async_context(FakeNode(name, **NODES[name]))
            for name in (*initial, *row.joins)
        }
        client, answer = await stack.enter_async_context(
            opened(*(nodes[name] for name in initial), **row.settings)
        )
        for name in row.joins:
            await pools.join(client, nodes[name])
        for node in nodes.values():
            node.script.prefill = node.script.run = "answer"
        await row.event(client, nodes[row.node])
        reply = await answer
        assert pools.text_of(reply) == pools.REPLY
        placement, _, again = reply[2]["x-baton-placement"].partition("; placed again: ")
        assert (placement.split(": ")[0], again) == (row.placement, row.again)
        await until(lambda: {name: summary(node.got) for name, node in nodes.items()} == row.frames)
