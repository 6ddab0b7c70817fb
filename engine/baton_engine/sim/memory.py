"""SimMemory: the simulated pool. It has real bytes, and the digest of each token's KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton_engine.sim.model import MASK, mix
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

Words = npt.NDArray[np.uint64]
WORD_BYTES = 8


def _odd_words(count: int, salt: int) -> Words:
    """`count` odd multipliers, the same on every machine: splitmix64's finalizer over multiples of
    a constant that `salt` selects."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(mix(salt) | 1)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (state ^ state >> np.uint64(31)) | np.uint64(1)


class SimMemory:
    """The pool, and the digest of each token's KV, updated whenever the bytes are written. Each
    head shard has its own digest, so two threads may write two shards of a block. A token's digest
    is the sum over its shards."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        field, fields = layout.kv_fields[0], len(layout.kv_fields)
        words = field.row_bytes // WORD_BYTES
        shape = (layout.layer_slots(), fields, field.heads)
        self._pool: Words = np.zeros(
            (num_blocks + 1, *shape, layout.block_size, words), dtype=np.uint64
        )
        shards, pieces = layout.kv_shards, fields * layout.layer_slots()
        self._bytes = self._pool.view(np.uint8).reshape(num_blocks + 1, pieces, shards, -1)
        self._heads = self._pool.reshape(
            num_blocks + 1, *shape[:2], shards, -1, layout.block_size, words
        )
        self._digests: Words = np.zeros(
            (num_blocks + 1, layout.block_size, shards), dtype=np.uint64
        )
        count = layout.block_bytes // layout.block_size // WORD_BYTES
        self._spread = _odd_words(count, 1).reshape(*shape, words)
        self._factors = _odd_words(count, 2).reshape(*shape[:2], shards, -1, 1, words)
        # A token's digest is its state times the sum of spread * factor, so it needs no words.
        factors = self._spread.reshape(*shape[:2], shards, -1, 1, words) * self._factors
        self._shard_factors: Words = factors.sum(axis=(0, 1, 3, 4, 5))
        self._digest_factor = int(self._shard_factors.sum())
        self._weights = _odd_words(num_blocks * layout.block_size, 3)
        self._windows = [group.window for group in layout.kv_groups]
        others = len(self._windows) - 1
        self._salts: list[int] = [1, *_odd_words(others, 4).tolist()]
        self._shares: list[int] = [1, *_odd_words(others, 5).tolist()]

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        out = self._checked(blocks, into)
        for index, block in enumerate(blocks):
            np.copyto(out[index], self._bytes[block, :, shard])

    def views(self, blocks: Sequence[BlockId]) -> None:
        """None: each write has to update the digests."""

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        source = self._checked(blocks, data)
        factors = self._factors[:, :, shard]
        for index, block in enumerate(blocks):
            np.copyto(self._bytes[block, :, shard], source[index])
            words = self._heads[block, :, :, shard]
            self._digests[block, :, shard] = (words * factors).sum(axis=(0, 1, 2, 4))

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self._bytes[list(targets)] = self._bytes[list(sources)]
        self._digests[list(targets)] = self._digests[list(sources)]

    def _checked(self, blocks: Sequence[BlockId], data: memoryview) -> npt.NDArray[np.uint8]:
        """View `data` as [blocks, pieces, bytes of a shard's heads]. Raises ValueError for
        another size."""
        size = self.layout.block_bytes // self.layout.kv_shards
        if data.nbytes != len(blocks) * size:
            raise ValueError(
                f"{data.nbytes} bytes for {len(blocks)} blocks; {len(blocks) * size} are needed"
            )
        rows = np.frombuffer(data, dtype=np.uint8)
        return rows.reshape(len(blocks), self._bytes.shape[1], -1)

    def extend(self, tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> list[int]:
        """Write the KV of `tokens` at positions [start, start + len(tokens)). Returns D of each
        token (see the module's docstring)."""
        size, groups = self.layout.block_size, len(self._windows)
        end = start + len(tokens)
        used = np.array(blocks[: -(-end // size) * groups], dtype=np.int64)
        tables = [used[group::groups] for group in range(groups)]
        terms = [self._terms(group, tables[group], start) for group in range(groups)]
        digest = sum(int(terms_S.sum()) for terms_S in terms) & MASK
        # Of each group with a window: the window, and the terms of the tokens from which it moves.
        moving = [
            (window, terms_S.tolist(), self._factor(group))
            for group, (window, terms_S) in enumerate(zip(self._windows, terms, strict=True))
            if window is not None
        ]
        factor = sum(self._factor(group) for group in range(groups)) & MASK
        states, digests = [], []
        for offset, weight in enumerate(self._weights[start:end].tolist()):
            for window, seen, _ in moving:
                if len(seen) == window:
                    digest -= seen.pop(0)
            state = mix(digest & MASK, tokens[offset], start + offset)
            digest = digest + weight * (state * factor) & MASK
            for _, seen, own in moving:
                seen.append(weight * (state * own) & MASK)
            states.append(state)
            digests.append(digest)
        states_T = np.array(states, dtype=np.uint64)
        positions_T = np.arange(start, end)
        slots_T = positions_T % size
        for table, salt in zip(tables, self._salts, strict=True):
            blocks_T, salted_T = table[positions_T // size], states_T * np.uint64(salt)
            # The index arrays are not adjacent, so numpy puts their axis first: [T, layer, field,
            # head, word].
            self._pool[blocks_T, :, :, :, slots_T, :] = (
                salted_T[:, None, None, None, None] * self._spread
            )
            self._digests[blocks_T, slots_T] = salted_T[:, None] * self._shard_factors
        return digests

    def _terms(self, group: int, table: npt.NDArray[np.int64], start: int) -> Words:
        """The terms of D[start - 1] that a group adds, one for each token that token `start`
        sees."""
        size, window = self.layout.block_size, self._windows[group]
        low = 0 if window is None else max(0, start + 1 - window)
        first = low // size
        before = self._digests[table[first : -(-start // size)]].sum(axis=-1).reshape(-1)
        terms_S: Words = before[low - first * size : start - first * size]
        terms_S *= self._weights[low:start]
        terms_S *= np.uint64(self._shares[group])
        return terms_S

    def _factor(self, group: int) -> int:
        """What weight[i] * s[i] is multiplied by in D[i], for this group."""
        return self._salts[group] * self._shares[group] * self._digest_factor & MASK
