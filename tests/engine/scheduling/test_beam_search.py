"""The rules of beam search on a model of three ids: which beams go on, which answers win, and when
the search is over. `tests/engine/test_beam_search.py` compares with transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from baton_engine.scheduling.beam_search import BeamSearch
from baton_protocol.request import TokenLogprob
from baton_protocol.sampling import SamplingParams

A, B, END = 0, 1, 2
# The probabilities of A, B and END after each text; after others, those of "".
Model = dict[tuple[int, ...], tuple[float, float, float]]


def likeliest(model: Model, text: tuple[int, ...]) -> list[TokenLogprob]:
    odds = enumerate(model.get(text, model[()]))
    return sorted(
        (TokenLogprob(id, math.log(p)) for id, p in odds), key=lambda token: -token.logprob
    )


def searched(model: Model, width: int, max_length: int = 3, **params: Any) -> Sequence[Any]:
    """The texts of the answers with their finish reasons, and the number of steps."""
    search = BeamSearch(
        SamplingParams(use_beam_search=True, n=width, **params),
        frozenset({END}),
        eos_ids=(END,),
        max_length=max_length,
    )
    texts: list[tuple[int, ...]] = [()]
    steps = 0
    while True:
        steps += 1
        following = search.advance([likeliest(model, text) for text in texts])
        if not following:
            answers = [
                (tuple(each.sampled.id for each in answer.beam.positions()), answer.finish)
                for answer in search.answers
            ]
            return answers, steps
        texts = [(*texts[parent], id) for parent, id in following]


GREEDY_LOSES: Model = {
    (): (0.5, 0.4, 0.1),
    (A,): (0.34, 0.33, 0.33),
    (B,): (0.05, 0.9, 0.05),
    (B, B): (0.05, 0.9, 0.05),
}
ENDS_EARLY: Model = {
    (): (0.6, 0.3, 0.1),
    (A,): (0.1, 0.1, 0.8),
    (B,): (0.3, 0.3, 0.4),
}


@pytest.mark.parametrize(
    ("model", "width", "params", "answers", "steps"),
    [
        # One beam is the greedy answer.
        (GREEDY_LOSES, 1, {}, [((A, A, A), "length")], 3),
        # Two beams find a better one that begins with the second likeliest id.
        (GREEDY_LOSES, 2, {}, [((B, B, B), "length"), ((A, A, A), "length")], 3),
        # An answer that ends does not continue; the search ends with two of them.
        (
            ENDS_EARLY,
            2,
            {"early_stopping": True},
            [((A, END), "stop"), ((B, END), "stop")],
            2,
        ),
        # Divided by a power of its length, a longer answer wins.
        (
            ENDS_EARLY,
            2,
            {"length_penalty": 4.0, "early_stopping": "never"},
            [((B, A, A), "length"), ((B, B, A), "length")],
            3,
        ),
        # Multiplied with it, a shorter one does.
        (ENDS_EARLY, 2, {"length_penalty": -4.0}, [((A, END), "stop"), ((B, END), "stop")], 2),
    ],
)
def test_the_rules(
    model: Model,
    width: int,
    params: dict[str, Any],
    answers: list[tuple[tuple[int, ...], str]],
    steps: int,
) -> None:
    assert searched(model, width, **params) == (answers, steps)


def test_an_end_at_the_maximum_length_is_a_stop() -> None:
    answers, _ = searched(ENDS_EARLY, 1, max_length=2)
    assert answers == [((A, END), "stop")]
