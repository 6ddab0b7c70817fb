"""The simulated model: its logits at a position, and the id sampled from them.

In: the digest of all KV up to a token (see `sim.runner`) and a Sample. Out: a Sampled; or, of a
pooling model, the numbers of its answer. Pure.

The logits have a simple form. The ids that the model generates form a circle. A hash of (digest,
position) selects the most likely id, and each next id around the circle has a logit 0.5 lower. Some
logits are positive and most are negative, so every logits parameter (see `logits_processors`, whose
order is kept here) can change the sampled id. Greedy sampling takes the most likely id. Otherwise a
hash that includes (seed, choice) selects one of the most likely few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from baton_engine.interface import PenaltyCounts, Sample, Sampled
from baton_engine.scheduling.stop_conditions import permits
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import MAX_LOGPROBS, SamplingParams

MASK = (1 << 64) - 1
CANDIDATES = MAX_LOGPROBS + 1  # number of ids that share the probability at a position
DRAWN_FROM = 8  # a sampled id is one of this number of most likely ids
TOP_LOGIT = 4.0
STEP = 0.5
OUT_OF_REACH = 50.0  # an id whose logit is this far below the largest is never sampled
VECTOR_SIZE = 32  # numbers of a pooling model's vector
LOG_TOTAL = math.log(sum(math.exp(-STEP * rank) for rank in range(CANDIDATES)))


def numbers_after(digest: int, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [-1, 1) that stand for the hidden state, or the scores, after the tokens
    whose KV has this digest."""
    return np.array([mix(digest, place) / 2.0**63 - 1.0 for place in range(count)])


def mix(*values: int) -> int:
    """A stable 64-bit hash of integers (splitmix64's finalizer, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids that the simulated model generates: ids in [first, end), and an EOS about every
    `eos_every` tokens (0: never)."""

    first: int
    end: int
    eos_ids: tuple[int, ...] = ()
    eos_every: int = 0

    def says(self, digest: int, sample: Sample) -> Sampled:
        """Sample the next token after the tokens whose KV has this digest."""
        params, hash = sample.params, mix(digest, sample.position)
        noise = mix(hash, params.seed or 0, sample.choice) if params.temperature > 0 else hash
        banned = frozenset(sample.banned)
        logits = self._logits(hash, noise, banned)
        ids = _candidates(logits, sample)
        if not ids:  # every id it generates is banned or does not match: take the lowest that may
            mask = _mask(sample)
            ids = [next(id for id in count() if id not in banned and _follows(mask, id))]
        place = 0
        if params.temperature > 0 and ids[0] != logits.eos:
            few = min(len(ids), params.top_k if params.top_k > 0 else DRAWN_FROM)
            place = (noise >> 8) % few
        if params.logprobs is None:
            return Sampled(ids[place])
        return Sampled(ids[place], logits.logprobs(ids[place], params.logprobs))

    def expects(self, digest: int, position: int, id: int, top: int) -> PositionLogprobs:
        """The logprob of `id` at `position` after `digest`, and of the `top` most likely ids."""
        hash = mix(digest, position)
        return self._logits(hash, hash, frozenset()).logprobs(id, top)

    def _logits(self, hash: int, noise: int, banned: frozenset[int]) -> _Logits:
        due = self.eos_every and mix(noise, 1) % self.eos_every == 0
        eos = next((id for id in self.eos_ids if id not in banned), None) if due else None
        return _Logits(self.first, self.end - self.first, hash % (self.end - self.first), eos)


@dataclass(frozen=True, slots=True)
class _Logits:
    """Logits at one position. The most likely id is `eos`, unless it is None. The ids
    [first, first + span) follow, in a circle from offset `start` on. All other ids are equally
    unlikely."""

    first: int
    span: int
    start: int
    eos: int | None

    def ranked(self) -> Iterator[int]:
        """Ids in order of probability, the most likely first."""
        if self.eos is not None:
            yield self.eos
        for rank in range(self.span):
            yield self.first + (self.start + rank) % self.span

    def says(self, id: int) -> bool:
        return id == self.eos or 0 <= id - self.first < self.span

    def rank(self, id: int) -> int:
        """Number of ids that are more likely."""
        if id == self.eos:
            return 0
        place = (id - self.first - self.start) % self.span if self.says(id) else self.span
        return place + (self.eos is not None)

    def of(self, id: int) -> float:
        return TOP_LOGIT - STEP * self.rank(id)

    def logprobs(self, id: int, top: int) -> PositionLogprobs:
        def entry(id: int) -> TokenLogprob:
            rank = self.rank(id)
            return TokenLogprob(id=id, logprob=-STEP * rank - LOG_TOTAL, rank=rank + 1)

        return PositionLogprobs(
            entry(id), tuple(entry(likely) for likely in islice(self.ranked(), top))
        )


def _candidates(logits: _Logits, sample: Sample) -> list[int]:
    """The ids of which one is sampled: the most likely ones after the request's changes to the
    logits, best first."""
    params, banned, seen = sample.params, frozenset(sample.banned), set[int]()
    few = DRAWN_FROM if params.temperature > 0 else 1
    mask = _mask(sample)
    if sample.penalty_counts is not None:
        seen.update(
            filter(logits.says, (*sample.penalty_counts.prompt, *sample.penalty_counts.outputs))
        )
    biases: dict[int, float] = {}
    for id, bias in params.logit_bias:
        biases[id] = biases.get(id, 0.0) + bias
    # Of the ids without a change, only the most likely few can be among the candidates.
    apart = banned | biases.keys() | seen
    if not apart and mask is None and params.allowed_token_ids is None:
        return list(islice(logits.ranked(), few))
    others = (id for id in logits.ranked() if id not in apart and _follows(mask, id))
    plain = list(islice(others, few))
    if not biases and params.allowed_token_ids is None and sample.penalty_counts is None:
        return plain
    pool = params.allowed_token_ids or (*plain, *biases, *seen)
    changed = {
        id: logits.of(id) + biases.get(id, 0.0)
        for id in pool
        if id not in banned and _follows(mask, id)
    }
    if sample.penalty_counts is not None:
        _penalise(changed, params, sample.penalty_counts)
    floor = max(changed.values(), default=0.0) - OUT_OF_REACH
    order = sorted(changed, key=lambda id: (-changed[id], logits.rank(id), id))
    return [id for id in order[:few] if changed[id] >= floor]


def _mask(sample: Sample) -> bytes | None:
    return None if sample.matcher is None else sample.matcher.mask()


def _follows(mask: bytes | None, id: int) -> bool:
    return mask is None or permits(mask, id)


def _penalise(logits: dict[int, float], params: SamplingParams, seen: PenaltyCounts) -> None:
    for id in {*seen.prompt, *seen.outputs} & logits.keys():
        penalty = params.repetition_penalty
        logits[id] = logits[id] / penalty if logits[id] > 0 else logits[id] * penalty
    for id in seen.outputs.keys() & logits.keys():
        logits[id] -= params.frequency_penalty * seen.outputs[id] + params.presence_penalty
