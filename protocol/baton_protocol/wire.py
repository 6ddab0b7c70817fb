"""MessagePack with a protocol version.

Records ignore fields they do not know (msgspec's default), so that version N reads N+1's records.
A frame is `[version, record]`; the records of one link are a tagged union.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from baton_protocol import PROTOCOL_VERSION

T = TypeVar("T")
OLDEST_READABLE = 1


class WireError(Exception):
    """Bytes that are no frame of ours; the message says what they are."""


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
        """Raise WireError for bytes that do not hold a known record."""
        try:
            version, record = self._decoder.decode(data)
        # Text that is no UTF-8, and arrays in arrays without end, are no errors of msgspec's own.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"unreadable frame of {len(data)} bytes: {error}") from error
        if version < OLDEST_READABLE:
            raise WireError(f"frame of protocol version {version}; at least {OLDEST_READABLE}")
        return record
