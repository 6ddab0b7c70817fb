"""Computes a simulated step: real KV bytes in a real pool, and tokens that depend on all of them.

In: rows, as the torch runner gets them. Out: sampled ids after as long as the timing model says.
numpy only.

Arithmetic is modulo 2^64. Token i of a sequence has a state s[i]; its KV is the words
s[i] * spread, and a weighted sum of them (its digest) enters D[i], the digest of all KV up to it:

    s[i] = mix(D[i-1], token[i], i)          D[i] = D[i-1] + weight[i] * digest(KV of token i)

All multipliers are odd, so that one changed word anywhere changes D, hence every later token. D is
taken from the pool, never remembered per request: foreign or missing bytes give other tokens, as
they would in a model, and it does not matter which steps computed what. The next token is a
function of (D, position), and of (seed, choice) unless it is greedy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from baton_engine.api import Row, Sample, Sampled
from baton_protocol.ids import BlockId
from baton_protocol.layout import ITEM_BYTES, KVLayout
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import MAX_LOGPROBS

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
WORD_BYTES = 8
CANDIDATES = MAX_LOGPROBS + 1  # ids with a probability at one position
DRAWN_FROM = 8  # a sampled id is one of so many likeliest


def mix(*values: int) -> int:
    """A stable 64-bit hash of integers (splitmix64's finalizer, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def _odd_words(count: int, salt: int) -> Words:
    """`count` odd multipliers, the same on every machine: `mix` of their index, vectorized."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(mix(salt) | 1)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (state ^ state >> np.uint64(31)) | np.uint64(1)


class SimMemory:
    """The pool, and beside each token's KV its digest, taken whenever the bytes are written."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        words = layout.head_dim * ITEM_BYTES[layout.dtype] // WORD_BYTES
        shape = (layout.num_layers, 2, layout.num_kv_heads)
        self._pool: Words = np.zeros(
            (num_blocks + 1, *shape, layout.block_size, words), dtype=np.uint64
        )
        self._bytes = self._pool.view(np.uint8).reshape(num_blocks + 1, layout.block_bytes)
        self._digests: Words = np.zeros((num_blocks + 1, layout.block_size), dtype=np.uint64)
        count = layout.token_bytes // WORD_BYTES
        self._spread = _odd_words(count, 1).reshape(*shape, words)
        self._factors = _odd_words(count, 2).reshape(*shape, 1, words)
        # Digest of a token is its state times this: sum of spread * factor, without the words.
        self._digest_factor = int((self._spread * self._factors[..., 0, :]).sum())
        self._weights = _odd_words(num_blocks * layout.block_size, 3)

    def read(self, blocks: Sequence[BlockId], into: memoryview) -> None:
        out = self._checked(blocks, into)
        for index, block in enumerate(blocks):
            out[index] = self._bytes[block]

    def write(self, blocks: Sequence[BlockId], data: memoryview) -> None:
        source = self._checked(blocks, data)
        for index, block in enumerate(blocks):
            self._bytes[block] = source[index]
            self._digests[block] = (self._pool[block] * self._factors).sum(axis=(0, 1, 2, 4))

    def _checked(self, blocks: Sequence[BlockId], data: memoryview) -> npt.NDArray[np.uint8]:
        """`data` as [blocks, block_bytes]."""
        size = self.layout.block_bytes
        if data.nbytes != len(blocks) * size:
            raise ValueError(
                f"{data.nbytes} bytes for {len(blocks)} blocks; {len(blocks) * size} are needed"
            )
        return np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), size)

    def extend(self, tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> int:
        """Write KV for `tokens` at [start, start + len(tokens)); return D of the last of them."""
        size = self.layout.block_size
        end = start + len(tokens)
        table = np.array(blocks[: -(-end // size)], dtype=np.int64)
        before = self._digests[table[: -(-start // size)]].reshape(-1)[:start]
        digest = int((before * self._weights[:start]).sum())
        states = []
        for offset, weight in enumerate(self._weights[start:end].tolist()):
            state = mix(digest, tokens[offset], start + offset)
            digest = digest + weight * (state * self._digest_factor) & MASK
            states.append(state)
        states_T = np.array(states, dtype=np.uint64)
        positions_T = np.arange(start, end)
        blocks_T, slots_T = table[positions_T // size], positions_T % size
        # The index arrays stand apart, so numpy puts their axis first: [T, layer, 2, head, word].
        self._pool[blocks_T, :, :, :, slots_T, :] = (
            states_T[:, None, None, None, None] * self._spread
        )
        self._digests[blocks_T, slots_T] = states_T * np.uint64(self._digest_factor)
        return digest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids the simulated model says: those in [first, end), and an EOS about every `eos_every`
    tokens (0: never)."""

    first: int
    end: int
    eos_ids: tuple[int, ...] = ()
    eos_every: int = 0


class SimRunner:
    """A Runner over SimMemory. `clock` and `sleep` are in seconds."""

    def __init__(
        self,
        memory: SimMemory,
        vocabulary: Vocabulary,
        timing: Timing,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.memory = memory
        self._vocabulary = vocabulary
        self._timing = timing
        self._clock = clock
        self._sleep = sleep
        total = math.log(sum(math.exp(-rank / 2) for rank in range(CANDIDATES)))
        self._logprobs = [-rank / 2 - total for rank in range(CANDIDATES)]

    def execute(self, rows: Sequence[Row]) -> list[tuple[Sampled, ...]]:
        deadline = self._clock() + self._timing.step_ms(rows) / 1000
        results = []
        for row in rows:
            digest = self.memory.extend(row.tokens, row.start, row.blocks)
            results.append(tuple(self._sample(digest, sample) for sample in row.samples))
        # The step's own arithmetic is part of the simulated time, not added to it.
        rest = deadline - self._clock()
        if rest > 0:
            self._sleep(rest)
        return results

    def _sample(self, digest: int, sample: Sample) -> Sampled:
        params, words = sample.params, self._vocabulary
        likeliest = mix(digest, sample.position)
        noise = likeliest
        if params.temperature > 0:
            noise = mix(likeliest, params.seed or 0, sample.choice)
        span = words.end - words.first
        banned = frozenset(sample.banned)
        order = (words.first + (likeliest + rank) % span for rank in range(span))
        ids = list(islice((id for id in order if id not in banned), CANDIDATES))
        ids = ids or [words.first + likeliest % span]  # all banned: something has to be said
        rank = 0
        if params.temperature > 0:
            drawn_from = min(DRAWN_FROM, len(ids), params.top_k if params.top_k > 0 else len(ids))
            rank = (noise >> 8) % drawn_from
        if words.eos_every and mix(noise, 1) % words.eos_every == 0:
            ends = [id for id in words.eos_ids if id not in banned]
            if ends:
                ids, rank = [ends[0], *ids[: CANDIDATES - 1]], 0
        if params.logprobs is None:
            return Sampled(ids[rank])
        entries = [
            TokenLogprob(id=id, logprob=self._logprobs[index], rank=index + 1)
            for index, id in enumerate(ids)
        ]
        top = tuple(entries[: params.logprobs])
        return Sampled(ids[rank], PositionLogprobs(sampled=entries[rank], top=top))
