"""POST /generative_scoring: how likely a label is as the next token of a prompt, for each item.

In: a JSON body with a query, items and the ids of labels, in vLLM's form. Each item with the query
is one prompt, of which one token is generated, with the log-probabilities of the labels. Out: for
each item the probability of the first label, among the labels or in the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import Closed, CommonFields, ErrorAnswer, Usage, event
from baton_router.openai.call import GENERATES, Json, Options, Prompt, PromptIds, Tasks, Truncation
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.sampling import parameters_in
from baton_router.openai.structured_output import RequestedGrammar
from baton_router.tokens.scoring_fields import ScoringFields, TextOrIds
from baton_text.tokenizer import Tokenizer

PREFIX = "generative-scoring-"


class LabelScore(Closed):
    index: int
    object: Literal["score"]
    score: float


class LabelScores(Closed):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelScore]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCall:
    """A parsed body."""

    fields: ScoringFields
    items: list[TextOrIds]
    options: Options
    sampling: Json
    priority: int
    bad_words: tuple[str, ...] = ()
    special_tokens_requested: bool = False
    grammar: RequestedGrammar | None = None
    default_max_tokens: int | None = None
    truncation: Truncation | None = None
    continues_prompt: bool = True

    @classmethod
    def parse(cls, data: bytes | bytearray) -> ScoringCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> ScoringCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(ScoringFields, body)
        sampling = {
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 0,
            "logprob_token_ids": tuple(dict.fromkeys(fields.label_token_ids)),
            "detokenize": False,
        }
        return cls(
            fields=fields,
            items=list(fields.items),
            options=Options(
                model=fields.model,
                stream=False,
                include_usage=False,
                continuous_usage=False,
                return_token_ids=False,
            ),
            sampling=parameters_in(fields, sampling),
            priority=fields.priority or 0,
        )

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt": "items", "logprob_token_ids": "label_token_ids"}

    @property
    def tasks(self) -> Tasks:
        return GENERATES

    @property
    def rendered(self) -> Sequence[int]:
        query = self.fields.query
        common = len(query) if isinstance(query, str) else 0
        return [common + (len(item) if isinstance(item, str) else 0) for item in self.items]

    def forget_prompts(self) -> None:
        self.items.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        """Query and item are tokenized apart, so the query has the same ids in all prompts."""
        special = self.fields.add_special_tokens
        query = _ids_of(self.fields.query, model.tokenizer, special)
        items = (_ids_of(item, model.tokenizer, False) for item in self.items)
        if self.fields.item_first:
            return [item + query for item in items]
        return [query + item for item in items]

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> None:
        """None: nobody reads the answers' text."""

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> ScoringShape:
        return ScoringShape(self.fields, common)


def _ids_of(given: TextOrIds, tokenizer: Tokenizer, special: bool) -> tuple[int, ...]:
    if isinstance(given, str):
        return tuple(tokenizer.encode(given, add_special_tokens=special))
    return given


class ScoringShape:
    """The JSON of the scores. They are not streamed."""

    def __init__(self, fields: ScoringFields, common: CommonFields) -> None:
        self._fields = fields
        self._common = common

    def event(self, index: int, delta: Delta) -> bytes:
        raise NotImplementedError("scores have no stream")

    def end(self, usage: Usage | None) -> bytes:
        raise NotImplementedError("scores have no stream")

    def error_event(self, error: ErrorRecord) -> bytes:
        return event(ErrorAnswer.of(error))

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        common, own = self._common, self._fields.request_id
        answer = LabelScores(
            id=common.id if own is None else PREFIX + own,
            object="list",
            created=common.created,
            model=common.model,
            data=[
                LabelScore(
                    index=index,
                    object="score",
                    score=score(choice.logprobs[0], among_labels=self._fields.apply_softmax),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )
        return msgspec.json.encode(answer)


def score(position: PositionLogprobs, *, among_labels: bool) -> float:
    """The probability of the first named token: among the named ones, or among all. 0 if none of
    them is possible."""
    logprobs = [token.logprob for token in position.named]
    if not among_labels:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    if largest == -math.inf:
        return 0.0
    shares = [math.exp(logprob - largest) for logprob in logprobs]
    return shares[0] / sum(shares)


SCORING = Dialect(
    route=ScoringFields.ROUTE,
    endpoint="generative_scoring",
    operation="text_completion",
    prefix=PREFIX,
    parse=ScoringCall.parse,
)
