"""Computes a simulated step: real KV bytes in a real pool, and tokens that depend on all of them.

In: rows, as the torch runner gets them. Out: sampled ids after as long as the timing model says.
numpy only.

Arithmetic is modulo 2^64. Token i of a sequence has a state s[i]; its KV is the words
s[i] * spread, and a weighted sum of them (its digest) enters D[i], the digest of all KV up to it:

    s[i] = mix(D[i-1], token[i], i)          D[i] = D[i-1] + weight[i] * digest(KV of token i)

All multipliers are odd, so that one changed word anywhere changes D, hence every later token. D is
taken from the pool, never remembered per request: foreign or missing bytes give other tokens, as
they would in a model, and it does not matter which steps computed what. The next token is a
function of D and of what the sample says (see sim_words).
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
    """`count` odd multipliers, the same on every machine: `mix` of their index, vectorized."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(mix(salt) | 1)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (state ^ state >> np.uint64(31)) | np.uint64(1)


class SimMemory:
    """The pool, and beside each token's KV its digest, taken whenever the bytes are written. There
    is one per head shard, so that two threads may write two shards of a block; they add up."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        words = layout.head_dim * ITEM_BYTES[layout.dtype] // WORD_BYTES
        shape = (layout.num_layers, 2, layout.num_kv_heads)
        self._pool: Words = np.zeros(
            (num_blocks + 1, *shape, layout.block_size, words), dtype=np.uint64
        )
        shards, pieces = layout.kv_shards, 2 * layout.num_layers
        self._bytes = self._pool.view(np.uint8).reshape(num_blocks + 1, pieces, shards, -1)
        self._heads = self._pool.reshape(
            num_blocks + 1, *shape[:2], shards, -1, layout.block_size, words
        )
        self._digests: Words = np.zeros(
            (num_blocks + 1, layout.block_size, shards), dtype=np.uint64
        )
        count = layout.token_bytes // WORD_BYTES
        self._spread = _odd_words(count, 1).reshape(*shape, words)
        self._factors = _odd_words(count, 2).reshape(*shape[:2], shards, -1, 1, words)
        # Digest of a token is its state times this: sum of spread * factor, without the words.
        factors = self._spread.reshape(*shape[:2], shards, -1, 1, words) * self._factors
        self._shard_factors: Words = factors.sum(axis=(0, 1, 3, 4, 5))
        self._digest_factor = int(self._shard_factors.sum())
        self._weights = _odd_words(num_blocks * layout.block_size, 3)

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None:
        out = self._checked(blocks, into)
        for index, block in enumerate(blocks):
            np.copyto(out[index], self._bytes[block, :, shard])

    def views(self, blocks: Sequence[BlockId]) -> None:
        """The digests have to know what is written."""

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None:
        source = self._checked(blocks, data)
        factors = self._factors[:, :, shard]
        for index, block in enumerate(blocks):
            np.copyto(self._bytes[block, :, shard], source[index])
            words = self._heads[block, :, :, shard]
            self._digests[block, :, shard] = (words * factors).sum(axis=(0, 1, 2, 4))

    def _checked(self, blocks: Sequence[BlockId], data: memoryview) -> npt.NDArray[np.uint8]:
        """`data` as [blocks, layer and K or V, bytes of a shard's heads]."""
        size = self.layout.block_bytes // self.layout.kv_shards
        if data.nbytes != len(blocks) * size:
            raise ValueError(
                f"{data.nbytes} bytes for {len(blocks)} blocks; {len(blocks) * size} are needed"
            )
        rows = np.frombuffer(data, dtype=np.uint8)
        return rows.reshape(len(blocks), 2 * self.layout.num_layers, -1)

    def extend(self, tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> list[int]:
        """Write KV for `tokens` at [start, start + len(tokens)); return the D of each."""
        size = self.layout.block_size
        end = start + len(tokens)
        table = np.array(blocks[: -(-end // size)], dtype=np.int64)
        before = self._digests[table[: -(-start // size)]].sum(axis=-1).reshape(-1)[:start]
        digest = int((before * self._weights[:start]).sum())
        states, digests = [], []
        for offset, weight in enumerate(self._weights[start:end].tolist()):
            state = mix(digest, tokens[offset], start + offset)
            digest = digest + weight * (state * self._digest_factor) & MASK
            states.append(state)
            digests.append(digest)
        states_T = np.array(states, dtype=np.uint64)
        positions_T = np.arange(start, end)
        blocks_T, slots_T = table[positions_T // size], positions_T % size
        # The index arrays stand apart, so numpy puts their axis first: [T, layer, 2, head, word].
        self._pool[blocks_T, :, :, :, slots_T, :] = (
            states_T[:, None, None, None, None] * self._spread
        )
        self._digests[blocks_T, slots_T] = states_T[:, None] * self._shard_factors
        return digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a step takes, milliseconds. A row decodes if it computes one token and samples."""

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
    """Computed already; its time goes by while it is read."""

    results: list[RowResult]
    wait: Callable[[float], None]
    ends: float

    def read(self) -> list[RowResult]:
        self.wait(self.ends)
        return self.results


class SimRunner:
    """A Runner over SimMemory. `clock` and `sleep` are in seconds. A token `poison` ends the
    process at once, as a crash would: nothing is flushed, told or given back."""

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
        self._free_at = 0.0  # when the last step that was launched ends
        self._sampled: list[int] = []  # its samples

    def launch(self, rows: Sequence[Row]) -> SimStep:
        """Computed here, as what the step launched before says is known; read() waits out its
        time, which begins where that one's ends."""
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
        """The row with the token that it waited for."""
        if row.after is None:
            return row
        return msgspec.structs.replace(row, tokens=[*row.tokens[:-1], self._sampled[row.after]])

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
