"""Splits the bytes of one direction of a connection into pieces that can be decoded and forwarded.

In: bytes in pieces of any size. Out: raw pieces in order; a piece with a binary WebSocket message
also has the message. Other HTTP, such as a GET of an artifact, passes unchanged. It supports only
the parts of RFC 6455 that links use: unfragmented messages without extensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

HEAD_END = b"\r\n\r\n"
# The beginnings of the heads after which frames follow: the router's and the node's.
UPGRADES = (b"GET /link ", b"HTTP/1.1 101 ")
BINARY = 2
FIN = 0x80  # set in the first byte of each frame, and in no byte of a head


class Piece(NamedTuple):
    raw: bytes
    message: bytes | None = None


class Splitter:
    """Splits one direction of one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._framed = False

    def feed(self, data: bytes) -> Iterator[Piece]:
        self._buffer += data
        if self._framed and self._buffer[0] < FIN:
            self._framed = False  # the node has refused the link, and the connection is kept
        if not self._framed:
            yield from self._plain()
        while self._framed and (piece := self._frame()) is not None:
            yield piece

    def _plain(self) -> Iterator[Piece]:
        """Yield HTTP bytes unchanged, up to the head after which frames follow. The connection may
        have been used for other requests before."""
        if self._buffer.startswith(UPGRADES):
            end = self._buffer.find(HEAD_END)
            if end >= 0:
                self._framed = True
                yield Piece(self._take(end + len(HEAD_END)))
        elif self._buffer:
            yield Piece(self._take(len(self._buffer)))

    def _frame(self) -> Piece | None:
        """Return the next frame, or None if it is incomplete."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        size, at = buffer[1] & 0x7F, 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(buffer[2 : 2 + width], "big"), 2 + width
        masked = bool(buffer[1] & 0x80)
        start = at + 4 * masked
        if len(buffer) < start + size:
            return None
        mask, binary = bytes(buffer[at:start]), buffer[0] & 0x0F == BINARY
        raw = self._take(start + size)
        message = raw[start:]
        return Piece(raw, (_unmask(message, mask) if masked else message) if binary else None)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def _unmask(data: bytes, mask: bytes) -> bytes:
    count = len(data)
    key = (mask * (count // 4 + 1))[:count]
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(key, "big")
    return mixed.to_bytes(count, "big")
