"""Frames of the WebSocket from router (client) to node (server).

    router -> node   PrefillJob  RunJob  FirstTokens  NoFirstTokens  Abort  DrainNode  ResumeNode
                     Resync
    node -> router   Hello (first frame)  Load  CacheEvents  Deltas  PrefillDone  JobFailed

Every frame about a request carries (request, attempt); the receiver drops what is older than the
attempt it knows. The loss of a link is not an abort; only an Abort frame is. A request belongs to
the router that sent its job: a node hears nothing about it from others.

A router whose link to the same epoch came back sends each job of its requests there again, in the
same attempt, with the outputs that it has by now: a node that still has the request goes on, and
sends what the router has missed; to one that never got the job it is new.

A node that drains says so in its Load, and takes nothing new. Past its deadline its Load says
`leaving`: each router moves what it can to other nodes, and aborts it here; what it cannot move
goes on here. A node that ends hands back what is left by then, with a JobFailed of code DRAINED.

A frame that a node does not know breaks its link: DrainNode and ResumeNode are for nodes whose
report says a protocol of at least DRAIN_SINCE, Resync is for those that count their cache events.
To a router of version 1 `leaving` says nothing, and DRAINED is one more retryable refusal: it
places the request again.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any, Literal

import msgspec

from baton_protocol.errors import ErrorRecord
from baton_protocol.figures import Count, Hash, Milliseconds, Text, TokenId
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.store import (
    Instances,
    NodeLoad,
    NodeReport,
    NodeState,
    Speeds,
    StoreHealth,
)
from baton_protocol.wire import Codec, WireError

FinishReason = Literal["stop", "length"]
LINK_PATH = "/link"
ARTIFACTS_PATH = "/artifacts/"
ROUTER_HEADER = "x-baton-router"
# A frame as long as this, or longer, ends its link. The largest are a node's chunks, 18 bytes each,
# and the log-probabilities of prompts, up to 12 MB each.
MAX_FRAME_BYTES = 64 << 20
DRAIN_SINCE = 2
DRAINED = "drained"


def link_headers(token: str, router: str = "") -> dict[str, str]:
    """What a router says to its nodes with each request; a node with this token wants to hear it
    for its link and its artifacts. `router` is a secret of one start of a router: requests belong
    to who says it, so that no other router can touch them, and its own links may break. Routers
    that say none, as of version 3, share theirs."""
    said = {ROUTER_HEADER: router} if router else {}
    return said | ({"Authorization": f"Bearer {token}"} if token else {})


def says_token(authorization: str, token: str) -> bool:
    """Whether who sent this Authorization header, "" for none, knows the link token."""
    wanted = link_headers(token)["Authorization"].encode()
    # As bytes: compare_digest takes no other text than ASCII, and a header may hold any.
    return hmac.compare_digest(authorization.encode(errors="surrogateescape"), wanted)


def is_loopback(host: str) -> bool:
    """Of an address that listens, or of a client's."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class PrefillJob(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt, publish its full chunks, tell `decode_node`'s inbox, sample one token per
    choice. Answered by PrefillDone or JobFailed. `uncached`: how many tokens its router expects to
    be computed, as it has booked them; None from a router that does not say, which is all."""

    request: Request
    decode_node: NodeId
    decode_epoch: Epoch
    uncached: int | None = None


class RunJob(msgspec.Struct, frozen=True, tag="run"):
    """Run the request to its end. With `await_first` a prefill partner is at work: fetch what its
    inbox entries announce and generate only after FirstTokens or NoFirstTokens of this attempt.
    Choices in `finished` have ended and are not to be run. `uncached` as in PrefillJob; with a
    partner the booking is the partner's."""

    request: Request
    await_first: bool = False
    finished: tuple[int, ...] = ()
    uncached: int | None = None


class FirstTokens(msgspec.Struct, frozen=True, tag="first"):
    """The ids the prefill node sampled. `outputs[c]` is choice c's ids so far; choices named in
    `finished` ended there and are not to be run."""

    request: RequestId
    attempt: int
    outputs: tuple[tuple[int, ...], ...]
    finished: tuple[int, ...] = ()


class NoFirstTokens(msgspec.Struct, frozen=True, tag="no_first"):
    """The prefill job was lost or refused: compute the rest and sample the first token yourself."""

    request: RequestId
    attempt: int
    reason: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request: RequestId
    attempt: int


class DrainNode(msgspec.Struct, frozen=True, tag="drain"):
    """Take nothing new; what runs may end here for `deadline_s`, None as long as after SIGTERM.
    The same words again change nothing, others count from now on. `replaced_by` names the revision
    of a roll-out that takes this node's place: it does not come back."""

    deadline_s: float | None = None
    reason: str = ""
    replaced_by: str = ""


