"""One HTTP exchange over a bare socket, with exactly the bytes that a test wrote.

In: a port of this machine, and the bytes of a request. Out: status, headers by lower-case name,
body. Nothing is added, so a test controls each header; `post` sends a usual request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END_S = 60.0
JSON_TYPE = "application/json"


@dataclass(frozen=True)
class RawResponse:
    """One answer. Headers of the same name are joined with ", "."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's format."""
        code: str = self.json()["error"]["code"]
        return code


async def exchange(port: int, data: bytes, then: bytes = b"") -> RawResponse:
    """Send `data`, and read one answer up to its content-length, its last chunk or the close.
    `then` is sent after the server's 100 Continue."""
    async with asyncio.timeout(END_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await writer.drain()
            if then:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(then)
            return await _answer(reader)
        finally:
            writer.close()


def raw_request(
    method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, length: bool = True
) -> bytes:
    """The bytes of a request with these headers. With `length`, a POST or a request with a body
    also gets Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if length and (body or method == "POST"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _answer(reader: asyncio.StreamReader) -> RawResponse:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        earlier = headers.get(name.lower())
        headers[name.lower()] = value.strip() if earlier is None else f"{earlier}, {value.strip()}"
    status = int(first.split(" ")[1])
    return RawResponse(status, headers, b"" if status == 204 else await _body(reader, headers))


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return body
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()
