"""langchain's and pydantic-ai's chat models for a pool: greedy, with enough tokens for a whole
output. litellm and langchain_openai are imported at their first use, because each worker of a test
run imports all tests, and these two take 4 s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
from pydantic import SecretStr
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.e2e.clients.trips import LIMITS
from tests.support.pools.baton_up import Pool

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


def litellm() -> Any:
    """The module."""
    import litellm

    return litellm


def langchain_model(pool: Pool, **fields: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{pool.url}/v1",
        api_key=SecretStr("none"),
        model=pool.model,
        max_retries=0,
        temperature=LIMITS["temperature"],
        seed=LIMITS["seed"],
        max_completion_tokens=LIMITS["max_tokens"],
        **fields,
    )


@asynccontextmanager
async def pydantic_ai_model(
    pool: Pool, bias: dict[str, int] | None = None
) -> AsyncIterator[OpenAIChatModel]:
    client = openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(
        temperature=LIMITS["temperature"],
        seed=LIMITS["seed"],
        max_tokens=LIMITS["max_tokens"],
        logit_bias=bias or {},
    )
    async with client:
        provider = OpenAIProvider(openai_client=client)
        yield OpenAIChatModel(pool.model, provider=provider, settings=settings)
