"""Scores of pairs of texts, for /score and /rerank.

In: the two sides of each pair. Out: a score per pair. A model that embeds gets each text by itself,
and the score is the cosine of the two vectors. A classifier gets the pair as one prompt and answers
with the score (see `baton_text.pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_protocol.errors import InvalidRequest
from baton_protocol.pooling import PoolingParams
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.call import Prompt, Tasks, TextPrompt
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.conversation import MESSAGE_CHARS
from baton_router.pooling.call import PoolingCall
from baton_router.pooling.vectors import cosine, vector_of
from baton_text.pairs import ROLES, render_pair, renders_pairs


def tasks_of_pairs(use_activation: bool) -> Tasks:
    return {"embed": PoolingParams(), "classify": PoolingParams(activate=use_activation)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsCall(PoolingCall):
    """A parsed body. `first` holds one text, which stands in all pairs, or as many as `second`, of
    which there are `pairs`."""

    first: list[str]
    second: list[str]
    pairs: int

    @property
    def rendered(self) -> Sequence[int]:
        first = sum(map(len, self.first)) * (self.pairs if len(self.first) == 1 else 1)
        size = first + sum(map(len, self.second)) + len(ROLES) * MESSAGE_CHARS * self.pairs
        return (size,)

    def forget_prompts(self) -> None:
        self.first.clear()
        self.second.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        special = self.add_special_tokens
        if model.pooling == "embed":
            return [TextPrompt(text, special) for text in (*self.first, *self.second)]
        first = self.first * (self.pairs if len(self.first) == 1 else 1)
        pairs = zip(first, self.second, strict=True)
        if renders_pairs(model.template):
            return [TextPrompt(render_pair(model.template, *pair), special) for pair in pairs]
        return [TextPrompt(one, special, other) for one, other in pairs]

    def scores(self, choices: Sequence[ChoiceOutput]) -> list[float]:
        """The pairs' scores, from the answers to `prompts`."""
        vectors = [vector_of(choice) for choice in choices]
        alone = len(vectors) - self.pairs  # vectors of first texts, if each text has its own
        if not alone:
            return [_only(vector.tolist()) for vector in vectors]
        first, second = vectors[:alone], vectors[alone:]
        return [cosine(first[at % alone], vector) for at, vector in enumerate(second)]


def _only(scores: list[float]) -> float:
    if len(scores) != 1:
        raise InvalidRequest(
            f"this model has {len(scores)} classes, but the score of a pair needs a model with one",
            param="model",
            code="wrong_task",
        )
    return scores[0]
