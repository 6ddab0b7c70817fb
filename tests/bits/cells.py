"""The models, dtypes and requests of the matrix of same bits, and the bench that compares answers.

In: a model's folder, a dtype, a path that computes the requests in some way. Out: nothing, or
Differs: the first token whose id or log-probabilities differ from those of the same request alone
on an engine. A family or a weight format enters the matrix as a row of MODELS.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.ids import RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import SamplingParams
from tests.bits.origin import Origin
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import small_engine

# What each model adds to the matrix: see tests/support/engines/tiny_models.
MODELS: Mapping[str, str] = {
    "llama-gqa2-tied": "grouped queries, tied embeddings",
    "llama-gqa4": "one kv head, bias in all products, head size 24",
    "qwen2-mha-head40": "a kv head per query head, bias in q, k and v, head size 40",
    "llama-head64": "head size 64",
    "qwen3-head128": "head size 128, norms of q and k",
    "llama3-rope": "scaled rope, three layers",
    "mistral-window": "a window in each layer",
    "qwen3-window": "a window in one layer",
    "phi3-partial-window": "fused projections, partial rope, a window",
    "phi3-long-rope": "rope with a factor per frequency",
    "gemma2": "soft caps, windows in every other layer, norms before and after",
    "gemma2-wide-heads": "head size 256",
    "gpt-oss": "sinks, experts with biases, yarn, a window in one layer",
    "mixtral": "experts, weights normalised",
    "qwen2-moe": "a shared MLP with a gate, weights not normalised",
    "qwen3-moe-bias-odd": "an odd number of experts, a layer without",
    "olmoe-clip-tied": "norms of all of q and k, bounds of q, k and v",
    "glm4-moe-groups-tied": "groups of experts, chosen by a sigmoid and a bias; float32 router",
    "deepseek-v2-groups": "latent rows that are copied, experts of the best groups",
    "deepseek-v3": "latent rows that are read in place, sigmoid scores of experts",
}
DTYPES = ("float32", "bfloat16")

# An id, the bits of its float32 log-probability, and the same of each alternative.
Token = tuple[int, ...]
Answer = tuple[Token, ...]


@dataclass(frozen=True)
class Subject:
    """A request of which each path must compute the same bits."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    def request(
        self, name: str = "", *, known: Sequence[Sequence[int]] = (), salt: str = "", **changes: Any
    ) -> Request:
        """The request, or one with other params. `known` are the ids that each choice has."""
        params = msgspec.structs.replace(self.params, **changes)
        return Request(
            id=RequestId(name or self.name),
            attempt=2 if known else 1,
            prompt_ids=self.prompt,
            params=params,
            outputs=tuple(map(tuple, known)) or ((),) * params.n,
            salt=salt,
        )


# Attention adds 64 keys at a time, blocks have 16 tokens, chunks 32, and windows 32 or 40: the
# prompts and answers cross the ends of all of these.
NEW_TOKENS = 44
GREEDY = Subject(
    "greedy",
    tuple(prompt_of(150, seed=1)),
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2),
)
DRAWN = Subject(
    "drawn",
    tuple(prompt_of(61, seed=2)),
    SamplingParams(
        n=2,
        temperature=1.1,
        top_k=60,
        top_p=0.9,
        min_p=0.01,
        seed=5,
        max_tokens=12,
        ignore_eos=True,
        logprobs=1,
        logprob_token_ids=(60, 7),
        presence_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((7, 1.5),),
    ),
)
SUBJECTS = (GREEDY, DRAWN)


def others(count: int, *, seed: int = 0) -> list[Request]:
    """Requests of random lengths and parameters, to compute beside a subject."""
    rng = random.Random(f"others {seed}")
    requests = []
    for number in range(count):
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            top_p=rng.choice((1.0, 0.8)),
            seed=rng.getrandbits(31),
            n=rng.choice((1, 1, 1, 2)),
            max_tokens=rng.randint(1, 50),
            ignore_eos=True,
        )
        prompt = prompt_of(rng.choice((1, rng.randint(2, 40), rng.randint(41, 260))), seed=number)
        requests.append(Subject("", tuple(prompt), params).request(f"other {number}"))
    return requests


def bits_of(logprob: float) -> int:
    """The bits of a float32. Raises if the number has more bits than a float32."""
    packed = struct.pack("<f", logprob)
    assert struct.unpack("<f", packed) == (logprob,), f"{logprob!r} is no float32"
    return int.from_bytes(packed, "little")


