"""Whole pools: each text has one vector, whichever node makes it, and it is what Python gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM
from tests.support.clients.http import exchange
from tests.support.engines.encoders import POSITIONS, encoder
from tests.support.engines.pooling_models import classifier, embedding_model
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.integration
SIM = ("--engine", "sim", "--prefill", "1", "--decode", "1")

TEXTS = ["the prefill node", "every chunk of the cache has a name", "always", "a"]
FLAGS = ("--prefill", "1", "--decode", "1", "--threads", "1", "--kv-memory", "16MiB")


@pytest.fixture(scope="module", params=["embed", "score", "cross-encoder"])
def served(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, LLM, Pool]]:
    """A model's task, the model in Python, and a pool of it."""
    source, made = tiny_model("qwen3-gqa2"), tmp_path_factory.mktemp("pooling")
    folder = {
        "embed": lambda: embedding_model(source, made / "embed"),
        "score": lambda: classifier(source, made / "score", 1),
        "cross-encoder": lambda: encoder(made / "encoder", classes=1),
    }[request.param]()
    llm = LLM(folder, dtype="float32", threads=1, kv_blocks=200)
    with Pool(["--model", str(folder), "--dtype", "float32", *FLAGS]) as pool:
        yield request.param, llm, pool


def test_each_text_has_one_vector_whichever_node_makes_it() -> None:
    with Pool([*SIM, "--runner", "pooling", "--placement", "round-robin"]) as pool:
        both = exchange(pool.url, "/v1/embeddings", {"input": TEXTS * 4})
        assert both.status == 200, both.body
        vectors = [item["embedding"] for item in both.body["data"]]
        assert vectors == vectors[: len(TEXTS)] * 4
        assert len({tuple(vector) for vector in vectors}) == len(TEXTS)
        assert {len(vector) for vector in vectors} == {32}
        placed = both.headers["x-baton-placement"]
        assert {"decode=prefill-0", "decode=decode-0"} <= set(placed.replace(";", " ").split())
        refused = exchange(pool.url, "/v1/completions", {"prompt": "x"})
        assert (refused.status, refused.body["error"]["code"]) == (400, "wrong_task")


def test_an_encoder_answers_every_route_of_vectors_with_what_transformers_computes(
    tmp_path: Path,
) -> None:
    folder = encoder(tmp_path / "encoder", pooling={"pooling_mode_mean_tokens": True})
    expected = _means(folder, TEXTS)
    flags = ["--prefill", "0", "--decode", "1", "--threads", "1", "--dtype", "float32"]
    with Pool(["--model", str(folder), *flags]) as pool:
        data = answer(pool, "/v1/embeddings", {"input": TEXTS})["data"]
        for item, vector in zip(data, expected, strict=True):
            assert item["embedding"] == pytest.approx(vector.tolist(), abs=1e-5)
        cosines = [float(expected[0] @ other) for other in expected[1:]]
        data = answer(pool, "/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})["data"]
        assert [item["score"] for item in data] == pytest.approx(cosines, abs=1e-5)
        results = answer(pool, "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]})["results"]
        order = sorted(range(len(cosines)), key=lambda place: -cosines[place])
        assert [item["index"] for item in results] == order
        long = exchange(pool.url, "/v1/embeddings", {"input": "a " * POSITIONS})
        assert (long.status, long.body["error"]["code"]) == (400, "context_length_exceeded")
        cut = {"input": "a " * POSITIONS, "truncate_prompt_tokens": -1}
        assert answer(pool, "/v1/embeddings", cut)["usage"]["prompt_tokens"] == POSITIONS


def _means(folder: Path, texts: list[str]) -> list[Any]:
    """The mean of each text's hidden states, with length 1, as transformers computes it."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = [model(tokenizer(text, return_tensors="pt")["input_ids"])[0][0] for text in texts]
    return [torch.nn.functional.normalize(each.mean(0), dim=0) for each in states]


def answer(pool: Pool, path: str, body: dict[str, Any]) -> Any:
    reply = exchange(pool.url, path, body)
    assert reply.status == 200, reply.body
    return reply.body


@pytest.mark.long
def test_a_pool_answers_what_python_gets(served: tuple[str, LLM, Pool]) -> None:
    task, llm, pool = served
    if task == "embed":
        vectors = [output.outputs.embedding for output in llm.embed(TEXTS)]
        data = answer(pool, "/v1/embeddings", {"input": TEXTS})["data"]
        assert [item["embedding"] for item in data] == vectors
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:])]
    body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
    data = answer(pool, "/score", body)["data"]
    assert [item["score"] for item in data] == pytest.approx(scores, abs=1e-6)
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    results = answer(pool, "/v2/rerank", body)["results"]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    assert [item["index"] for item in results] == order
    refused = exchange(pool.url, "/v1/completions", {"prompt": "x"})
    assert (refused.status, refused.body["error"]["code"]) == (400, "wrong_task")
    [model] = exchange(pool.url, "/v1/models").body["data"]
    assert model["task"] == ("embed" if task == "embed" else "classify")
    refused = exchange(pool.url, "/v1/embeddings", {"input": "x", "dimensions": 9999})
    assert refused.status == 400
