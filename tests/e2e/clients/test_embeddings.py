"""Client libraries read vectors and rankings: openai, LangChain, and LiteLLM in the forms of
several providers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from baton_protocol.pooling import PoolingParams
from tests.e2e.clients.chat_models import litellm
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode, vector_of_ids

pytestmark = pytest.mark.integration

TEXTS = ["one", "a second text"]
VECTORS = [pytest.approx(vector_of_ids(text.encode(), PoolingParams())) for text in TEXTS]
KEY = "none"


@pytest.fixture
async def router() -> AsyncIterator[pools.Client]:
    node = FakeNode("embed-0", "decode", pooling="embed")
    async with node, pools.running(node) as client:
        yield client


@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float", "base64"])
async def test_openai_reads_vectors(router: pools.Client, encoding: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key=KEY, max_retries=0
    ) as client:
        answer = await client.embeddings.create(
            model="fake-model", input=TEXTS, encoding_format=encoding
        )
        assert answer.usage.total_tokens == sum(map(len, TEXTS))
        if encoding != "base64":  # the client leaves what its caller asked for itself as it is
            assert [item.embedding for item in answer.data] == VECTORS
        [short] = (
            await client.embeddings.create(model="fake-model", input="one", dimensions=2)
        ).data
        assert len(short.embedding) == 2
        with pytest.raises(openai.BadRequestError, match="generates text"):
            await client.completions.create(model="fake-model", prompt="x")


async def test_langchain_reads_vectors(router: pools.Client) -> None:
    from langchain_openai import OpenAIEmbeddings  # takes seconds (see chat_models)

    async with openai.DefaultAsyncHttpxClient() as connections:
        model = OpenAIEmbeddings(
            model="fake-model",
            base_url=f"{router.url}/v1",
            api_key=SecretStr(KEY),
            check_embedding_ctx_length=False,
            http_async_client=connections,
        )
        assert await model.aembed_documents(TEXTS) == VECTORS
        assert await model.aembed_query(TEXTS[0]) == VECTORS[0]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_litellm_reads_vectors(router: pools.Client, provider: str) -> None:
    answer = await litellm().aembedding(
        model=f"{provider}/fake-model", input=TEXTS, api_base=f"{router.url}/v1", api_key=KEY
    )
    assert [item["embedding"] for item in answer.data] == VECTORS
    assert answer.usage.total_tokens == sum(map(len, TEXTS))


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai"])
async def test_litellm_reads_rankings(router: pools.Client, provider: str) -> None:
    """Each provider has its own route and form."""
    answer = await litellm().arerank(
        model=f"{provider}/fake-model",
        query="one",
        documents=["a text", "one"],
        top_n=1,
        return_documents=True,
        api_base=router.url,
        api_key=KEY,
    )
    [best] = answer.results
    assert (best["index"], best["document"]["text"]) == (1, "one")
    assert best["relevance_score"] == pytest.approx(1.0)