def token_of(id: int, logprobs: PositionLogprobs | None) -> Token:
    assert logprobs is not None
    assert logprobs.sampled.id == id
    each = (logprobs.sampled, *logprobs.top, *logprobs.named)
    return tuple(number for one in each for number in (one.id, bits_of(one.logprob)))


def ids_in(answer: Answer) -> list[int]:
    return [token[0] for token in answer]


class Differs(AssertionError):
    """A choice's tokens differ from those of the same request alone."""

    def __init__(self, label: str, subject: Subject, choice: int, at: int, found: str) -> None:
        super().__init__(
            f"{label}: choice {choice} of the {subject.name} request differs at token {at}: {found}"
        )
        self.subject, self.choice = subject, choice


@dataclass
class Bench:
    """One model in one dtype on a device; `store` is for nodes that exchange KV. A bench that is
    not `thorough` takes a quarter of a path's sizes and positions. `origins` record the hidden
    states of engines, if it is not None."""

    folder: Path
    dtype: str
    store: EmbeddedStore | None = None
    device: str = "cpu"
    thorough: bool = True
    origins: list[Origin] | None = None
    kv_cache_dtype: str = "auto"
    store_codec: str = "none"

    def some(self, values: Sequence[int]) -> Sequence[int]:
        return values if self.thorough else values[1::4]

    @property
    def exact(self) -> dict[str, Any]:
        return {
            **{"dtype": self.dtype, "device": self.device, "batch_invariant": "on"},
            "kv_cache_dtype": self.kv_cache_dtype,
            "store_codec": self.store_codec,
        }

    def engine(self, **settings: Any) -> EngineCore:
        if self.origins is not None:
            settings["enforce_eager"] = True  # a replayed graph calls no part of the model
        engine = small_engine(self.folder, **{**self.exact, "kv_blocks": 300, **settings})
        assert engine.info.exact == "bitwise"
        if self.origins is not None:
            self.origins.append(Origin.of(engine))
        return engine

    @cached_property
    def alone(self) -> dict[tuple[str, int], Answer]:
        """The answers of the subjects, each alone on an engine of its own."""
        found: dict[tuple[str, int], Answer] = {}
        for subject in SUBJECTS:
            answers = run(self.engine(), [subject.request()])
            found |= {(subject.name, c): answers[subject.name, c] for c in range(subject.params.n)}
        return found

    def expected(self, subject: Subject, choice: int = 0) -> Answer:
        return self.alone[subject.name, choice]

    def check(
        self,
        label: str,
        subject: Subject,
        answer: Answer,
        choice: int = 0,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Raise Differs unless the answer has the expected tokens from `begin` to `end`."""
        expected = self.expected(subject, choice)[begin:end]
        for at, (one, other) in enumerate(zip(answer, expected, strict=False)):
            if one != other:
                raise Differs(label, subject, choice, begin + at, f"{one}, alone {other}")
        if len(answer) != len(expected):
            found = f"there are {len(answer)} tokens, alone {len(expected)}"
            raise Differs(label, subject, choice, begin + len(answer), found)

    def check_all(self, label: str, answers: Mapping[tuple[str, int], Answer]) -> None:
        """Check every choice of every subject."""
        for subject in SUBJECTS:
            for choice in range(subject.params.n):
                self.check(label, subject, answers[subject.name, choice], choice)


def run(
    engine: EngineCore,
    requests: Iterable[Request],
    found: dict[tuple[str, int], Answer] | None = None,
    *,
    steps: int | None = None,
) -> dict[tuple[str, int], Answer]:
    """Submit the requests, and step until all have ended or for some steps. Returns the tokens of
    each (request, choice); adds to `found` if it is given. Others may lack logprobs."""
    found = {} if found is None else found
    for request in requests:
        engine.submit(request)
    for _ in steps_of(engine, steps):
        for token in engine.step().tokens:
            key = str(token.request), token.choice
            one = token_of(token.id, token.logprobs) if token.logprobs else (token.id,)
            found[key] = (*found.get(key, ()), one)
    engine.check_integrity()
    return found


def steps_of(engine: EngineCore, steps: int | None) -> Iterator[int]:
    """Count the engine's steps while it has work, up to `steps`."""
    count = 0
    while engine.has_work() and count != steps:
        yield count
        count += 1
        assert count < 5000
