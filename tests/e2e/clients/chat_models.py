"""langchain's and pydantic-ai's chat models for a pool: greedy, with enough tokens for a whole
output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.e2e.clients.trips import LIMITS
from tests.support.pools.baton_up import Pool


def langchain_model(pool: Pool, **fields: Any) -> ChatOpenAI:
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
