"""Records that the KV store keeps in Redis. `baton_kvstore.keys` defines their keys.

Marker       index: a chunk is completely stored, and where
InboxEntry   index: tells a decode node which chunks of a request exist
NodeReport   index, and Hello frames: a node's identity, state, load and speeds
FetchReport  index: the progress of a node that still downloads its model
RouterReport index: one router's request counts and latencies
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from baton_protocol.figures import (
    Count,
    Digest,
    Milliseconds,
    Name,
    PerSecond,
    Seconds,
    Text,
    Tokens,
    Url,
)
from baton_protocol.ids import Epoch, Fingerprint, RequestId
from baton_protocol.layout import KVLayout

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
NodeState = Literal["starting", "ready", "draining"]
# The store as a node's last operations found it. "down": the node cannot publish, since the index
# or every data instance is unreachable, full or too slow. "none": the node has no store configured.
# A hand-off needs "up" on both nodes.
StoreHealth = Literal["up", "down", "none"]
# "bitwise": the bits of a token's logits depend only on the tokens before it. "numeric": they also
# depend on the batch, so logits are equal up to rounding.
Exact = Literal["bitwise", "numeric"]


LEAST_SPEED = 1e-3  # the lowest measured speed that a report may hold
MAX_ARTIFACTS = 256
MAX_INSTANCES = 1024
MAX_BOUNDS = 1024
FileName = Annotated[str, Meta(min_length=1, max_length=512)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_BOUNDS)]


class Priority(IntEnum):
    """Priority of a transfer. Lower numbers go first."""

    HANDOFF = 0  # a client waits for its first token
    PREFIX = 1  # a lookup found the chunk; computing it is an alternative
    BEHIND = 2  # write-behind: no request waits


class Marker(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commit marker of one chunk: all its shards are stored.

    `instance` is the index of the data URL. `run_id` is that server's run id when the chunk was
    written; if the server has another run id now, it restarted and the bytes are gone.
    `payload_bytes` counts all `shards`; `depth` is the chunk's index in its chain. `stamp` is a new
    random number for each put: it keeps a reader that drops a wrong marker from dropping a newer
    one.

    Encoded without field names, which halves the size: one lookup reads hundreds of markers. So add
    fields only at the end, with a default.
    """

    instance: int
    run_id: str
    payload_bytes: int
    shards: int
    depth: int
    stamp: int = 0


class InboxEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from a prefill node to a decode node about the chunks of one request.

    kind "chunks": chunks [first, first + len(markers)) of the prompt are stored. kind "end": no
    more entries follow.
    """

    request: RequestId
    attempt: int
    kind: Literal["chunks", "end"]
    first: int = 0
    markers: tuple[Marker, ...] = ()


class Speeds(msgspec.Struct, frozen=True):
    """Speeds that a node measures: at start, then as moving averages. 0 means not measured."""

    prefill_tokens_per_s: PerSecond = 0.0
    decode_step_ms: Milliseconds = 0.0
    put_bytes_per_s: PerSecond = 0.0
    get_bytes_per_s: PerSecond = 0.0
    get_latency_ms: Milliseconds = 0.0  # time of a get without its bytes: one round trip

    def __post_init__(self) -> None:
        """Raise ValueError (in a decoder: ValidationError) for a speed whose inverse is absurd."""
        for name in self.__struct_fields__:
            if 0.0 < (value := getattr(self, name)) < LEAST_SPEED:
                raise ValueError(
                    f"{name} is {value}; it must be 0 (not measured) or at least {LEAST_SPEED}"
                )


class DataInstance(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data server as a node sees it. Records are in the order of the data URLs.

    0 means not measured, or for `limit_bytes` no limit. `trouble` is why the node sends it no
    operations now, `put_trouble` why it sends no puts; "" if it does. A full server has only
    `put_trouble`: gets still work.
    """

    used_bytes: Count = 0
    limit_bytes: Count = 0
    evicted_keys: Count = 0  # since that server's start
    put_bytes_per_s: PerSecond = 0.0
    get_bytes_per_s: PerSecond = 0.0
    get_latency_ms: Milliseconds = 0.0
    trouble: Text = ""
    put_trouble: Text = ""


Instances = Annotated[tuple[DataInstance, ...], Meta(max_length=MAX_INSTANCES)]


class NodeLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's current load, and its counters since start (`*_total`).

    `parked` sequences wait for chunks from the store or for the prefill node's first token;
    `waiting` sequences wait until the scheduler runs them.
    """

    waiting: Count = 0
    running: Count = 0
    parked: Count = 0
    queued_tokens: Count = 0  # prompt tokens that this node still has to compute
    free_blocks: Count = 0  # including cached_blocks, which can be evicted
    cached_blocks: Count = 0  # free blocks that the prefix cache still finds
    total_blocks: Count = 0
    engine_steps_total: Count = 0
    preemptions_total: Count = 0
    prompt_tokens_total: Count = 0
    computed_prompt_tokens_total: Count = 0  # computed by this node
    cached_prompt_tokens_total: Count = 0  # found in this node's cache
    host_prompt_tokens_total: Count = 0  # loaded from its host memory tier
    fetched_prompt_tokens_total: Count = 0  # fetched from the store
    generated_tokens_total: Count = 0
    grammar_dead_ends_total: Count = 0  # requests that failed within their grammar
    published_bytes_total: Count = 0
    published_chunks_total: Count = 0
    announced_chunks_total: Count = 0  # already in the store; announced without a put
    fetched_bytes_total: Count = 0
    fetched_chunks_total: Count = 0
    reused_chunks_total: Count = 0  # fetched chunks with which a request started to run
    lost_chunks_total: Count = 0  # fetches that failed: missing, corrupt, or the store is down
    # Full blocks of prompts: looked up; found in the own cache or with a marker; fetched; used by
    # their request; and `declined`: found in the store, but computing them was cheaper.
    queried_blocks_total: Count = 0
    matched_blocks_total: Count = 0
    fetched_blocks_total: Count = 0
    used_blocks_total: Count = 0
    declined_blocks_total: Count = 0
    behind_chunks_total: Count = 0  # stored by write-behind, for which no request waits
    behind_bytes_total: Count = 0
    behind_skipped_total: Count = 0  # not stored: no bandwidth, blocks held, or store half full
    handoffs_total: Count = 0  # requests continued from a prefill node
    requests: Count = 0  # requests and prefill jobs whose last frame was not sent yet
    # The host memory tier: current size and capacity, then blocks stored, loaded back and evicted.
    host_blocks: Count = 0
    host_bytes: Count = 0
    host_total_blocks: Count = 0
    host_stored_blocks_total: Count = 0
    host_loaded_blocks_total: Count = 0
    host_evicted_blocks_total: Count = 0
    jobs_total: Count = 0  # jobs that its engine process received
    grammars_compiled_total: Count = 0
    grammar_hits_total: Count = 0  # requests whose grammar was already compiled
    grammar_compile_seconds_total: Seconds = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's identity, state, load and speeds.

    `artifacts` maps a file name (tokenizer.json, ...) to the SHA-256 hex digest under which the
    node serves it at GET {address}/artifacts/{digest}. `reason` is why the node drains, and
    `replaced_by` the revision that replaces it for good; both are "" if unset. `protocol` is the
    node's PROTOCOL_VERSION. `max_num_seqs` is how many sequences it computes at once (0: unknown).
    `model_made` is when its model's files were written, in Unix seconds (0: it has no files).
    `exact` is that of its engine; a node that does not report it counts as "numeric".
    """

    node: Name
    role: Role
    address: Url
    pid: Count
    epoch: Annotated[Epoch, Meta(max_length=128)]
    state: NodeState
    fingerprint: Annotated[Fingerprint, Meta(max_length=128)]
    layout: KVLayout
    model: Text
    engine: Text
    max_model_len: Tokens
    vocab_size: Tokens
    artifacts: Annotated[dict[FileName, Digest], Meta(max_length=MAX_ARTIFACTS)]
    revision: Text = ""
    speeds: Speeds = Speeds()
    load: NodeLoad = NodeLoad()
    store: StoreHealth = "up"
    instances: Instances = ()
    reason: Text = ""
    protocol: Count = 1
    replaced_by: Text = ""
    max_num_seqs: Count = 0
    model_made: Count = 0
    exact: Exact = "numeric"


def exact_together(nodes: Iterable[Exact]) -> Exact:
    """How exact nodes are together: "bitwise" only if each of them is."""
    return "bitwise" if all(each == "bitwise" for each in nodes) else "numeric"


class Kind(msgspec.Struct, frozen=True):
    """What nodes must have in common to be paired, or to continue each other's requests.

    Equal `fingerprint` and `tokenizer` mean that KV and token ids are interchangeable. Equal
    `files`, a digest of all artifacts, means that a stream continues and ends on another node as it
    would have on the first, up to rounding: the artifacts hold EOS ids, sampling defaults, chat
    template and special tokens.
    """

    fingerprint: Fingerprint
    tokenizer: str
    files: str


def kind_of(report: NodeReport) -> Kind:
    artifacts = msgspec.json.encode(report.artifacts, order="sorted")
    files = hashlib.sha256(artifacts).hexdigest()
    return Kind(report.fingerprint, report.artifacts.get("tokenizer.json", ""), files)


def differing(first: NodeReport, second: NodeReport) -> list[str]:
    """Return what makes two nodes differ in Kind: "fingerprint" and names of artifacts. Empty if
    they are of one Kind."""
    first_files, second_files = first.artifacts, second.artifacts
    names = [
        name
        for name in sorted({*first_files, *second_files})
        if first_files.get(name) != second_files.get(name)
    ]
    return ["fingerprint"] * (first.fingerprint != second.fingerprint) + names


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a node's model download. `total_bytes` is 0 until the hub has reported it."""

    node: Name
    source: Text
    done_bytes: Count
    total_bytes: Count


class RouterReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One router's request counts and latencies.

    `router` identifies one start of a router: its counters (`*_total`) were 0 then, `uptime_s` ago.
    A request counts once per prompt, when the router accepts it.

    `ttft_counts` and `itl_counts` are histograms of time to first token and inter-token latency.
    Entry i counts latencies up to LATENCY_BOUNDS_S[i] and above the bound before it; the last entry
    counts those above all bounds.
    """

    router: Text
    uptime_s: Seconds
    requests_total: Count = 0
    prompt_tokens_total: Count = 0
    uncached_tokens_total: Count = 0  # prompt tokens to compute, as predicted at first placement
    output_tokens_total: Count = 0
    live: Count = 0  # placed requests that have not ended
    held: Count = 0  # requests that wait because no node can take them
    idle_s: Seconds = 0.0  # time since the router last had an unfinished request
    ttft_counts: Counts = ()
    itl_counts: Counts = ()


LATENCY_BOUNDS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
