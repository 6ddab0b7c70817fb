"""Sends the requests of a batch, and writes the line of each answer.

In: requests, a server. Out: a line per request, as it is answered: its answer, the error that the
server gave, or why there is none. What may go well later is tried again for a time: a server that
is full, or that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import aiohttp
import msgspec

from baton_cli.batch.requests_file import BatchRequest
from baton_cli.errors import CommandError
from baton_router.batches.lines import AnsweredRequest, LineFailure, OutputLine

LATER = (429, 503)  # errors that another try may not have
PATIENCE_S = 120.0  # from the first try of a request until its last one begins
PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between two tries
CONNECT_S = 10.0
ANSWER_S = 3600.0  # limit of one try
TIMEOUT = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)


@dataclass(slots=True)
class Counts:
    """Requests that got an answer, and those that got an error or none."""

    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a try brought. `pause_s`: how long the server asks to wait; None: it does not ask.
    `final`: another try would bring the same."""

    line: OutputLine
    final: bool
    pause_s: float | None = None


class BatchSender:
    """`counts` gets the outcomes. `base` is the server's URL without a slash at its end."""

    def __init__(
        self, http: aiohttp.ClientSession, base: str, output: BinaryIO, counts: Counts
    ) -> None:
        self._counts = counts
        self._http = http
        self._base = base
        self._output = output

    async def send_all(self, requests: Iterator[BatchRequest], concurrency: int) -> None:
        """Send all requests, some at a time. Raise CommandError if an answer cannot be written."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._send_next(requests))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _send_next(self, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            line = await self._answer(request)
            succeeded = line.response is not None and line.response.status_code == 200
            try:
                self._output.write(msgspec.json.encode(line) + b"\n")
                self._output.flush()
            except OSError as error:
                raise CommandError(f"cannot write an answer: {error.strerror}") from error
            self._counts.completed += succeeded
            self._counts.failed += not succeeded

    async def _answer(self, request: BatchRequest) -> OutputLine:
        clock = asyncio.get_running_loop().time
        until, pause_s = clock() + PATIENCE_S, PAUSE_S
        while True:
            outcome = await self._ask(request)
            if outcome.final or clock() >= until:
                return outcome.line
            wanted = pause_s if outcome.pause_s is None else outcome.pause_s
            await asyncio.sleep(min(max(wanted, PAUSE_S), LONGEST_PAUSE_S))
            pause_s *= 2

    async def _ask(self, request: BatchRequest) -> _Outcome:
        url, headers = self._base + request.path, {"Content-Type": "application/json"}
        try:
            async with self._http.post(url, data=request.body, headers=headers) as response:
                data = await response.read()
        except TimeoutError:
            message = f"{url} did not answer within {ANSWER_S:g} s"
            return _Outcome(
                _line(request, failure=LineFailure(code="timeout", message=message)), final=True
            )
        except (aiohttp.ClientError, OSError) as error:
            message = f"cannot reach {url}: {error}"
            failure = LineFailure(code="connection_failed", message=message)
            return _Outcome(_line(request, failure=failure), final=False)
        try:
            body = msgspec.json.format(data, indent=-1)  # on one line
        except msgspec.DecodeError:
            message = f"{url} answered {response.status} with no JSON: {data[:200]!r}"
            failure = LineFailure(code="invalid_answer", message=message)
            return _Outcome(_line(request, failure=failure), final=response.status not in LATER)
        answered = AnsweredRequest(
            status_code=response.status,
            request_id=response.headers.get("x-request-id", ""),
            body=msgspec.Raw(body),
        )
        wanted = response.headers.get("Retry-After", "")
        return _Outcome(
            _line(request, answered),
            final=response.status not in LATER,
            pause_s=float(wanted) if wanted.isdecimal() else None,
        )


def _line(
    request: BatchRequest,
    response: AnsweredRequest | None = None,
    failure: LineFailure | None = None,
) -> OutputLine:
    return OutputLine(
        id=f"batch_req_{request.number}",
        custom_id=request.custom_id,
        response=response,
        error=failure,
    )
