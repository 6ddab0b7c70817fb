"""Puts of chunks: each result goes to the object that asked for the put."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from baton_node.engine.loop_context import LoopContext, LoopOptions
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.store.base import ChunkCopied, ChunkPublished, ChunkRef
from baton_protocol.ids import BlockHash, BlockId, Epoch, RequestId
from baton_protocol.store import Priority
from tests.support.nodes.step_loops import LoopNode

CHUNK = ChunkRef(RequestId("r"), 1, 0, BlockHash(b"c" * 16))


def test_two_puts_of_one_chunk_settle_one_by_one_and_hold_their_blocks_until_copied() -> None:
    with closing(LoopNode("n0")) as node:
        options = LoopOptions(epoch=Epoch("e"))
        outgoing = OutgoingBlocks(LoopContext(node.engine, node.connector, node.port, options))
        blocks = (BlockId(1),)
        settled: list[tuple[str, str]] = []

        def settle(name: str, event: ChunkPublished) -> None:
            settled.append((name, event.reason))

        assert outgoing.put_chunk(CHUNK, blocks, Priority.HANDOFF, partial(settle, "first"))
        assert outgoing.put_chunk(CHUNK, blocks, Priority.BEHIND, partial(settle, "second"))
        assert [outgoing.count_copying(each) for each in Priority] == [1, 0, 1]
        outgoing.release_copied(ChunkCopied(CHUNK, blocks))
        outgoing.settle_put(ChunkPublished(CHUNK, None, 0, "full"))
        assert (settled, outgoing.empty) == ([("first", "full")], False)
        assert [outgoing.count_copying(each) for each in Priority] == [0, 0, 1]
        outgoing.release_copied(ChunkCopied(CHUNK, blocks))
        outgoing.settle_put(ChunkPublished(CHUNK, None, 0, "down"))
        assert (settled[1:], outgoing.empty) == ([("second", "down")], True)
        assert node.freed
