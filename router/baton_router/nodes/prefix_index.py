"""Which nodes hold which chunk: a map from chunk hash to a bit set of nodes.

In: CacheEvents, per incarnation of a node (its epoch, or one listing within it). Out: the number of
leading chunks of a prompt that each node holds, computed by AND along the chain. Bounded: above
`max_chunks` the index forgets the least recently queried or stored entry, which costs a worse
placement, never a wrong answer.

Memory: at most ENTRY_BYTES + slots / 7.5 bytes an entry (Python stores 30 bits of an integer in 4
bytes), where slots are the nodes plus up to SCRUB_AT dropped incarnations: 400 bytes with 1,000
nodes. Chunks of one event with the same nodes share their bit set, so 170 bytes are usual.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from baton_protocol.ids import BlockHash

# Clear the bits of dropped incarnations when this many have piled up, SCRUBBED entries per store:
# clearing a million at once takes a second.
SCRUB_AT = 64
SCRUBBED = 500
# Bytes of an entry, its hash, its slots in the dictionary and its order, and the integer's header.
ENTRY_BYTES = 260
# Queried hashes that wait to be marked as recent; queries beyond this number are not noted.
MAX_QUERIED = 32_768
Lengths = npt.NDArray[np.int64]
logger = logging.getLogger(__name__)


class PrefixIndex:
    """A slot is the bit of one incarnation. Dropping a slot is O(1); its bits are cleared later."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._bits: OrderedDict[BlockHash, int] = OrderedDict()
        self._queried: list[BlockHash] = []
        self._last: tuple[Sequence[BlockHash], list[tuple[int, int]]] | None = None
        self._alive = 0
        self._dead = 0
        self._to_scrub: list[BlockHash] = []  # entries that may hold bits of `_leaving`
        self._scrubbed_slots = 0

    def __len__(self) -> int:
        return len(self._bits)

    def new_slot(self) -> int:
        """Take the lowest bit that no incarnation uses, alive or not yet scrubbed."""
        taken = self._alive | self._dead
        slot = (~taken & (taken + 1)).bit_length() - 1
        self._last = None
        self._alive |= 1 << slot
        return slot

    def drop_slot(self, slot: int) -> None:
        """Forget everything this incarnation held."""
        bit = 1 << slot
        if not self._alive & bit:
            return
        self._last = None
        self._alive &= ~bit
        self._dead |= bit
        if not self._scrubbed_slots and self._dead.bit_count() >= SCRUB_AT:
            self._to_scrub, self._scrubbed_slots = list(self._bits), self._dead
            self._scrub()

    def store(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        bit, bits, self._last = 1 << slot, self._bits, None
        self._scrub()
        self._mark_queried()
        previous, updated = 0, bit
        for chunk in hashes:
            held = bits.get(chunk, 0)
            if held is not previous:  # chunks of a chain mostly share one integer
                previous, updated = held, held | bit
            bits[chunk] = updated
            bits.move_to_end(chunk)
        while len(bits) > self._max_chunks:
            bits.popitem(last=False)

    def evict(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        keep, bits, alive = ~(1 << slot), self._bits, self._alive
        self._last = None
        previous, updated = 0, 0
        for chunk in hashes:
            held = bits.get(chunk, 0)
            if held is not previous:
                previous, updated = held, held & keep
                updated = updated if updated & alive else 0
            if updated:
                bits[chunk] = updated
            else:
                bits.pop(chunk, None)

    def prefixes(self, hashes: Sequence[BlockHash]) -> Lengths:
        """How many leading chunks of `hashes` each slot holds: shape (slots,), including slots of
        no node."""
        runs = self._runs(hashes)
        slots = (self._alive | self._dead).bit_length()
        if not runs:
            return np.zeros(slots, dtype=np.int64)
        width = (slots + 7) // 8
        packed = b"".join(mask.to_bytes(width, "little") for mask, _ in runs)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(runs), width)
        held = np.unpackbits(rows, axis=1, count=slots, bitorder="little")
        # Each run's nodes are a subset of the previous run's, so their number gives the last run.
        ends = np.array([0, *(end for _, end in runs)], dtype=np.int64)
        lengths: Lengths = ends[held.sum(axis=0, dtype=np.int64)]
        return lengths

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """The most leading chunks of `hashes` that one node holds."""
        runs = self._runs(hashes)
        return runs[-1][1] if runs else 0

    def _runs(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """Pairs of (slots that hold all of the first `end` chunks, `end`), with growing ends and
        shrinking sets; the last end is the longest prefix on any slot. The last result is cached,
        because a request is checked for room and then placed with the same list."""
        if self._last is not None and self._last[0] is hashes:
            return self._last[1]
        runs: list[tuple[int, int]] = []
        mask, end = self._alive, 0
        for held, run in groupby(map(self._bits.get, hashes)):
            remaining = mask & held if held else 0
            if remaining != mask:
                if end:
                    runs.append((mask, end))
                mask = remaining
                if not mask:
                    break
            end += len(list(run))
        else:
            if end:
                runs.append((mask, end))
        if len(self._queried) < MAX_QUERIED:
            self._queried += hashes[:end]
        self._last = (hashes, runs)
        return runs

    def _mark_queried(self) -> None:
        """Mark the hashes queried since the last store as recent; only a store evicts entries."""
        if 2 * len(self._bits) >= self._max_chunks:
            for chunk in self._queried:
                if chunk in self._bits:
                    self._bits.move_to_end(chunk)
        self._queried.clear()

    def _scrub(self) -> None:
        """Scrub the next entries. After the last one the slots are free."""
        if not self._scrubbed_slots:
            return
        for chunk in self._to_scrub[-SCRUBBED:]:
            held = self._bits.get(chunk, 0)
            if held & self._scrubbed_slots:
                kept = held & self._alive
                if kept:
                    self._bits[chunk] = kept
                else:
                    del self._bits[chunk]
        del self._to_scrub[-SCRUBBED:]
        if not self._to_scrub:
            self._dead &= ~self._scrubbed_slots
            self._scrubbed_slots = 0
