"""The JSON of the answers as records: OpenAI's of embeddings, vLLM's of scores, Cohere's and Jina's
of rankings. All have the fields that generations have, too."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton_router.openai.answers import Closed, CommonFields, Usage

ENCODER = msgspec.json.Encoder()


class Embedding(Closed):
    """The vector of one text: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(CommonFields):
    object: Literal["list"]
    data: list[Embedding]
    usage: Usage


class Score(Closed):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(CommonFields):
    object: Literal["list"]
    data: list[Score]
    usage: Usage


class RankedText(Closed):
    text: str


class RankedDocument(Closed):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(CommonFields):
    """The best document comes first."""

    results: list[RankedDocument]
    usage: Usage
