"""Sends requests at their arrival times and records the answers.

In: encoded bodies with their arrival times, a server. Out: a RequestOutcome per request. A failed
request gives one with an error, never an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import msgspec

from baton_cli.bench.stream import AnswerReader, RequestOutcome, error_word
from baton_cli.errors import CommandError

LOOK_TIMEOUT_S = 30.0
READ_BYTES = 1 << 20
Progress = Callable[[int], None]  # receives numbers of new tokens


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server under load. `url` is `base` plus the endpoint's path; every request carries
    `headers` and has `timeout_s` seconds in all."""

    base: str
    url: str
    headers: dict[str, str]
    timeout_s: float


class TimedRequest(NamedTuple):
    """One request to send. `at` is in seconds since the run began; `new_tokens` is the number of
    tokens requested, `prompt_tokens` the number sent."""

    at: float
    body: bytes
    new_tokens: int
    prompt_tokens: int


def open_session() -> aiohttp.ClientSession:
    """Open a session without a connection limit: send_all() bounds the concurrency."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=READ_BYTES,
    )


async def first_model(http: aiohttp.ClientSession, server: Server) -> str:
    """Return the first model name of /v1/models; raise CommandError."""
    url = server.base + "/v1/models"
    limit = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
    try:
        async with http.get(url, headers=server.headers, timeout=limit) as response:
            body = await response.read()
            if response.status != 200:
                raise CommandError(
                    f"{url}: {await _describe_status(response)}; name the model with --model"
                )
    except (aiohttp.ClientError, OSError) as error:
        raise CommandError(f"cannot query {url}: {_describe_break(error)}") from error
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise CommandError(f"{url} lists no model; name one with --model") from error


async def send_all(
    http: aiohttp.ClientSession,
    server: Server,
    requests: Sequence[TimedRequest],
    *,
    max_concurrency: int | None,
    progress: Progress,
) -> tuple[list[RequestOutcome], float]:
    """Send all requests. Return the outcomes in their order, and the run's duration in seconds.
    `progress` is called with numbers of newly received tokens."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    begun = time.perf_counter()

    async def send_one(request: TimedRequest) -> RequestOutcome:
        await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
        return await _send_when_free(
            gate, lambda: send_request(http, server, request, begun, progress)
        )

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(send_one(request)) for request in requests]
    return [task.result() for task in running], time.perf_counter() - begun


async def send_request(
    http: aiohttp.ClientSession,
    server: Server,
    request: TimedRequest,
    zero: float,
    progress: Progress,
) -> RequestOutcome:
    """Send one request; `zero` is the run's start on time.perf_counter()."""
    begun = time.perf_counter()
    outcome = RequestOutcome(begun - zero, request.new_tokens, request.prompt_tokens)
    reader = AnswerReader(outcome, begun)
    try:
        async with (
            asyncio.timeout(server.timeout_s),
            http.post(server.url, data=request.body, headers=server.headers) as response,
        ):
            if response.status == 200:
                async for piece in response.content.iter_any():
                    progress(reader.feed(piece, time.perf_counter()))
            else:
                outcome.error = await _describe_status(response)
    except TimeoutError:
        outcome.error = f"timeout after {server.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = _describe_break(error)
    except msgspec.MsgspecError as error:
        outcome.error = f"a chunk of the stream cannot be read: {error}"
    reader.close()
    return outcome


async def _send_when_free(
    gate: AbstractAsyncContextManager[None], work: Callable[[], Awaitable[RequestOutcome]]
) -> RequestOutcome:
    async with gate:
        return await work()


async def _describe_status(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    try:
        detail = error_word(msgspec.json.decode(body))
    except msgspec.MsgspecError:
        detail = response.reason or ""
    return f"HTTP {response.status} {detail}".strip()


def _describe_break(error: Exception) -> str:
    """Describe a broken connection without the client's addresses and ports, so that equal failures
    have equal reasons."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error.os_error}"
    return f"the connection broke: {type(error).__name__}"
