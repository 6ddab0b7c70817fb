"""POST /score and /rerank with fake nodes: cosines, classifiers, prompts of pairs, and order."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import RunJob
from baton_protocol.pooling import PoolingParams
from baton_router.pooling.rerank import RerankCall
from baton_router.pooling.score import ScoreCall
from baton_text.artifacts import CHAT_TEMPLATE
from tests.router import pools
from tests.support.engines.special_tokens import BERT_TYPES, enclosed_artifacts
from tests.support.nodes.fake_node import FakeNode, vector_of_ids

pytestmark = pytest.mark.integration

PAIR_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'query' %}Q{{ message['content'] }}"
    "{% elif message['role'] == 'document' %}D{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)
DOCUMENTS = ["no", "eel", "be", "me"]  # of which this share is `e`: 0, 2/3, 1/2, 1/2


@pytest.fixture
async def embedding() -> AsyncIterator[FakeNode]:
    async with FakeNode("embed-0", "decode", pooling="embed") as node:
        yield node


@pytest.fixture
async def classifier() -> AsyncIterator[FakeNode]:
    async with FakeNode("classify-0", "decode", pooling="classify") as node:
        yield node


def prompts(node: FakeNode) -> list[bytes]:
    return [bytes(job.request.prompt_ids) for job in node.got_of(RunJob)]


def cosine(first: str, second: str) -> Any:
    one, other = (vector_of_ids(text.encode(), PoolingParams()) for text in (first, second))
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return pytest.approx(product / math.hypot(*one) / math.hypot(*other), abs=1e-6)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        ("ab", "cd", [b"ab", b"cd"]),
        ("ab", ["cd", "e"], [b"ab", b"cd", b"e"]),
        (["ab"], ["cd", "e"], [b"ab", b"cd", b"e"]),
        (["ab", "x"], ["cd", "e"], [b"ab", b"x", b"cd", b"e"]),
    ],
)
async def test_a_model_that_embeds_scores_by_cosines(
    embedding: FakeNode, path: str, names: tuple[str, str], first: Any, second: Any, texts: Any
) -> None:
    async with pools.running(embedding) as client:
        body = dict(zip(names, (first, second), strict=True))
        status, answer, _ = await client.post(path, body)
    ones = [first] if isinstance(first, str) else first
    others = [second] if isinstance(second, str) else second
    pairs = zip(ones * (len(others) // len(ones)), others, strict=True)
    assert status == 200
    assert [item["score"] for item in answer["data"]] == [cosine(*pair) for pair in pairs]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [
        (index, "score") for index in range(len(others))
    ]
    assert prompts(embedding) == texts
    assert answer["usage"]["total_tokens"] == sum(map(len, texts))
    assert answer["id"].startswith("score-")


@pytest.mark.parametrize(
    ("template", "fields", "sent"),
    [
        ("", {}, [b"<one|two>", b"<one|three>"]),
        ("", {"add_special_tokens": False}, [b"onetwo", b"onethree"]),
        ("", {"truncate_prompt_tokens": 8}, [b"<one|tw>", b"<one|th>"]),
        (
            "",
            {"truncate_prompt_tokens": 8, "truncation_side": "left"},
            [b"<one|wo>", b"<one|ee>"],
        ),
        (PAIR_TEMPLATE, {}, [b"<QoneDtwo>", b"<QoneDthree>"]),
    ],
)
async def test_a_classifier_gets_each_pair_as_one_prompt(
    classifier: FakeNode, template: str, fields: dict[str, Any], sent: list[bytes]
) -> None:
    files = enclosed_artifacts()
    classifier.serve_artifacts(files | ({CHAT_TEMPLATE: template.encode()} if template else {}))
    async with pools.running(classifier) as client:
        body = {"text_1": "one", "text_2": ["two", "three"]}
        status, answer, _ = await client.post("/score", body | fields)
        assert status == 200, answer
        assert prompts(classifier) == sent
        shares = [prompt.count(b"e") / len(prompt) for prompt in sent]
        assert [item["score"] for item in answer["data"]] == pytest.approx(shares)
        _, raw, _ = await client.post("/score", body | fields | {"use_activation": False})
        assert [item["score"] for item in raw["data"]] == pytest.approx([-each for each in shares])


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({}, [5, 5]),
        ({"add_special_tokens": False}, [3, 3]),
        ({"truncate_prompt_tokens": 8}, [5, 5]),
    ],
)
async def test_a_node_is_asked_with_the_place_at_which_the_second_text_of_a_pair_begins(
    classifier: FakeNode, fields: dict[str, Any], places: list[int]
) -> None:
    classifier.serve_artifacts(enclosed_artifacts(types=BERT_TYPES))
    async with pools.running(classifier) as client:
        body = {"text_1": "one", "text_2": ["two", "three"]}
        status, answer, _ = await client.post("/score", body | fields)
    assert status == 200, answer
    asked = [job.request.pooling for job in classifier.got_of(RunJob)]
    assert [each.second_text for each in asked if each is not None] == places


@pytest.mark.parametrize("first", ["a long text", "abcde"])
async def test_a_first_text_that_leaves_no_room_is_refused(
    classifier: FakeNode, first: str
) -> None:
    classifier.serve_artifacts(enclosed_artifacts())
    async with pools.running(classifier) as client:
        body = {"text_1": first, "text_2": "b", "truncate_prompt_tokens": 8}
        status, answer, _ = await client.post("/score", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_classifier_with_more_classes_scores_no_pairs(classifier: FakeNode) -> None:
    classifier.script.vector = [0.2, 0.8]
    async with pools.running(classifier) as client:
        status, answer, _ = await client.post("/score", {"text_1": "one", "text_2": "two"})
        assert (status, answer["error"]["code"]) == (400, "wrong_task")
        assert "this model has 2 classes" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("fields", "order"),
    [({}, [1, 2, 3, 0]), ({"top_n": 0}, [1, 2, 3, 0]), ({"top_n": 2}, [1, 2])],
)
async def test_the_best_documents_come_first_and_equal_ones_keep_their_order(
    classifier: FakeNode, path: str, fields: dict[str, Any], order: list[int]
) -> None:
    given = [{"text": text} if at % 2 else text for at, text in enumerate(DOCUMENTS)]
    async with pools.running(classifier) as client:
        body = {"query": "q", "documents": given} | fields
        status, answer, _ = await client.post(path, body)
        assert status == 200, answer
        assert [item["index"] for item in answer["results"]] == order
        texts = [item["document"]["text"] for item in answer["results"]]
        assert texts == [DOCUMENTS[at] for at in order]
        scores = [item["relevance_score"] for item in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        _, answer, _ = await client.post(path, body | {"return_documents": False})
        assert not any("document" in item for item in answer["results"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "x"}, "text_2"),
        ({"documents": "x"}, "queries"),
        ({"text_1": "x", "documents": "y"}, "text_2"),
        ({"text_1": "x", "text_2": "y", "data_2": "y"}, "data_2"),
        ({"text_1": [], "text_2": "y"}, "text_1"),
        ({"text_1": ["x", "y"], "text_2": ["z"]}, "text_2"),
        ({"queries": ["x", "y"], "documents": ["z"] * 3}, "documents"),
        ({"data_1": "x", "data_2": [1]}, "data_2"),
        ({"data_1": "x", "data_2": ["y"] * 2049}, "data_2"),
    ],
)
def test_sides_that_make_no_pairs_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ScoreCall.from_body(fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": "y"}, "documents"),
        ({"query": "x", "documents": [1]}, "documents[0]"),
        ({"query": "x", "documents": ["y", {}]}, "documents[1].text"),
        ({"query": "x", "documents": [{"text": "y", "title": "z"}]}, "documents[0].title"),
        ({"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ({"query": "x", "documents": ["y"], "rank_fields": ["title"]}, "rank_fields"),
        ({"query": "x", "documents": ["y"], "max_tokens_per_doc": 512}, "max_tokens_per_doc"),
    ],
)
def test_a_wrong_field_of_a_ranking_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RerankCall.from_body(fields)
    assert caught.value.param == param
