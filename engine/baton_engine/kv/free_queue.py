"""Blocks of the pool, and the queue in which the free ones wait to be used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton_protocol.ids import BlockHash, BlockId


class Block:
    """State of one block. While the block is free, it is also a node of the free queue's list."""

    __slots__ = ("ends_chunk", "hash", "id", "next", "prev", "refs")

    def __init__(self, id: BlockId) -> None:
        self.id = id
        self.refs = 0
        self.hash: BlockHash | None = None
        self.ends_chunk = False
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeQueue:
    """Doubly linked list of free blocks. A cache hit removes a block from the middle: O(1) here,
    O(n) in a deque."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(BlockId(-1))  # sentinel of the ring: next is the head, prev the tail
        self._ends.prev = self._ends.next = self._ends
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        """From the head (taken first) to the tail."""
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        tail = self._ends.prev
        assert block.next is None, f"block {block.id} is queued already"
        assert tail is not None
        tail.next = block
        block.prev, block.next = tail, self._ends
        self._ends.prev = block
        self._size += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None, f"block {block.id} is not queued"
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> Block:
        head = self._ends.next
        assert head is not None
        assert head is not self._ends, "the free queue is empty"
        self.remove(head)
        return head
