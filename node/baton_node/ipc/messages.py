"""What a node's server process and its engine process say to each other over a socketpair.

    server -> engine   Start (first)  PrefillJob  RunJob  FirstTokens  NoFirstTokens  Abort
                       FinishChoice  Drain  Undrain
    engine -> server   Ready or SetupFailed (first)  Step  JobFailed  Load  CacheEvents
                       Saved  Drained

The link's own records are used where they say the same thing. A frame is its length (4 bytes,
little-endian) and MessagePack. The end of the stream is the end of both processes.

    FrameError   bytes that are no frame of ours: a bug, the connection is given up
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from baton_node.settings import NodeSettings
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import (
    Abort,
    CacheEvents,
    FirstTokens,
    JobFailed,
    Load,
    NoFirstTokens,
    PrefillJob,
    RequestStats,
    RunJob,
)
from baton_protocol.request import PositionLogprobs
from baton_protocol.store import NodeLoad, Speeds, StoreHealth
from baton_protocol.wire import Codec

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


class FrameError(Exception):
    """The message names the length that cannot be."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The server chooses the epoch: it starts exactly one engine."""

    settings: NodeSettings
    epoch: Epoch


class FinishChoice(msgspec.Struct, frozen=True, tag="finish"):
    """A stop string ended this choice; surplus tokens are dropped by the server."""

    request: RequestId
    attempt: int
    choice: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Publish all full chunks of running requests, at once and as they fill. Each Drain is answered
    by Saved and, if no Undrain comes before, by Drained."""


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """Publish as before the first Drain."""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """What running requests had at the Drain is in the store, or was refused by it."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No request is left, and every chunk's transfer has settled."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine runs. The fields of EngineInfo that others need; `chunks` are cached now."""

    engine: str
    fingerprint: Fingerprint
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    speeds: Speeds
    load: NodeLoad
    chunks: tuple[BlockHash, ...] = ()
    store: StoreHealth = "none"


class SetupFailed(msgspec.Struct, frozen=True, tag="setup_failed"):
    """The engine cannot be built; one line for the user."""

    message: str


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token; see baton_engine.interface.TokenOut. `id` None: the choice had all when it
    came, and only ends."""

    request: RequestId
    attempt: int
    choice: int
    offset: int
    id: int | None
    finish: Literal["stop", "length"] | None = None
    stop_id: int | None = None
    logprobs: PositionLogprobs | None = None


class Prompted(msgspec.Struct, frozen=True, array_like=True):
    """A request's prompt is computed: how its gap was closed. Before or with its first token.
    `logprobs` of the prompt's tokens from the second on, if they were asked for."""

    request: RequestId
    attempt: int
    stats: RequestStats
    logprobs: tuple[PositionLogprobs, ...] = ()


class Step(msgspec.Struct, frozen=True, tag="step"):
    """All that one engine step gave."""

    tokens: tuple[Token, ...] = ()
    prompts: tuple[Prompted, ...] = ()


ToEngine = (
    Start
    | PrefillJob
    | RunJob
    | FirstTokens
    | NoFirstTokens
    | Abort
    | FinishChoice
    | Drain
    | Undrain
)
ToServer = Ready | SetupFailed | Step | JobFailed | Load | CacheEvents | Saved | Drained


def to_engine_codec() -> Codec[ToEngine]:
    return Codec(ToEngine)


def to_server_codec() -> Codec[ToServer]:
    return Codec(ToServer)


def pack(payload: bytes) -> bytes:
    """One frame as it goes over the socket."""
    return _LENGTH.pack(len(payload)) + payload


class Unpacker:
    """Cuts a byte stream into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes. Raise FrameError for an impossible length."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise FrameError(f"frame of {length} bytes; at most {MAX_FRAME}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads
