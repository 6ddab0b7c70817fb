"""The lines of a batch's files: reading and checking those of the input, writing those of answers.

In: an input of JSON lines, each with `custom_id`, `method`, `url` and `body`; it may be large, so
it is read in blocks. Out: its lines, or what is wrong with them; the lines of the output and of the
error file. A body is not looked at here: a wrong one is answered with an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from baton_router.batches.records import BatchError, BatchOrder
from baton_router.openai.answers import Closed
from baton_router.openai.fields.errors import show

BLOCK = 1 << 20  # bytes
LONGEST_ID = 512
MOST_ERRORS = 100  # of one batch
METHOD = "POST"

# From a start and a size to the input's bytes there.
ReadRange = Callable[[int, int], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of the input that is not blank. `number` counts all lines, from 1."""

    number: int
    data: bytes


class InputLine(msgspec.Struct, gc=False):
    """What a line of the input says. Members with other names have no effect."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineTooLong(Exception):
    """A line of the input is longer than a request may be."""

    def __init__(self, number: int, longest: int) -> None:
        super().__init__(f"line {number} has more than {longest} bytes")
        self.number = number


class AnsweredRequest(Closed):
    """`request_id` names the request for `baton explain`."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineFailure(Closed):
    code: str
    message: str


class OutputLine(Closed):
    """A line of the output or of the error file."""

    id: str
    custom_id: str
    response: AnsweredRequest | None
    error: LineFailure | None


async def read_blocks(read: ReadRange, size: int, longest: int) -> AsyncIterator[list[RawLine]]:
    """The lines of an input of `size` bytes, some at a time. Raise LineTooLong."""
    rest, before, at = b"", 0, 0
    while at < size:
        block = await read(at, min(BLOCK, size - at))
        if not block:
            break
        at += len(block)
        lines = (rest + block).split(b"\n")
        rest = lines.pop() if at < size else b""
        found = []
        for number, line in enumerate(lines, start=before + 1):
            if len(line) > longest:
                raise LineTooLong(number, longest)
            if line.strip():
                found.append(RawLine(number, line))
        before += len(lines)
        if len(rest) > longest:
            raise LineTooLong(before + 1, longest)
        yield found


class InputCheck:
    """Checks the lines of one input. `errors` are the first that it finds."""

    def __init__(self, endpoint: str, most_lines: int) -> None:
        self.total = 0
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._most = most_lines
        self._ids: set[str] = set()

    async def check(self, blocks: AsyncIterator[list[RawLine]]) -> None:
        """Read until the end, or until there are enough errors."""
        try:
            async for block in blocks:
                await asyncio.to_thread(partial(self._check_lines, block))
                if len(self.errors) >= MOST_ERRORS or self.total > self._most:
                    break
        except LineTooLong as error:
            self._note("line_too_long", f"{error}; send shorter requests", None, error.number)
        if self.total > self._most:
            message = f"the file has more than {self._most} lines; send several batches"
            self._note("too_many_lines", message, None, None)
        if not self.total and not self.errors:
            self._note("empty_file", "the file has no lines; write a request on each", None, None)

    def _check_lines(self, lines: Iterable[RawLine]) -> None:
        for raw in lines:
            self.total += 1
            if self.total > self._most or len(self.errors) >= MOST_ERRORS:
                return
            self._check_line(raw)

    def _check_line(self, raw: RawLine) -> None:
        try:
            line = read_line(raw)
        except ValueError as error:
            self._note("invalid_line", str(error), None, raw.number)
            return
        if not 0 < len(line.custom_id) <= LONGEST_ID:
            message = f"it has {len(line.custom_id)} characters; use 1 to {LONGEST_ID}"
            self._note("invalid_custom_id", message, "custom_id", raw.number)
        elif line.custom_id in self._ids:
            message = f"{show(line.custom_id)} is the id of an earlier line; use each id once"
            self._note("duplicate_custom_id", message, "custom_id", raw.number)
        elif line.method != METHOD:
            message = f"the method is {show(line.method)}; use {METHOD}"
            self._note("invalid_method", message, "method", raw.number)
        elif line.url != self._endpoint:
            message = f"the url is {show(line.url)}, and the batch's endpoint is {self._endpoint}"
            self._note("mismatched_url", message, "url", raw.number)
        elif not bytes(line.body).lstrip().startswith(b"{"):
            message = "the body must be a JSON object"
            self._note("invalid_body", message, "body", raw.number)
        self._ids.add(line.custom_id)

    def _note(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.errors.append(BatchError(code=code, message=message, param=param, line=line))


def read_line(raw: RawLine) -> InputLine:
    """Raise ValueError for a line that is not as it must be."""
    try:
        return msgspec.json.decode(raw.data, type=InputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"the line is no JSON object with custom_id, method, url and body: {error}"
        ) from None


def answered_line(
    order: BatchOrder, raw: RawLine, custom_id: str, status: int, request_id: str, body: bytes
) -> bytes:
    """The line of an answer, or of an error that the request got."""
    response = AnsweredRequest(
        status_code=status, request_id=request_id, body=msgspec.Raw(body.strip())
    )
    return _encode(order, raw, custom_id, response, None)


def unanswered_line(order: BatchOrder, raw: RawLine, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    failure = LineFailure(code=code, message=message)
    return _encode(order, raw, read_line(raw).custom_id, None, failure)


def _encode(
    order: BatchOrder,
    raw: RawLine,
    custom_id: str,
    response: AnsweredRequest | None,
    error: LineFailure | None,
) -> bytes:
    id = f"batch_req_{order.id.removeprefix('batch_')}_{raw.number}"
    return msgspec.json.encode(
        OutputLine(id=id, custom_id=custom_id, response=response, error=error)
    )
