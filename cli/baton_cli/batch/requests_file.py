"""The input of `baton run-batch`, in the format of OpenAI's batches.

In: a file with a JSON object a line: `custom_id`, `method`, `url` and `body`. Out: its requests, of
which all are checked before one is sent. Blank lines are skipped; lines may have different URLs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_cli.errors import CommandError
from baton_router.batches.lines import METHOD, RawLine, read_line

ENCODING_MARK = b"\xef\xbb\xbf"  # that some editors write at a file's beginning


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request. `number` is that of its line, from 1; `path` follows the server's URL."""

    number: int
    custom_id: str
    path: str
    body: bytes


class _Streams(msgspec.Struct):
    stream: bool | None = None


def check_requests(file: Path) -> int:
    """The number of requests. Raise CommandError for the first wrong line."""
    ids: set[str] = set()
    for request in read_requests(file):
        if request.custom_id in ids:
            raise _wrong(
                file, request.number, f"{request.custom_id!r} is the custom_id of an earlier line"
            )
        ids.add(request.custom_id)
    if not ids:
        raise CommandError(f"{file} has no requests; write a JSON object on each line")
    return len(ids)


def read_requests(file: Path) -> Iterator[BatchRequest]:
    """Raise CommandError for a wrong line."""
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                data = line.removeprefix(ENCODING_MARK) if number == 1 else line
                if data.strip():
                    yield _read(file, number, data)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from error


def _read(file: Path, number: int, data: bytes) -> BatchRequest:
    try:
        line = read_line(RawLine(number, data))
    except ValueError as error:
        raise _wrong(file, number, str(error)) from None
    if line.method != METHOD:
        raise _wrong(file, number, f"the method is {line.method!r}; use {METHOD}")
    if not line.url.startswith("/"):
        raise _wrong(
            file, number, f"the url is {line.url!r}; use a path, such as /v1/chat/completions"
        )
    body = bytes(line.body)
    if not body.lstrip().startswith(b"{"):
        raise _wrong(file, number, "the body must be a JSON object")
    try:
        streams = msgspec.json.decode(body, type=_Streams).stream
    except msgspec.ValidationError:
        streams = False  # the server says what is wrong
    if streams:
        raise _wrong(file, number, "stream is true; the answers go to a file, so leave it out")
    return BatchRequest(number, line.custom_id, line.url, body)


def _wrong(file: Path, number: int, problem: str) -> CommandError:
    return CommandError(f"{file}, line {number}: {problem}")
