"""The requests of one row of the fault table, each with an undisturbed pool's answer.

In: an undisturbed pool (one without faults), a seed. Out: one Case per kind of request. The first
is the row's target, whose prompt has many chunks; the others run beside it. Each row has new
prompts, so none is cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.clients.http import Json
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.rows import KINDS, Kind, When

PATH = "/v1/completions"
# Moments at which a stop string must begin with the first token: the hand-off then happens before
# any of it has been matched.
EARLY_MOMENTS: tuple[When, ...] = ("first computed", "first sent", "first seen")

INCOMPLETE = "\ufffd"  # the decoding of an incomplete character

# A match is longer than an answer may be, so the answer is cut in the middle of the grammar.
PEOPLE: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 32,
}

FIELDS: dict[Kind, Json] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "priority": 9},
    "two": {"n": 2, "temperature": 1.0, "seed": 11, "priority": -1},
    "penalties": {
        **{"temperature": 1.0, "seed": 5, "min_tokens": 4, "logit_bias": {"65": 3, "66": -100}},
        **{"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    },
    "logprobs": {
        **{"temperature": 1.0, "seed": 3, "logprobs": 3, "priority": 5},
        "logprob_token_ids": [70, 7],
    },
    "stop": {"temperature": 1.0, "seed": 13},
    "whole": {"temperature": 0, "stream": False},
    "echo": {"temperature": 0, "echo": True, "logprobs": 2},
    "scores": {
        **{"temperature": 1.0, "seed": 17, "n": 2, "stream": False},
        **{"prompt_logprobs": 2, "logprobs": 2},
    },
    "beams": {"use_beam_search": True, "n": 3, "stream": False, "logprobs": 1},
    "grammar": {"temperature": 1.0, "seed": 19, "structured_outputs": {"json": PEOPLE}},
}


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens; prompt ids are drawn from [first_id, end_id)."""

    target: int = 256
    others: int = 48
    answer: int = 32
    first_id: int = 32
    end_id: int = 127


SIZES = Sizes()


@dataclass(frozen=True)
class Case:
    kind: Kind
    body: Json
    reference: StreamedAnswer

    @property
    def prompt(self) -> list[int]:
        prompt: list[int] = self.body["prompt"]
        return prompt

    @property
    def tokens(self) -> int:
        """The number of token ids in choice 0 of the reference."""
        return len(self.reference.result.choices[0].ids)

    @property
    def middle(self) -> int:
        """The number of choice 0's ids at mid-stream. With a stop string, a point inside it."""
        return self.tokens - 2 if "stop" in self.body else self.tokens // 2

    def check(self, answer: StreamedAnswer) -> None:
        """Raise AssertionError unless the client got exactly the undisturbed pool's answer."""
        label = f"the {self.kind} request {answer.request}"
        assert answer.status == 200, f"{label}: {answer.status} {answer.error}"
        assert answer.error is None, f"{label}: {answer.error}"
        assert answer.whole, f"{label} has no end: {answer.result}"
        expected = self.reference.result
        assert answer.result == expected, f"{label}:\ngot    {answer.result}\nexpected {expected}"
        assert answer.cached == 0, f"{label}: {answer.cached} cached tokens of a new prompt"


def make_cases(
    undisturbed: str,
    target: Kind,
    when: When,
    seed: str,
    sizes: Sizes,
    kinds: Sequence[Kind] = KINDS,
) -> list[Case]:
    """Make one case per kind, the target's first, with answers of the pool at the URL
    `undisturbed`."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for kind in (target, *(kind for kind in kinds if kind != target)):
        length = sizes.others if cases else sizes.target
        prompt = [rng.randrange(sizes.first_id, sizes.end_id) for _ in range(length)]
        body: Json = {
            **{"prompt": prompt, "max_tokens": sizes.answer, "ignore_eos": True},
            **{"return_token_ids": True, "stream": True, **FIELDS[kind]},
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        reference = _ask(undisturbed, body)
        if kind == "stop":
            text = reference.result.choices[0].text
            body["stop"] = [stop_string_in(text, early=when in EARLY_MOMENTS)]
            reference = _ask(undisturbed, body)
            assert reference.result.choices[0].finish == "stop", reference
        cases.append(Case(kind, body, reference))
    return cases


def stop_string_in(text: str, *, early: bool) -> str:
    """Choose a stop string of 3 or 5 characters from the middle of a text on (`early`: from its
    start on) that does not occur earlier and has no incomplete character."""
    for size in (5, 3):
        for start in range(0 if early else len(text) // 2 - 2, len(text) - size):
            stop = text[start : start + size]
            if text.find(stop) == start and INCOMPLETE not in stop:
                return stop
    raise AssertionError(f"no stop string in {text!r}")


def _ask(url: str, body: Json) -> StreamedAnswer:
    answer = ask(url, PATH, body)
    assert answer.whole, answer
    assert answer.status == 200, answer
    return answer
