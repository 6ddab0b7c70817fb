"""SimMemory: the simulated pool. It has real bytes, and the digest of each token's KV."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from baton_engine.memory.malloc import empty_pages
from baton_engine.sim.model import MASK, mix
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
WORD_BYTES = 8


def _odd_words(count: int, salt: int) -> Words:
    """`count` odd multipliers, the same on every machine: splitmix64's finalizer over multiples of
    a constant that `salt` selects."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(mix(salt) | 1)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (state ^ state >> np.uint64(31)) | np.uint64(1)


class Division:
    """The words of a group's layers in blocks, and digests of the tokens in them.

    All fields of the group have the same size. Bytes after the last layer belong to no token.
    """

    def __init__(self, pool: Words, layout: KVLayout, group: int) -> None:
        fields, layers = layout.group_fields[group], layout.layer_slots(group)
        size, shards, words = layout.block_size, layout.kv_shards, fields[0].row_bytes // WORD_BYTES
        shape = layers, len(fields), fields[0].heads
        used = layers * layout.layer_bytes(group)
        kept = pool[:, : used // WORD_BYTES]
        self._pool = kept.reshape(len(pool), *shape, size, words)
        self._heads = kept.reshape(len(pool), *shape[:2], shards, -1, size, words)
        raw = pool.view(np.uint8)
        self._pieces = raw[:, :used].reshape(len(pool), layers * len(fields), shards, -1)
        unused = layout.block_bytes - used
        self._rest = raw[:, used:].reshape(len(pool), 1, shards, unused // shards)
        self._used = used // shards
        self.digests: Words = np.zeros((shards, len(pool), size), dtype=np.uint64)
        count = used // size // WORD_BYTES
        self._spread = _odd_words(count, 1).reshape(*shape, words)
        self._factors = _odd_words(count, 2).reshape(*shape[:2], shards, -1, 1, words)
        # A token's digest is its state times the sum of spread * factor, so it needs no words.
        factors = self._spread.reshape(*shape[:2], shards, -1, 1, words) * self._factors
        self._shard_factors: Words = factors.sum(axis=(0, 1, 3, 4, 5))
        self.factor = int(self._shard_factors.sum())

    def pieces(self, rows: Bytes, shard: int) -> list[tuple[Bytes, Bytes]]:
        """Views of the same bytes in a buffer [blocks, bytes of a shard], and in the pool."""
        layers, rest = rows[:, : self._used], rows[:, self._used :]
        return [
            (layers.reshape(len(rows), self._pieces.shape[1], -1), self._pieces[:, :, shard]),
            (rest.reshape(len(rows), 1, rest.shape[1]), self._rest[:, :, shard]),
        ]

    def digest(self, block: BlockId, shard: int) -> None:
        """Compute the digests of a shard's tokens from the bytes in the pool."""
        words = self._heads[block, :, :, shard] * self._factors[:, :, shard]
        self.digests[shard, block] = words.sum(axis=(0, 1, 2, 4))

    def extend(self, table: Sequence[BlockId], start: int, states_T: Words) -> None:
        """Write the KV of tokens with these states, of which the first has position `start` in the
        blocks of `table`."""
        size, end = self.digests.shape[2], start + len(states_T)
        digests_ST = self._shard_factors[:, None] * states_T
        # Block by block: numpy takes several times as long for a list of places.
        for first in range(start - start % size, end, size):
            block, low, high = table[first // size], max(start, first), min(end, first + size)
            places, tokens = slice(low - first, high - first), slice(low - start, high - start)
            np.multiply(
                states_T[tokens, None],
                self._spread[..., None, :],
                out=self._pool[block, :, :, :, places],
            )
            self.digests[:, block, places] = digests_ST[:, tokens]


class SimMemory:
    """The pool, and the digest of each token's KV, updated whenever the bytes are written. Each
    head shard has its own digest, so two threads may write two shards of a block. A token's digest
    is the sum over its shards.

    Groups whose layers keep different fields find a token at different bytes of a block, so a block
    has digests for each such division. Only those of its own group are used. write() computes the
    others, too, because the host tier does not know groups."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        shape = num_blocks + 1, layout.block_bytes // WORD_BYTES
        self._pool: Words = np.zeros(shape, dtype=np.uint64)
        divisions = {group: Division(self._pool, layout, group) for group in layout.divisions}
        self._divisions = tuple(divisions.values())
        self._groups = [divisions[group] for group in layout.divisions]
        self._weights = _odd_words(num_blocks * layout.block_size, 3)
        self._windows = [group.window for group in layout.kv_groups]
        others = len(self._windows) - 1
        self._salts: list[int] = [1, *_odd_words(others, 4).tolist()]
        self._shares: list[int] = [1, *_odd_words(others, 5).tolist()]
        # What weight[i] * s[i] is multiplied by in D[i], for each group.
        self._factors = [
            salt * share * division.factor & MASK
            for salt, share, division in zip(self._salts, self._shares, self._groups, strict=True)
        ]
        self._factor = sum(self._factors) & MASK

    def free(self) -> None:
        """Give the pool's memory back. It reads as zeros."""
        for words in (self._pool, *(division.digests for division in self._divisions)):
            empty_pages(words.ctypes.data, words.nbytes)

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        for pieces, places in self._groups[group].pieces(self._checked(blocks, into), shard):
            for index, block in enumerate(blocks):
                np.copyto(pieces[index], places[block])

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        own = self._groups[group]
        for pieces, places in own.pieces(self._checked(blocks, data), shard):
            for index, block in enumerate(blocks):
                np.copyto(places[block], pieces[index])
        for division in self._divisions:
            shards = [shard] if division is own else range(self.layout.kv_shards)
            for block, written in product(blocks, shards):
                division.digest(block, written)

    def views(self, blocks: Sequence[BlockId]) -> None:
        """None: each write has to update the digests."""

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self._pool[list(targets)] = self._pool[list(sources)]
        for division in self._divisions:
            division.digests[:, list(targets)] = division.digests[:, list(sources)]

    def _checked(self, blocks: Sequence[BlockId], data: memoryview) -> Bytes:
        """View `data` as [blocks, bytes of a shard]. Raises ValueError for another size."""
        size = self.layout.block_bytes // self.layout.kv_shards
        if data.nbytes != len(blocks) * size:
            raise ValueError(
                f"{data.nbytes} bytes for {len(blocks)} blocks; {len(blocks) * size} are needed"
            )
        return np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), size)

    def extend(self, tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> list[int]:
        """Write the KV of `tokens` at positions [start, start + len(tokens)). Returns D of each
        token (see the module's docstring)."""
        size, groups = self.layout.block_size, len(self._windows)
        end = start + len(tokens)
        used = list(blocks[: -(-end // size) * groups])
        tables = [used[group::groups] for group in range(groups)]
        terms = [self._terms(group, tables[group], start) for group in range(groups)]
        digest = sum(int(terms_S.sum()) for terms_S in terms) & MASK
        # Of each group with a window: the window, and the terms of the tokens from which it moves.
        moving = [
            (window, terms_S.tolist(), factor)
            for window, terms_S, factor in zip(self._windows, terms, self._factors, strict=True)
            if window is not None
        ]
        factor = self._factor
        states, digests = [], []
        weights = self._weights[start:end].tolist()
        for position, (token, weight) in enumerate(zip(tokens, weights, strict=True), start):
            for window, seen, _ in moving:
                if len(seen) == window:
                    digest -= seen.pop(0)
            state = mix(digest & MASK, token, position)
            digest = digest + weight * (state * factor) & MASK
            for _, seen, own in moving:
                seen.append(weight * (state * own) & MASK)
            states.append(state)
            digests.append(digest)
        states_T = np.array(states, dtype=np.uint64)
        for division, table, salt in zip(self._groups, tables, self._salts, strict=True):
            division.extend(table, start, states_T * np.uint64(salt))
        return digests

    def _terms(self, group: int, table: Sequence[BlockId], start: int) -> Words:
        """The terms of D[start - 1] that a group adds, one for each token that token `start`
        sees."""
        size, window = self.layout.block_size, self._windows[group]
        low = 0 if window is None else max(0, start + 1 - window)
        first = low // size
        seen = table[first : -(-start // size)]
        before = self._groups[group].digests[:, seen].sum(axis=0).reshape(-1)
        terms_S: Words = before[low - first * size : start - first * size]
        terms_S *= self._weights[low:start]
        terms_S *= np.uint64(self._shares[group])
        return terms_S
