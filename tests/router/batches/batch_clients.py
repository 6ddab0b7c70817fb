"""What clients do with files and batches: OpenAI's client, inputs, the lines of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch

from tests.router.pools import COMPLETIONS
from tests.support.waiting import WAIT_S

Json = dict[str, Any]
ENDED = ("completed", "failed", "expired", "cancelled")


@asynccontextmanager
async def api_of(url: str, key: str = "any") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api:
        yield api


def line(number: int, **fields: Any) -> Json:
    """A line of an input. `fields` are those of the line; those of its body are in `body`."""
    body = {"prompt": f"Say {number}", "max_tokens": 50} | fields.pop("body", {})
    shown = {"custom_id": f"line {number}", "method": "POST", "url": COMPLETIONS, "body": body}
    return shown | fields


def jsonl(lines: Sequence[Json | str]) -> bytes:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    return "\n".join(texts).encode()


async def send(api: AsyncOpenAI, lines: Sequence[Json | str], window: str = "24h") -> Batch:
    """Upload an input, and queue its batch."""
    file = await api.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return await api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window=window,  # type: ignore[arg-type]
    )


async def ended(api: AsyncOpenAI, batch: Batch) -> Batch:
    """Wait until the batch has ended."""
    async with asyncio.timeout(WAIT_S):
        while (batch := await api.batches.retrieve(batch.id)).status not in ENDED:
            await asyncio.sleep(0.05)
    return batch


async def lines_of(api: AsyncOpenAI, file: str | None) -> dict[str, Json]:
    """The lines of an output or an error file, by custom_id, each of which is there once."""
    if file is None:
        return {}
    parsed = [json.loads(each) for each in (await api.files.content(file)).text.splitlines()]
    found = {each["custom_id"]: each for each in parsed}
    assert len(found) == len(parsed)
    return found
