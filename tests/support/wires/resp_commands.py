"""Where the commands begin in what a client says to a Redis server.

In: bytes as they come, in pieces of any size. Out: the same bytes in pieces; one that begins a
command carries its first two words, and comes before any other byte of that command. A long value
is passed on as it comes, never collected.
"""

from __future__ import annotations

from typing import NamedTuple

CRLF = b"\r\n"


class StreamPart(NamedTuple):
    """A piece of the stream. `words` are a command's first two where it begins here (its name in
    capitals), else None."""

    data: bytes
    words: tuple[bytes, ...] | None = None


class CommandSplitter:
    """One connection's requests; arrays of bulk strings, as every client sends them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._words_left = 0
        self._skip = 0  # bytes of the word that is being passed on

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
        """None: more bytes are needed to know what comes."""
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
