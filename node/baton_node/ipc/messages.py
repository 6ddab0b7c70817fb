"""Frames between a node's server process and its engine process, over a socketpair.

    server -> engine   Start (first)  PrefillJob  RunJob  FirstTokens  NoFirstTokens  Abort
                       FinishChoice  Drain  Undrain  ResetPrefixCache  PinPrefix  UnpinPrefix
                       StartProfile  StopProfile  Sleep  WakeUp
    engine -> server   EngineReady or SetupFailed (first)  Step  JobFailed  Load  CacheEvents
                       NodeTime  Saved  Drained  Profiled  Slept

Records of the router link are reused where they have the same meaning. A frame's payload is
MessagePack (see `framing`). When the stream ends, both processes end.
"""

from __future__ import annotations

import msgspec

from baton_engine.interface import (
    Complete,
    Drafts,
    EngineInfo,
    Part,
    SleepLevel,
    TokenOut,
)
from baton_node.settings import NodeSettings
from baton_protocol.ids import BlockHash, Epoch, RequestId
from baton_protocol.link import (
    Abort,
    CacheEvents,
    FirstTokens,
    JobFailed,
    Load,
    NoFirstTokens,
    PinPrefix,
    PrefillJob,
    RequestStats,
    ResetPrefixCache,
    RunJob,
    UnpinPrefix,
)
from baton_protocol.request import PositionLogprobs
from baton_protocol.usage import NodeTime, TimeSpent
from baton_protocol.wire import Codec


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Build the engine. The server chooses the epoch, since it starts exactly one engine."""

    settings: NodeSettings
    epoch: Epoch


class FinishChoice(msgspec.Struct, frozen=True, tag="finish"):
    """A stop string ended this choice. The server drops the tokens after it."""

    request: RequestId
    attempt: int
    choice: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Publish all full chunks of running requests now, and later ones as they fill.

    The engine answers with Saved and then Drained, unless an Undrain comes first. A Drain that
    arrives before the answer to the previous one shares that answer.
    """


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """Publish as before the first Drain. Cancels the answers to earlier Drains."""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """The store has stored or refused each chunk that running requests held at the Drain."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No request is left, and all transfers of chunks have settled."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Profile the next `steps` steps and write their trace to the file `path`, which exists and is
    the server's. The engine answers with Profiled."""

    steps: int
    path: str


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile now, if there is one."""


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The trace of `steps` steps is in the file `path`; or, with an `error`, it is not."""

    path: str
    steps: int
    error: str = ""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give memory back (see EngineCore.sleep) as soon as nothing is in flight. The engine answers
    with Slept."""

    level: SleepLevel


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Restore these parts (see EngineCore.wake_up). The engine answers with Slept. A Sleep that was
    not obeyed yet is forgotten."""

    parts: tuple[Part, ...]


class Slept(msgspec.Struct, frozen=True, tag="slept"):
    """The parts that are away now; () if the engine is awake. `error` says why it did not obey.
    `changed`: the model's folder has other weights now, so another engine must be started."""

    away: tuple[Part, ...] = ()
    error: str = ""
    changed: bool = False


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready. `load` is its first load, with the speeds that it measured. `chunks` are
    in its prefix cache now."""

    info: EngineInfo
    load: Load
    chunks: tuple[BlockHash, ...] = ()


class SetupFailed(msgspec.Struct, frozen=True, tag="setup_failed"):
    """The engine cannot be built. `message` is one line for the user."""

    message: str


class Prompted(msgspec.Struct, frozen=True, array_like=True):
    """A request's prompt is computed. Sent before or with its first token. `stats` says where its
    KV came from. `logprobs` has one entry per prompt token from the second on, or is empty if the
    request does not ask for them."""

    request: RequestId
    attempt: int
    stats: RequestStats
    logprobs: tuple[PositionLogprobs, ...] = ()


class Spent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time of this node's steps that a request has cost until now."""

    request: RequestId
    attempt: int
    time: TimeSpent


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The results of one engine step, for all requests. `complete` only ends choices that arrived
    with all their tokens. `drafts` count for the requests that go on or end with this step.
    `spent` is there for requests that may end with it: those with a last token, and those with stop
    strings."""

    tokens: tuple[TokenOut, ...] = ()
    prompts: tuple[Prompted, ...] = ()
    complete: tuple[Complete, ...] = ()
    drafts: tuple[Drafts, ...] = ()
    spent: tuple[Spent, ...] = ()


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
    | ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
    | StartProfile
    | StopProfile
    | Sleep
    | WakeUp
)
ToServer = (
    EngineReady
    | SetupFailed
    | Step
    | JobFailed
    | Load
    | CacheEvents
    | NodeTime
    | Saved
    | Drained
    | Profiled
    | Slept
)


def to_engine_codec() -> Codec[ToEngine]:
    return Codec(ToEngine)


def to_server_codec() -> Codec[ToServer]:
    return Codec(ToServer)
