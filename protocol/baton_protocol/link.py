"""Frames of the WebSocket from router (client) to node (server).

    router -> node   PrefillJob  RunJob  FirstTokens  NoFirstTokens  Abort  DrainNode  ResumeNode
                     Resync  ResetPrefixCache  PinPrefix  UnpinPrefix
    node -> router   Hello (first frame)  Load  CacheEvents  Deltas  PrefillDone  JobFailed

Every frame about a request carries (request, attempt). The receiver drops frames of an attempt
older than the one it knows. Losing the link does not abort a request; only an Abort frame does. A
request belongs to the router that sent its job: a node ignores other routers' frames about it.

After a router reconnects to the same epoch, it sends each job of its requests on that node again:
the same attempt, with the outputs that the router has so far. A node that still has the request
continues it and sends the outputs that the router missed. A node that never got the job starts it.

A draining node reports the state "draining" in its Load and accepts no new jobs. After its drain
deadline its Load sets `leaving`: each router moves the requests that it can to other nodes and
aborts them here. Requests that cannot move continue here. A node that exits returns the requests
that are left with a JobFailed of code DRAINED.

A node closes the link when it gets a frame type that it does not know. So routers send DrainNode
and ResumeNode only to nodes whose report has a protocol version of at least DRAIN_SINCE,
ResetPrefixCache from RESET_SINCE on, PinPrefix and UnpinPrefix from PINS_SINCE on, and Resync only
to nodes that number their cache events. A router of version 1 ignores `leaving` and treats DRAINED
as any retryable error: it places the request again.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_protocol.errors import ErrorRecord
from baton_protocol.figures import Count, Hash, Milliseconds, Seconds, Text, TokenId
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import FinishReason
from baton_protocol.store import (
    MAX_PINS,
    Instances,
    NodeLoad,
    NodeReport,
    NodeState,
    PinId,
    Speeds,
    StoreHealth,
)
from baton_protocol.usage import TimeSpent
from baton_protocol.wire import Codec, WireError

LINK_PATH = "/link"
ARTIFACTS_PATH = "/artifacts/"
ROUTER_HEADER = "x-baton-router"
# A frame of this size or more closes the link. The largest frames list a node's cached chunks (18
# bytes each) or a prompt's log-probabilities (up to 12 MB).
MAX_FRAME_BYTES = 64 << 20
DRAIN_SINCE = 2
RESET_SINCE = 6
PINS_SINCE = 7
PinState = Literal["loading", "pinned", "refused", "released"]
DRAINED = "drained"
UNREADABLE_ERROR = ErrorRecord(
    message="the node reported an error that cannot be decoded",
    code="unreadable_error",
    status=503,
    retryable=True,
)


def link_headers(token: str, router: str = "") -> dict[str, str]:
    """Return the headers that a router sends to its nodes with each HTTP request.

    A node that was started with this link token requires it for its link and its artifacts.
    `router` is a secret that identifies one start of a router. Requests belong to the router that
    sends it: no other router can touch them, and they survive a broken link. Routers that send
    none, as up to version 3, share one identity.
    """
    headers = {ROUTER_HEADER: router} if router else {}
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def has_token(authorization: str, token: str) -> bool:
    """Return whether an Authorization header ("" if missing) holds the link token. `token` must not
    be empty. The comparison takes constant time."""
    expected = link_headers(token)["Authorization"].encode()
    # Compare bytes: compare_digest raises for text that is not ASCII, and a header can hold any.
    return hmac.compare_digest(authorization.encode(errors="surrogateescape"), expected)


def is_loopback(host: str) -> bool:
    """Return whether a host (a listening address or a client's address) is a loopback address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class PrefillJob(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt, publish its full chunks, announce them in the inbox of `decode_node`, and
    sample one token per choice. The node answers with PrefillDone or JobFailed.

    `uncached` is the number of prompt tokens that the router expects this node to compute and has
    added to the node's predicted load. None, from a router that does not send it, means all.
    """

    request: Request
    decode_node: NodeId
    decode_epoch: Epoch
    uncached: int | None = None


class RunJob(msgspec.Struct, frozen=True, tag="run"):
    """Run the request to its end.

    With `await_first` a prefill node computes the prompt: fetch the chunks that inbox entries
    announce, and generate only after FirstTokens or NoFirstTokens of this attempt. Do not run the
    choices in `finished`: they have ended. `uncached` is as in PrefillJob; with `await_first` those
    tokens count as load of the prefill node.
    """

    request: Request
    await_first: bool = False
    finished: tuple[int, ...] = ()
    uncached: int | None = None


class FirstTokens(msgspec.Struct, frozen=True, tag="first"):
    """The token ids that the prefill node sampled. `outputs[c]` holds all ids of choice c so far.
    Do not run the choices in `finished`: they ended with these tokens."""

    request: RequestId
    attempt: int
    outputs: tuple[tuple[int, ...], ...]
    finished: tuple[int, ...] = ()


class NoFirstTokens(msgspec.Struct, frozen=True, tag="no_first"):
    """The prefill job was lost or refused: compute the rest of the prompt and sample the first
    token on this node."""

    request: RequestId
    attempt: int
    reason: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End the request without an answer."""

    request: RequestId
    attempt: int


class DrainNode(msgspec.Struct, frozen=True, tag="drain"):
    """Accept no new jobs. Running requests may finish here for `deadline_s` seconds; None means as
    long as after SIGTERM.

    Idempotent: an equal frame changes nothing. A different one starts a new deadline. `replaced_by`
    is the revision whose roll-out replaces this node for good; "" if none does.
    """

    deadline_s: float | None = None
    reason: str = ""
    replaced_by: str = ""


class ResumeNode(msgspec.Struct, frozen=True, tag="undrain"):
    """Accept jobs again. A node that is shutting down ignores this."""


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """The router missed cache events: list all cached chunks again, as after Hello."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Forget all cached KV: requests whose jobs come later find none of it on this node."""


class PinPrefix(msgspec.Struct, frozen=True, tag="pin"):
    """Compute this prefix, unless its KV is cached or in the store, and keep its full blocks in the
    node's cache for `ttl_s` seconds. Put its full chunks into the store, to stay there as long.

    Idempotent. The end `until`, in Unix seconds by the router's clock, tells versions of a pin
    apart: another one replaces this end. The node reports the pin in its Load until it ends. A
    reset of the prefix cache, a sleep and the end of the engine forget it.
    """

    id: PinId
    prompt_ids: tuple[TokenId, ...]
    ttl_s: Seconds
    until: Count
    salt: str = ""


class UnpinPrefix(msgspec.Struct, frozen=True, tag="unpin"):
    """Let the blocks of a pinned prefix be evicted. Its chunks stay in the store until they
    expire."""

    id: PinId


class PinReport(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that routers want a node to keep.

    "loading": it is fetched, computed or put into the store. "pinned": it is in the cache, and in
    the store if the node has one. "refused": the node cannot keep it. "released": a request needed
    its blocks. The last two say why; the node forgets such a pin soon, so that routers ask again.
    """

    id: PinId
    until: Count
    state: PinState
    reason: Text = ""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The node's first frame on a link."""

    report: NodeReport


class Load(msgspec.Struct, frozen=True, tag="load"):
    """A node's current state and load.

    `reason` says why the node drains and `replaced_by` which revision replaces it, both as in
    DrainNode. `leaving` asks routers to move their running requests to other nodes. A node that is
    `asleep` drains, and its engine has given its memory back. One that `wakes` is asleep, or about
    to be, only until a router needs it, which then asks it to wake up. `pins` are its pinned
    prefixes.
    """

    epoch: Epoch
    state: NodeState
    speeds: Speeds
    load: NodeLoad
    store: StoreHealth = "up"
    instances: Instances = ()
    reason: Text = ""
    leaving: bool = False
    replaced_by: Text = ""
    asleep: bool = False
    wakes: bool = False
    pins: Annotated[tuple[PinReport, ...], Meta(max_length=MAX_PINS)] = ()


class CacheEvents(msgspec.Struct, frozen=True, tag="cache"):
    """Chunks (by hash) that entered or left this node's own cache since its last CacheEvents frame.

    The first frame after Hello lists all cached chunks and has `reset` set. `seq` numbers the
    node's frames: each has its predecessor's number plus 1, and a listing has the number of the
    last frame that it includes. 0 without `reset` comes from a node that does not number its
    frames.
    """

    epoch: Epoch
    stored: tuple[Hash, ...] = ()
    evicted: tuple[Hash, ...] = ()
    reset: bool = False
    seq: Count = 0


class RequestStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a node got the KV of one request's prompt, and how long each phase took.

    Tokens are prompt tokens. `matched_tokens` were in the node's cache or had a marker in the
    store; `host_tokens` came from its host memory tier.

    Until the prompt is computed, a node waits for the first token of its prefill node
    (`handoff_ms`), fetches (`fetch_ms`), computes (`prefill_ms`), or does none of these
    (`queue_ms`). A fetch while the prefill node computes counts as `fetch_ms` only, so the four add
    up to the time since the job arrived.

    The node decides for the chunks in the store whether to fetch or to compute them. The predicted
    times of its last decision are `fetch_predicted_ms` and `compute_predicted_ms`; it did not fetch
    `declined_tokens` because computing them was cheaper.

    The node computed `drafted_tokens` guesses of the answer's next tokens. `accepted_drafts` of
    them were right, of which a grammar had allowed no other than `forced_drafts`.

    `spent` is the time of the node's steps that belongs to the request: a step computes tokens of
    many requests, which share its time.
    """

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
    drafted_tokens: Count = 0
    accepted_drafts: Count = 0
    forced_drafts: Count = 0
    spent: TimeSpent = TimeSpent()


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """New token ids of one choice. `offset` is the index of `ids[0]` among the choice's outputs.

    `text` can lag behind the ids: it holds back incomplete characters and possible stop strings.
    `finish` is set on the choice's last delta; `stop` is the stop string or id that ended the
    choice, if one did. `stats` is set on the request's last delta. `prompt_logprobs` (one per
    prompt token, from the second on) is set on the first delta of a request that asks for them.
    `vector` answers a pooling request, in its only delta: float32 numbers, little-endian.

    gc=False: a Delta cannot be part of a reference cycle, so the garbage collector skips it.
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
    vector: bytes = b""


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """The deltas of all requests in one engine step."""

    items: tuple[Delta, ...]


class PrefillDone(msgspec.Struct, frozen=True, tag="prefill_done"):
    """The first token of each choice of a prefill job, in choice order; with beam search none, as
    the decode node begins the search.

    The node sends it as soon as the tokens are sampled. The last chunks may still be in flight:
    they are complete when the decode node's inbox has an entry of kind "end".
    """

    request: RequestId
    attempt: Count
    choices: tuple[Delta, ...]
    stats: RequestStats


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The node refused the job, or failed to run it."""

    request: RequestId
    attempt: Count
    error: ErrorRecord


ToNode = (
    PrefillJob
    | RunJob
    | FirstTokens
    | NoFirstTokens
    | Abort
    | DrainNode
    | ResumeNode
    | Resync
    | ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
)
ToRouter = Hello | Load | CacheEvents | Deltas | PrefillDone | JobFailed


def to_node_codec() -> Codec[ToNode]:
    return Codec(ToNode)


def to_router_codec() -> Codec[ToRouter]:
    return Codec(ToRouter)


def rescued(data: bytes) -> ToRouter | None:
    """Decode a frame that failed to decode, leaving out its statistics.

    A wrong statistic then costs no token. Return None if the frame is not about requests. Raise
    WireError if the frame cannot be decoded without its statistics either.
    """
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
        return {key: _without_stats(item) for key, item in value.items() if key != "stats"}
    return [_without_stats(item) for item in value] if isinstance(value, list) else value
