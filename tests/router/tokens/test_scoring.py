"""POST /generative_scoring: scores of items by labels, in answers and errors."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.link import RunJob
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_router.tokens.scoring import LabelScores, score
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode

SCORING = "/generative_scoring"
BODY: dict[str, Any] = {"query": "Q:", "items": ["ab", "c"], "label_token_ids": [16, 32]}


def position(*logprobs: float) -> PositionLogprobs:
    named = tuple(TokenLogprob(id, logprob) for id, logprob in enumerate(logprobs))
    return PositionLogprobs(TokenLogprob(0, 0.0), (), named)


@given(st.lists(st.floats(-1e6, 0.0), min_size=1, max_size=9))
def test_scores_among_labels_add_up_to_1(logprobs: list[float]) -> None:
    rotated = [position(*logprobs[at:], *logprobs[:at]) for at in range(len(logprobs))]
    total = math.fsum(score(each, among_labels=True) for each in rotated)
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("logprobs", "among", "alone"),
    [
        ((-1.0,), 1.0, math.exp(-1)),
        ((-1.0, -1.0), 0.5, math.exp(-1)),
        ((-1000.0, -1001.0), 1 / (1 + math.exp(-1)), 0.0),
        ((-math.inf, -1.0), 0.0, 0.0),
        ((-math.inf, -math.inf), 0.0, 0.0),
    ],
)
def test_scores_of_given_logprobs(logprobs: tuple[float, ...], among: float, alone: float) -> None:
    assert score(position(*logprobs), among_labels=True) == pytest.approx(among)
    assert score(position(*logprobs), among_labels=False) == pytest.approx(alone)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("more", "expected", "prompts"),
    [
        ({}, 1 / (1 + math.exp(-1)), [b"Q:ab", b"Q:c"]),
        ({"apply_softmax": False}, math.exp(-1), [b"Q:ab", b"Q:c"]),
        ({"item_first": True}, 1 / (1 + math.exp(-1)), [b"abQ:", b"cQ:"]),
        ({"label_token_ids": [32, 16, 32]}, 1 / (1 + math.exp(1)), [b"Q:ab", b"Q:c"]),
        ({"query": [81], "items": [[97], []]}, 1 / (1 + math.exp(-1)), [b"Qa", b"Q"]),
    ],
)
async def test_each_item_is_a_prompt_and_the_first_label_is_scored(
    decode: FakeNode, more: dict[str, Any], expected: float, prompts: list[bytes]
) -> None:
    async with pools.running(decode) as client:
        body = BODY | {"add_special_tokens": False, "request_id": "mine"} | more
        status, answer, _ = await client.post(SCORING, body)
        assert status == 200, answer
        read = msgspec.convert(answer, LabelScores)
        assert [each.index for each in read.data] == [0, 1]
        assert [each.score for each in read.data] == pytest.approx([expected] * 2)
        assert (read.id, read.object) == ("generative-scoring-mine", "list")
        sent = [job.request for job in decode.got if isinstance(job, RunJob)]
        jobs = {request.id[-1]: request for request in sent}
        assert [bytes(jobs[key].prompt_ids) for key in sorted(jobs)] == prompts
        assert all(request.params.max_tokens == 1 for request in sent)
        assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (
            sum(map(len, prompts)),
            2,
        )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"query": None}, "query"),
        ({"query": 1}, "query"),
        ({"items": []}, "items"),
        ({"items": "x"}, "items"),
        ({"items": ["x", 1]}, "items[1]"),
        ({"items": ["x"] * 1025}, "items"),
        ({"query": [], "items": [[]]}, "items"),
        ({"query": [1 << 40]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1 << 40]}, "label_token_ids"),
        ({"label_token_ids": [1] * 129}, "label_token_ids"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"items": ["x" * 20_000]}, "items"),
        ({"items": ["x" * 400_000]}, "items"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_a_wrong_body_is_an_error_that_names_its_member(
    decode: FakeNode, more: dict[str, Any], param: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(SCORING, BODY | more)
        assert (status, answer["error"]["param"]) == (400, param), answer
