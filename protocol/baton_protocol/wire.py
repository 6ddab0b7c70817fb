"""MessagePack with a protocol version.

Decoders ignore unknown fields (msgspec's default), so version N can read the records of version
N+1. A frame is `[version, record]`. The record types of one link form a tagged union.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from baton_protocol import PROTOCOL_VERSION

T = TypeVar("T")
OLDEST_READABLE = 1


class WireError(Exception):
    """Bytes that are not a valid frame; the message says why."""


class Codec(Generic[T]):
    """Encodes and decodes frames of one tagged union. Not thread-safe: one per task or thread."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[tuple[int, T]] = msgspec.msgpack.Decoder(
            tuple[int, union]
        )

    def encode(self, record: T) -> bytes:
        return self._encoder.encode((PROTOCOL_VERSION, record))

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Return the record of a frame. Raise WireError if it does not hold a valid record of the
        union."""
        try:
            version, record = self._decoder.decode(data)
        # msgspec raises its own error for neither invalid UTF-8 nor arrays nested too deeply.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"unreadable frame of {len(data)} bytes: {error}") from error
        if version < OLDEST_READABLE:
            raise WireError(
                f"frame of protocol version {version}; the oldest readable version is"
                f" {OLDEST_READABLE}"
            )
        return record
