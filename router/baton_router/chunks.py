"""Which nodes hold which chunk: chunk hash -> bit set of the nodes that said so.

In: what CacheEvents report, per incarnation of a node (its epoch, or one listing within it). Out:
how many leading chunks of a prompt each node holds, an AND along the chain. Bounded: past
`max_chunks` the least recently asked-for or stored entry is forgotten, which costs a worse
placement, never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton_protocol.ids import BlockHash

# Bits of dropped incarnations are cleared in one pass over the index when this many piled up.
SCRUB_AT = 64


class ChunkIndex:
    """A slot is one incarnation's bit; dropping one is O(1), its bits are scrubbed later."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._bits: OrderedDict[BlockHash, int] = OrderedDict()
        self._alive = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._bits)

    def new_slot(self) -> int:
        """The lowest bit that no incarnation, alive or not yet scrubbed, uses."""
        taken = self._alive | self._dead
        slot = (~taken & (taken + 1)).bit_length() - 1
        self._alive |= 1 << slot
        return slot

    def drop_slot(self, slot: int) -> None:
        """Forget all that this incarnation held."""
        bit = 1 << slot
        if not self._alive & bit:
            return
        self._alive &= ~bit
        self._dead |= bit
        if self._dead.bit_count() >= SCRUB_AT:
            self._scrub()

    def store(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        bit = 1 << slot
        bits = self._bits
        for name in hashes:
            bits[name] = bits.get(name, 0) | bit
            bits.move_to_end(name)
        while len(bits) > self._max_chunks:
            bits.popitem(last=False)

    def evict(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        keep = ~(1 << slot)
        for name in hashes:
            held = self._bits.get(name, 0) & keep
            if held & self._alive:
                self._bits[name] = held
            else:
                self._bits.pop(name, None)

    def prefixes(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """Slot -> how many leading chunks of `hashes` it holds; slots that hold none are absent."""
        lengths: dict[int, int] = {}
        mask = self._alive
        for index, name in enumerate(hashes):
            held = self._bits.get(name, 0)
            if held:
                self._bits.move_to_end(name)
            _note(lengths, mask & ~held, index)
            mask &= held
            if not mask:
                return lengths
        _note(lengths, mask, len(hashes))
        return lengths

    def _scrub(self) -> None:
        alive = self._alive
        kept = ((name, held & alive) for name, held in self._bits.items())
        self._bits = OrderedDict((name, held) for name, held in kept if held)
        self._dead = 0


def _note(lengths: dict[int, int], slots: int, length: int) -> None:
    """Record `length` for each set bit of `slots`."""
    while slots and length:
        lowest = slots & -slots
        lengths[lowest.bit_length() - 1] = length
        slots ^= lowest
