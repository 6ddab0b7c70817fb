"""POST /rerank: documents in the order of their relevance to a query, in Cohere's and Jina's form.

The same answer serves both versions of Cohere's route: clients pass over the fields that their
version does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.call import Json, PromptIds
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_router.pooling.answers import ENCODER, RankedDocument, RankedText, Ranking
from baton_router.pooling.call import WholeAnswer, shared_parts
from baton_router.pooling.fields import RerankFields
from baton_router.pooling.pairs import PairsCall, tasks_of_pairs
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankCall(PairsCall):
    """`top_n`: how many documents the answer shows. `shown` are the texts that it repeats; empty if
    it repeats none."""

    top_n: int
    shown: Sequence[str]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> RerankCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> RerankCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(RerankFields, body)
        documents = fields.documents
        return cls(
            **shared_parts(fields, "documents"),
            tasks=tasks_of_pairs(fields.use_activation),
            first=[fields.query],
            second=documents,
            pairs=len(documents),
            top_n=fields.top_n or len(documents),
            shown=tuple(documents) if fields.return_documents else (),
        )

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> RerankShape:
        return RerankShape(self, common)


class RerankShape(WholeAnswer):
    def __init__(self, call: RerankCall, common: CommonFields) -> None:
        self._call = call
        self._common = common

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        call, scores = self._call, self._call.scores(choices)
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: call.top_n]
        return ENCODER.encode(
            Ranking(
                **self._common.shared(),
                results=[
                    RankedDocument(
                        index=at,
                        relevance_score=scores[at],
                        document=RankedText(text=call.shown[at]) if call.shown else UNSET,
                    )
                    for at in best
                ],
                usage=usage,
            )
        )


RERANK = Dialect(
    route="/rerank",
    endpoint="rerank",
    operation="rerank",
    prefix="rerank-",
    parse=RerankCall.parse,
)
RERANKS = (RERANK, replace(RERANK, route="/v1/rerank"), replace(RERANK, route="/v2/rerank"))
