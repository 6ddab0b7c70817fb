"""Frames of the WebSocket from router (client) to node (server).

    router -> node   PrefillJob  RunJob  First  NoFirst  Abort
    node -> router   Hello (first frame)  Load  CacheEvents  Deltas  PrefillDone  JobFailed

Every frame about a request carries (request, attempt); the receiver drops what is older than the
attempt it knows. The loss of a link is not an abort; only an Abort frame is.

A router whose link to the same epoch came back sends each job of its requests there again, in the
same attempt, with the outputs that it has by now: a node that still has the request goes on, and
sends what the router has missed; to one that never got the job it is new.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import BlockHash, Epoch, NodeId, RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.store import NodeLoad, NodeReport, NodeState, Speeds, StoreHealth
from baton_protocol.wire import Codec

FinishReason = Literal["stop", "length", "abort"]
LINK_PATH = "/link"
ARTIFACTS_PATH = "/artifacts/"


def link_headers(token: str) -> dict[str, str]:
    """What a router says to its nodes with each request; a node with this token wants to hear it
    for its link and its artifacts."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class PrefillJob(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt, publish its full chunks, tell `decode_node`'s inbox, sample one token per
    choice. Answered by PrefillDone or JobFailed."""

    request: Request
    decode_node: NodeId
    decode_epoch: Epoch


class RunJob(msgspec.Struct, frozen=True, tag="run"):
    """Run the request to its end. With `await_first` a prefill partner is at work: fetch what its
    inbox entries announce and generate only after First or NoFirst of this attempt. Choices in
    `finished` have ended and are not to be run."""

    request: Request
    await_first: bool = False
    finished: tuple[int, ...] = ()


class First(msgspec.Struct, frozen=True, tag="first"):
    """The ids the prefill node sampled. `outputs[c]` is choice c's ids so far; choices named in
    `finished` ended there and are not to be run."""

    request: RequestId
    attempt: int
    outputs: tuple[tuple[int, ...], ...]
    finished: tuple[int, ...] = ()


class NoFirst(msgspec.Struct, frozen=True, tag="no_first"):
    """The prefill job was lost or refused: compute the rest and sample the first token yourself."""

    request: RequestId
    attempt: int
    reason: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request: RequestId
    attempt: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    report: NodeReport


class Load(msgspec.Struct, frozen=True, tag="load"):
    epoch: Epoch
    state: NodeState
    speeds: Speeds
    load: NodeLoad
    store: StoreHealth = "up"


class CacheEvents(msgspec.Struct, frozen=True, tag="cache"):
    """Chunks (named by hash) that entered or left this node's own cache since the last such frame.

    After Hello, the first such frame lists all that is there, with `reset` set.
    """

    epoch: Epoch
    stored: tuple[BlockHash, ...] = ()
    evicted: tuple[BlockHash, ...] = ()
    reset: bool = False


class RequestStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a node closed the gap for one request. Tokens of the prompt; milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New ids of one choice: `offset` is the index of the first of them among the choice's outputs.

    `text` may lag behind the ids (half characters, possible stop strings). `finish` is set on the
    choice's last delta; `stop` is the stop string or id that ended it, if one did. `stats` is set
    on the request's last delta, `prompt_logprobs` (one per prompt token from the second on) on the
    first of a request that asked for them.
    """

    request: RequestId
    attempt: int
    choice: int
    offset: int
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None
    stats: RequestStats | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """All requests of one engine step in one frame."""

    items: tuple[Delta, ...]


class PrefillDone(msgspec.Struct, frozen=True, tag="prefill_done"):
    """The prefill job's first token of each choice, in choice order, as soon as they are sampled
    (the last chunks may still be on their way; the inbox's "end" says when they are not)."""

    request: RequestId
    attempt: int
    choices: tuple[Delta, ...]
    stats: RequestStats


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    request: RequestId
    attempt: int
    error: ErrorRecord


ToNode = PrefillJob | RunJob | First | NoFirst | Abort
ToRouter = Hello | Load | CacheEvents | Deltas | PrefillDone | JobFailed


def to_node_codec() -> Codec[ToNode]:
    return Codec(ToNode)


def to_router_codec() -> Codec[ToRouter]:
    return Codec(ToRouter)