class ResumeNode(msgspec.Struct, frozen=True, tag="undrain"):
    """Take requests again. A node that was told to end does not."""


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """Cache events were missed: list all that is there, as after Hello."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    report: NodeReport


class Load(msgspec.Struct, frozen=True, tag="load"):
    """How a node is now. `reason`: why it drains, `replaced_by` which revision takes its place, as
    it was told. `leaving`: what runs there is to be moved."""

    epoch: Epoch
    state: NodeState
    speeds: Speeds
    load: NodeLoad
    store: StoreHealth = "up"
    instances: Instances = ()
    reason: Text = ""
    leaving: bool = False
    replaced_by: Text = ""


class CacheEvents(msgspec.Struct, frozen=True, tag="cache"):
    """Chunks (named by hash) that entered or left this node's own cache since the last such frame.

    After Hello, the first such frame lists all that is there, with `reset` set. `seq` counts a
    node's frames: each has the one before it plus 1, a listing that of the last frame which it
    includes. 0 beside no `reset` is from a node that does not count.
    """

    epoch: Epoch
    stored: tuple[Hash, ...] = ()
    evicted: tuple[Hash, ...] = ()
    reset: bool = False
    seq: Count = 0


class RequestStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a node closed the gap for one request. Tokens of the prompt; milliseconds.

    Until the prompt is computed a node waits for its prefill partner's first token (`handoff_ms`),
    fetches (`fetch_ms`), computes (`prefill_ms`), or does none of these (`queue_ms`). A fetch while
    the partner computes is `fetch_ms`, so that the four add up to the time since the job arrived.
    `matched_tokens` were in its cache or had a marker; `host_tokens` came from its
    host tier. Of the last decision whether to fetch what the store holds or to compute it: what
    each was predicted to take (`fetch_predicted_ms`, `compute_predicted_ms`) and how many tokens
    were declined as cheaper to compute."""

    prompt_tokens: Count = 0
    matched_tokens: Count = 0
    declined_tokens: Count = 0
    fetch_predicted_ms: Milliseconds = 0.0
    compute_predicted_ms: Milliseconds = 0.0
    cached_tokens: Count = 0
    host_tokens: Count = 0
    fetched_tokens: Count = 0
    computed_tokens: Count = 0
    queue_ms: Milliseconds = 0.0
    fetch_ms: Milliseconds = 0.0
    prefill_ms: Milliseconds = 0.0
    handoff_ms: Milliseconds = 0.0


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """New ids of one choice: `offset` is the index of the first of them among the choice's outputs.

    `text` may lag behind the ids (half characters, possible stop strings). `finish` is set on the
    choice's last delta; `stop` is the stop string or id that ended it, if one did. `stats` is set
    on the request's last delta, `prompt_logprobs` (one per prompt token from the second on) on the
    first of a request that asked for them. It can be in no cycle, so collections pass over it.
    """

    request: RequestId
    attempt: Count
    choice: Count
    offset: Count
    ids: tuple[TokenId, ...] = ()
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
    attempt: Count
    choices: tuple[Delta, ...]
    stats: RequestStats


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    request: RequestId
    attempt: Count
    error: ErrorRecord


ToNode = PrefillJob | RunJob | FirstTokens | NoFirstTokens | Abort | DrainNode | ResumeNode | Resync
ToRouter = Hello | Load | CacheEvents | Deltas | PrefillDone | JobFailed


def to_node_codec() -> Codec[ToNode]:
    return Codec(ToNode)


def to_router_codec() -> Codec[ToRouter]:
    return Codec(ToRouter)


UNREADABLE_ERROR = ErrorRecord(
    message="the node failed, and what it said of it cannot be read",
    code="unreadable_error",
    status=503,
    retryable=True,
)


def rescued(data: bytes) -> ToRouter | None:
    """What a frame that cannot be read says of requests, without the figures in it: a wrong figure
    costs no token. None where it says nothing of requests. Raise WireError where they cannot be
    read either."""
    try:
        version, record = msgspec.msgpack.decode(data, type=tuple[int, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"unreadable frame of {len(data)} bytes: {error}") from error
    record = _without_stats(record)
    match record.get("type"):
        case "deltas":
            pass
        case "prefill_done":
            record["stats"] = {}
        case "failed":
            record["error"] = UNREADABLE_ERROR
        case _:
            return None
    return to_router_codec().decode(msgspec.msgpack.encode((version, record)))


def _without_stats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_stats(each) for key, each in value.items() if key != "stats"}
    return [_without_stats(each) for each in value] if isinstance(value, list) else value
