"""POST /v1/embeddings: the vector of each text.

In: a JSON body with a text, a list of texts, token ids or a list of id lists. Each is a request.
Out: a list of vectors in the order of the texts.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_protocol.pooling import PoolingParams
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.call import Json, Prompt, PromptIds, TextPrompt
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_router.pooling.answers import ENCODER, Embedding, EmbeddingList
from baton_router.pooling.call import PoolingCall, WholeAnswer, shared_parts
from baton_router.pooling.fields import EmbeddingFields
from baton_router.pooling.vectors import vector_of
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsCall(PoolingCall):
    """A parsed body. `base64`: how the answer writes vectors."""

    given: list[Prompt]
    base64: bool

    @classmethod
    def parse(cls, data: bytes | bytearray) -> EmbeddingsCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> EmbeddingsCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(EmbeddingFields, body)
        params = PoolingParams(normalize=fields.normalize, dimensions=fields.dimensions)
        return cls(
            **shared_parts(fields, "input"),
            tasks={"embed": params},
            given=[
                TextPrompt(text, fields.add_special_tokens) if isinstance(text, str) else text
                for text in fields.input
            ],
            base64=fields.encoding_format == "base64",
        )

    def forget_prompts(self) -> None:
        self.given.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        return list(self.given)

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> EmbeddingsShape:
        return EmbeddingsShape(common, _base64 if self.base64 else _numbers)


class EmbeddingsShape(WholeAnswer):
    """`write` makes the JSON of a vector."""

    def __init__(self, common: CommonFields, write: Callable[[ChoiceOutput], Any]) -> None:
        self._common = common
        self._write = write

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        return ENCODER.encode(
            EmbeddingList(
                **self._common.shared(),
                object="list",
                data=[
                    Embedding(object="embedding", index=index, embedding=self._write(choice))
                    for index, choice in enumerate(choices)
                ],
                usage=usage,
            )
        )


def _numbers(choice: ChoiceOutput) -> msgspec.Raw:
    """Written one by one: the encoder holds the interpreter lock until it is done."""
    return msgspec.Raw(ENCODER.encode(vector_of(choice).tolist()))


def _base64(choice: ChoiceOutput) -> str:
    vector_of(choice)  # raises if it is none
    return b64encode(choice.vector).decode()


EMBEDDINGS = Dialect(
    route="/v1/embeddings",
    endpoint="embeddings",
    operation="embeddings",
    prefix="embd-",
    parse=EmbeddingsCall.parse,
)
