"""POST /score: how similar the texts of each pair are, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.call import Json, PromptIds
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_router.pooling.answers import ENCODER, Score, ScoreList
from baton_router.pooling.call import WholeAnswer, shared_parts
from baton_router.pooling.fields import ScoreFields
from baton_router.pooling.pairs import PairsCall, tasks_of_pairs
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall(PairsCall):
    @classmethod
    def parse(cls, data: bytes | bytearray) -> ScoreCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> ScoreCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(ScoreFields, body)
        (_, first), (name, second) = fields.sides().items()
        return cls(
            **shared_parts(fields, name),
            tasks=tasks_of_pairs(fields.use_activation),
            first=first,
            second=second,
            pairs=len(second),
        )

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> ScoreShape:
        return ScoreShape(self, common)


class ScoreShape(WholeAnswer):
    def __init__(self, call: ScoreCall, common: CommonFields) -> None:
        self._call = call
        self._common = common

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        return ENCODER.encode(
            ScoreList(
                **self._common.shared(),
                object="list",
                data=[
                    Score(index=index, object="score", score=score)
                    for index, score in enumerate(self._call.scores(choices))
                ],
                usage=usage,
            )
        )


SCORE = Dialect(
    route="/score",
    endpoint="score",
    operation="score",
    prefix="score-",
    parse=ScoreCall.parse,
)
SCORES = (SCORE, replace(SCORE, route="/v1/score"))
