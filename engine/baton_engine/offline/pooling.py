"""Requests of pooling models in the offline API, and what their callers get, with vLLM's names.

In: prompts and PoolingParams. Out: PooledRequests, which have the answers when they have run; then
one record per prompt, with its vector, the probabilities of its classes, or a score. What runs the
requests is the caller's: LLM in this process, AsyncLLM in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from baton_engine.interface import EngineInfo
from baton_engine.offline.model_text import ModelText, needed
from baton_engine.offline.prompts import GivenPrompt, Prompt, as_prompts
from baton_engine.vectors import numbers_of
from baton_protocol.errors import BatonError, InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams

# What a model has to answer with, and the methods of LLM and AsyncLLM that ask for it.
METHODS = {"embed": "embed() and score()", "classify": "classify() and score()"}
# The parameters of all prompts of a call, or of each.
Params = PoolingParams | Sequence[PoolingParams] | None
Item = TypeVar("Item")
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """`data` is a torch tensor, float32 [N]: the vector, or the probabilities or scores of classes.
    No type says so, as this module is used where there is no torch."""

    data: Any


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """`probs` are scores instead if the parameters say `activate=False`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts belong together: the cosine of their vectors, from -1 to 1, or what a
    model with one class says, as a probability."""

    score: float


Output = TypeVar("Output", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The answer to one prompt. `num_cached_tokens` is how many of its tokens came from the prefix
    cache."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt, and what is asked of it."""

    prompt: Prompt
    params: PoolingParams


@dataclass(slots=True)
class PooledRequest:
    """One request. It has ended when it has a `vector` or an `error`."""

    request: Request
    cached_tokens: int = 0
    vector: bytes = b""
    error: BatonError | None = None

    @property
    def ended(self) -> bool:
        return bool(self.vector) or self.error is not None

    @property
    def numbers(self) -> list[float]:
        return numbers_of(self.vector)

    def output(self, make: Callable[[list[float]], Output]) -> PoolingRequestOutput[Output]:
        return PoolingRequestOutput(
            request_id=self.request.id,
            outputs=make(self.numbers),
            prompt_token_ids=list(self.request.prompt_ids),
            num_cached_tokens=self.cached_tokens,
        )


def pooled_request(
    id: str, prompt: Prompt, params: PoolingParams, text: ModelText | None, *, priority: int = 0
) -> PooledRequest:
    """A request for the vector of a prompt. A text gets the tokens that its tokenizer adds, such as
    the EOS of Qwen3-Embedding. Raises InvalidRequest, and ModelError if the model has no text and
    needs one."""
    given = GivenPrompt.of(prompt)
    ids = given.ids
    if ids is None:
        tokenizer = needed(text, "a prompt of text").tokenizer
        ids = tuple(tokenizer.encode(given.text or ""))
    request = Request(
        id=RequestId(id),
        attempt=0,
        prompt_ids=ids,
        params=SamplingParams(detokenize=False),
        outputs=((),),
        salt=given.salt,
        priority=priority,
        pooling=_checked(params),
    )
    return PooledRequest(request)


def pooled_prompts(prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[PooledPrompt]:
    """Each prompt with its parameters, or with the only ones. Raises ValueError."""
    listed = as_prompts(prompts)
    given = PoolingParams() if params is None else params
    each = [given] * len(listed) if isinstance(given, PoolingParams) else given
    if len(each) != len(listed):
        raise ValueError(f"{len(listed)} prompts and {len(each)} pooling_params")
    return [PooledPrompt(*pair) for pair in zip(listed, each, strict=True)]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a model scores pairs of texts. The pairs are in `prompts`: a classifier's as one prompt
    each; else the `first` texts, and then the second ones, for their vectors."""

    prompts: list[PooledPrompt]
    first: int = 0

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        text: ModelText | None,
        sides: tuple[Prompt | Sequence[Prompt], Prompt | Sequence[Prompt]],
        params: PoolingParams | None,
    ) -> Scoring:
        """Raises InvalidRequest, and ModelError if the model has no text and needs one."""
        first, second = map(as_prompts, sides)
        pairs = paired(first, second)
        if info.pooling == "classify":
            if info.vector_size != 1:
                raise InvalidRequest(
                    f"score() needs a model with one class; this one has {info.vector_size}: use"
                    " classify()",
                    param="model",
                )
            params = params or PoolingParams()
            return cls([_pair_prompt(text, *pair, params) for pair in pairs])
        check_answers(info.pooling, "embed", "score()")
        return cls(pooled_prompts([*first, *second], params), len(first))

    def outputs(self, pooled: Sequence[PooledRequest]) -> list[ScoringRequestOutput]:
        """The scores of the pairs, from the answers to `prompts`."""
        if not self.first:
            return [each.output(lambda numbers: ScoringOutput(numbers[0])) for each in pooled]
        pairs = paired(pooled[: self.first], pooled[self.first :])
        return [_cosine(*pair) for pair in pairs]


def _pair_prompt(
    text: ModelText | None, one: Prompt, other: Prompt, params: PoolingParams
) -> PooledPrompt:
    if not (isinstance(one, str) and isinstance(other, str)):
        raise InvalidRequest("score() of a classifier takes texts, not token ids or dicts")
    known = needed(text, "score()")
    from baton_text.pairs import encode_pair

    ids, second = encode_pair(known.template, known.tokenizer, one, other)
    return PooledPrompt(ids, msgspec.structs.replace(params, second_text=second))


def check_answers(has: Pooling, wanted: Pooling, method: str) -> None:
    """Raise InvalidRequest unless the model answers with what a method of LLM needs."""
    if has == wanted:
        return
    if not has:
        raise InvalidRequest(
            f'{method} needs a pooling model, and this one generates tokens: use LLM(..., runner="'
            'pooling"), or generate()',
            param="model",
        )
    raise InvalidRequest(f"{method} is not for this model: use {METHODS[has]}", param="model")


def paired(first: Sequence[Item], second: Sequence[Other]) -> list[tuple[Item, Other]]:
    """Each of `second` with its own of `first`, or with the only one. Raises InvalidRequest."""
    if len(first) == 1:
        return [(first[0], other) for other in second]
    if len(first) != len(second):
        raise InvalidRequest(
            f"score() has {len(first)} first and {len(second)} second texts; give one first text,"
            " or as many as second ones"
        )
    return list(zip(first, second, strict=True))


def _cosine(one: PooledRequest, other: PooledRequest) -> ScoringRequestOutput:
    """The score of two texts by their vectors."""
    first, second = one.numbers, other.numbers
    length = math.hypot(*first) * math.hypot(*second)
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return PoolingRequestOutput(
        request_id=f"{one.request.id}_{other.request.id}",
        outputs=ScoringOutput(product / length if length else 0.0),
        prompt_token_ids=[*one.request.prompt_ids, *other.request.prompt_ids],
        num_cached_tokens=one.cached_tokens + other.cached_tokens,
    )


def _checked(params: PoolingParams) -> PoolingParams:
    """Raises InvalidRequest for a value of another type or out of range."""
    try:
        return msgspec.convert(msgspec.structs.asdict(params), PoolingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"pooling parameters: {error}") from None
