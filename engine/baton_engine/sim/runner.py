"""Compute a simulated step: real KV bytes in a real pool, and tokens that depend on all of them.

In: the same rows as for the torch runner. Out: sampled ids, after the time that the timing model
gives. numpy only.

Arithmetic is modulo 2^64. Token i of a sequence has a state s[i]. Its KV is the words
s[i] * spread. A weighted sum of these words (its digest) is added to D[i], the digest of all KV up
to token i:

    s[i] = mix(D[i-1], token[i], i)          D[i] = D[i-1] + weight[i] * digest(KV of token i)

A group of layers (see KVLayout) has KV and weights of its own: group g multiplies s[i] by
salts[g] and weight[i] by shares[g]. If it has a window w, D[i-1] and D[i] leave out its tokens
before i - w + 1, as attention does at token i.

All multipliers are odd, so one changed word anywhere changes D and therefore every later token. D
is computed from the pool and never stored per request. Foreign or missing bytes give other tokens,
as they would in a real model, and it does not matter which steps computed the KV. The next token is
a function of D and of the Sample (see `sim.model`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from baton_engine.interface import Row, RowResult
from baton_engine.sim.model import MASK, Vocabulary, mix
from baton_protocol.ids import BlockId
from baton_protocol.layout import ITEM_BYTES, KVLayout

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
        words = layout.head_dim * ITEM_BYTES[layout.dtype] // WORD_BYTES
        shape = (layout.group_layers, 2, layout.num_kv_heads)
        self._pool: Words = np.zeros(
            (num_blocks + 1, *shape, layout.block_size, words), dtype=np.uint64
        )
        shards, pieces = layout.kv_shards, 2 * layout.group_layers
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

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None:
        out = self._checked(blocks, into)
        for index, block in enumerate(blocks):
            np.copyto(out[index], self._bytes[block, :, shard])

    def views(self, blocks: Sequence[BlockId]) -> None:
        """None: each write has to update the digests."""

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None:
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
        """View `data` as [blocks, 2 * layers, bytes of a shard's heads]. Raises ValueError for
        another size."""
        size = self.layout.block_bytes // self.layout.kv_shards
        if data.nbytes != len(blocks) * size:
            raise ValueError(
                f"{data.nbytes} bytes for {len(blocks)} blocks; {len(blocks) * size} are needed"
            )
        rows = np.frombuffer(data, dtype=np.uint8)
        return rows.reshape(len(blocks), 2 * self.layout.group_layers, -1)

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
            # The index arrays are not adjacent, so numpy puts their axis first: [T, layer, 2,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Duration of a step, in milliseconds. A row that computes one token and samples counts as
    decode; the tokens of all other rows count as prefill. A step without rows of a kind has no cost
    for that kind."""

    prefill_base_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    decode_ms: float = 0.0
    decode_ms_per_seq: float = 0.0

    def step_ms(self, rows: Sequence[Row]) -> float:
        decoding = sum(1 for row in rows if len(row.tokens) == 1 and row.samples)
        tokens = sum(len(row.tokens) for row in rows) - decoding
        total = 0.0
        if tokens:
            total += self.prefill_base_ms + self.prefill_ms_per_token * tokens
        if decoding:
            total += self.decode_ms + self.decode_ms_per_seq * decoding
        return total


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step that is computed at launch. read() waits until the step's simulated end."""

    results: list[RowResult]
    wait: Callable[[float], None]
    ends: float

    def read(self) -> list[RowResult]:
        self.wait(self.ends)
        return self.results


class SimRunner:
    """A Runner over SimMemory. `clock` and `sleep` are in seconds. A row with the token `poison`
    ends the process at once, without any clean-up, to simulate a crash."""

    def __init__(
        self,
        memory: SimMemory,
        vocabulary: Vocabulary,
        timing: Timing,
        *,
        poison: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.memory = memory
        self._vocabulary = vocabulary
        self._timing = timing
        self._poison = poison
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0  # when the last launched step ends, on `clock`
        self._sampled: list[int] = []  # ids that it sampled

    def launch(self, rows: Sequence[Row]) -> SimStep:
        """Compute the step at once; the samples of the step before are known already. Its simulated
        time begins when that step's time ends, and read() waits for its end."""
        rows = [self._with_sampled(row) for row in rows]
        if self._poison is not None and any(self._poison in row.tokens for row in rows):
            os._exit(os.EX_SOFTWARE)
        begins = max(self._clock(), self._free_at)
        self._free_at = begins + self._timing.step_ms(rows) / 1000
        results = [self._compute(row) for row in rows]
        self._sampled = [each.id for result in results for each in result.samples]
        return SimStep(results, self._wait, self._free_at)

    def _wait(self, until: float) -> None:
        left_s = until - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _with_sampled(self, row: Row) -> Row:
        """The row with the token that it awaited."""
        if row.awaited_sample is None:
            return row
        return msgspec.structs.replace(
            row, tokens=[*row.tokens[:-1], self._sampled[row.awaited_sample]]
        )

    def _compute(self, row: Row) -> RowResult:
        words = self._vocabulary
        digests = self.memory.extend(row.tokens, row.start, row.blocks)
        samples = tuple(words.says(digests[-1], sample) for sample in row.samples)
        if row.prompt is None:
            return RowResult(samples)
        places = enumerate(zip(digests, row.prompt.targets, strict=False), start=row.start + 1)
        return RowResult(
            samples,
            tuple(
                words.expects(digest, position, target, row.prompt.top)
                for position, (digest, target) in places
            ),
        )
