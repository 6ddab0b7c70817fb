"""Frames of a byte stream: a length (4 bytes, little-endian) and a payload.

In: payloads. Out: bytes for the socket, and back.

    FrameError   the bytes are not a frame: a bug; the connection cannot be used any more
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20  # bytes of payload


class FrameError(Exception):
    """A frame's length exceeds MAX_FRAME; the message names it."""


def pack(payload: bytes) -> bytes:
    """Return the frame of a payload, as bytes for the socket."""
    return _LENGTH.pack(len(payload)) + payload


class Unpacker:
    """Splits a byte stream into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes. Raise FrameError if a length exceeds
        MAX_FRAME."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise FrameError(f"frame of {length} bytes exceeds the limit of {MAX_FRAME} bytes")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads
