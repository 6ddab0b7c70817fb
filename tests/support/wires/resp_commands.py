"""Finds the beginnings of commands in the bytes that a client sends to a Redis server.

In: bytes in pieces of any size. Out: the same bytes in pieces. The first piece of a command carries
its first two words. Long values are forwarded as they arrive, and never collected.
"""

from __future__ import annotations

from typing import NamedTuple

CRLF = b"\r\n"


class StreamPart(NamedTuple):
    """A piece of the stream. If a command begins here, `words` are its name in capitals and its
    first argument; otherwise None."""

    data: bytes
    words: tuple[bytes, ...] | None = None


class CommandSplitter:
    """Splits one connection's commands, which are arrays of bulk strings."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._words_left = 0
        self._skip = 0  # remaining bytes of the word that is being forwarded

    def feed(self, data: bytes) -> list[StreamPart]:
        self._buffer += data
        pieces: list[StreamPart] = []
        while self._buffer:
            piece = self._next()
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    def _next(self) -> StreamPart | None:
        """Return the next piece, or None if more bytes are needed."""
        if self._skip:
            size = min(self._skip, len(self._buffer))
            self._skip -= size
            return StreamPart(self._take(size))
        if self._words_left:
            line = self._buffer.find(CRLF)
            if line < 0:
                return None
            self._words_left -= 1
            self._skip = int(self._buffer[1:line]) + len(CRLF)
            return StreamPart(self._take(line + len(CRLF)))
        return self._begin()

    def _begin(self) -> StreamPart | None:
        end = self._buffer.find(CRLF)
        if end < 0:
            return None
        count, at = int(self._buffer[1:end]), end + len(CRLF)
        words: list[bytes] = []
        while len(words) < min(2, count):
            end = self._buffer.find(CRLF, at)
            if end < 0:
                return None
            start = end + len(CRLF)
            at = start + int(self._buffer[at + 1 : end]) + len(CRLF)
            if at > len(self._buffer):
                return None
            words.append(bytes(self._buffer[start : at - len(CRLF)]))
        self._words_left = count - len(words)
        words[0] = words[0].upper()
        return StreamPart(self._take(at), tuple(words))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
