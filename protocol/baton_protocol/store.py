"""Records kept in Redis by the KV exchange (keys are the KV store's business).

Marker       index: a chunk is completely stored, and where
InboxEntry   index: a prefill node tells a decode node which chunks exist
NodeReport   index, and a link's hello: who a node is, what it holds and how fast it is
FetchReport  index: how far a node that has no engine yet is with fetching its model
RouterReport index: what clients ask of one router, and how long they wait
"""

from __future__ import annotations

import hashlib
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
# What a node's last operations say: "down" when it cannot publish (index or every data instance
# away, full or too slow), "none" when it was given no store. A hand-off needs "up" on both sides.
StoreHealth = Literal["up", "down", "none"]


LEAST_SPEED = 1e-3  # what a node says is rounded to no less
MAX_ARTIFACTS = 256
MAX_INSTANCES = 1024
MAX_BOUNDS = 1024
FileName = Annotated[str, Meta(min_length=1, max_length=512)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_BOUNDS)]


class Priority(IntEnum):
    """Which transfers go first where they compete: a lower number."""

    HANDOFF = 0  # a client waits for its first tokens
    PREFIX = 1  # found by a lookup: it could be computed too
    BEHIND = 2  # write-behind: nobody waits


class Marker(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commit marker of one chunk. `instance` is the index of the data URL, `run_id` that server's
    run id when the chunk was written; another run id now means the bytes are gone. `stamp` is drawn
    anew for each put, so that who drops a marker found wrong never drops its successor.

    Written without its fields' names: half the bytes, and a lookup reads hundreds. So fields are
    only ever added at the end, with a default.
    """

    instance: int
    run_id: str
    payload_bytes: int
    shards: int
    depth: int
    stamp: int = 0


class InboxEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a prefill node tells a decode node about one request's chunks.

    kind "chunks": chunks [first, first + len(markers)) of the prompt exist. "end": no more will
    come.
    """

    request: RequestId
    attempt: int
    kind: Literal["chunks", "end"]
    first: int = 0
    markers: tuple[Marker, ...] = ()


class Speeds(msgspec.Struct, frozen=True):
    """Measured by the node itself: at start, then as moving averages. 0 means not measured."""

    prefill_tokens_per_s: PerSecond = 0.0
    decode_step_ms: Milliseconds = 0.0
    put_bytes_per_s: PerSecond = 0.0
    get_bytes_per_s: PerSecond = 0.0
    get_latency_ms: Milliseconds = 0.0  # of a get beside its bytes: a round trip

    def __post_init__(self) -> None:
        """Raise ValueError, as a decoder does too, for a speed whose inverse is absurd."""
        for name in self.__struct_fields__:
            if 0.0 < (value := getattr(self, name)) < LEAST_SPEED:
                raise ValueError(
                    f"{name} is {value}; 0 is not measured, else {LEAST_SPEED} or more"
                )


class DataInstance(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data server as a node sees it, in the order of the data URLs. 0 is not measured, or not
    bounded. `trouble`: why it cannot be asked now; `put_trouble`: why it takes no chunks now,
    though perhaps it can be read, as where it is full."""

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
    """What a node is doing now, and its counters since start (`*_total`). Sequences that are
    `parked` wait for chunks or their first token, those that are `waiting` for their turn."""

    waiting: Count = 0
    running: Count = 0
    parked: Count = 0
    queued_tokens: Count = 0  # prompt tokens known and not yet computed
    free_blocks: Count = 0  # cached ones included: they can be had
    cached_blocks: Count = 0  # free, but still holding a findable block
    total_blocks: Count = 0
    engine_steps_total: Count = 0
    preemptions_total: Count = 0
    prompt_tokens_total: Count = 0
    computed_prompt_tokens_total: Count = 0  # prompt tokens this node really computed
    cached_prompt_tokens_total: Count = 0  # found in its own cache
    host_prompt_tokens_total: Count = 0  # came from its host tier
    fetched_prompt_tokens_total: Count = 0  # came from the store
    generated_tokens_total: Count = 0
    published_bytes_total: Count = 0
    published_chunks_total: Count = 0
    announced_chunks_total: Count = 0  # existed already; announced without a put
    fetched_bytes_total: Count = 0
    fetched_chunks_total: Count = 0
    reused_chunks_total: Count = 0  # fetched chunks that a request then really used
    lost_chunks_total: Count = 0  # asked for and not there, or not what was asked for
    # Full blocks of prompts: asked for, found (own cache, or a marker), brought, and really used.
    # What was found and neither brought nor cached was cheaper to compute (`declined`).
    queried_blocks_total: Count = 0
    matched_blocks_total: Count = 0
    fetched_blocks_total: Count = 0
    used_blocks_total: Count = 0
    declined_blocks_total: Count = 0
    behind_chunks_total: Count = 0  # written behind: published without anybody waiting
    behind_bytes_total: Count = 0
    behind_skipped_total: Count = 0  # not written: no bandwidth left for it, or the store half full
    handoffs_total: Count = 0
    requests: Count = 0  # requests and prefill jobs whose last word was not sent yet
    # The host tier: what it holds and may hold, and blocks that went there, came back, were lost.
    host_blocks: Count = 0
    host_bytes: Count = 0
    host_total_blocks: Count = 0
    host_stored_blocks_total: Count = 0
    host_loaded_blocks_total: Count = 0
    host_evicted_blocks_total: Count = 0
    jobs_total: Count = 0  # jobs that its engine has heard of
    grammars_compiled_total: Count = 0
    grammar_hits_total: Count = 0  # requests whose grammar was compiled already
    grammar_compile_seconds_total: Seconds = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who a node is. `artifacts` maps a file name (tokenizer.json, ...) to the SHA-256 hex digest
    under which the node serves it at GET {address}/artifacts/{digest}. `reason` says why it
    drains, `replaced_by` the revision that takes its place for good, `protocol` which version it
    speaks, `max_num_seqs` how many sequences it computes at once (0: it did not say), `model_made`
    when its model's files were written, in Unix seconds (0: it has none)."""

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


class Kind(msgspec.Struct, frozen=True):
    """Nodes of one kind may be paired, and one may go on with what another began: they share KV and
    token ids, and `files`, a digest of all artifacts, says that a stream goes on and ends on one as
    on the other, up to rounding. EOS ids, sampling defaults, chat template and special tokens are
    in these files."""

    fingerprint: Fingerprint
    tokenizer: str
    files: str


def kind_of(report: NodeReport) -> Kind:
    named = msgspec.json.encode(report.artifacts, order="sorted")
    files = hashlib.sha256(named).hexdigest()
    return Kind(report.fingerprint, report.artifacts.get("tokenizer.json", ""), files)


def differing(one: NodeReport, other: NodeReport) -> list[str]:
    """What makes them two kinds: "fingerprint", and names of artifacts. Empty of one kind."""
    files, others = one.artifacts, other.artifacts
    names = [name for name in sorted({*files, *others}) if files.get(name) != others.get(name)]
    return ["fingerprint"] * (one.fingerprint != other.fingerprint) + names


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model on its way to a node. `total_bytes` is 0 until the hub has said how much it is."""

    node: Name
    source: Text
    done_bytes: Count
    total_bytes: Count


class RouterReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What clients ask of one router. `router` names one start of it: its counters (`*_total`)
    began at 0 then, `uptime_s` ago. A request counts once per prompt, when it is accepted.

    `ttft_counts` and `itl_counts` are how many first tokens, and later ones, came within each bound
    of LATENCY_BOUNDS_S and not within the one before; the last entry is those beyond all.
    """

    router: Text
    uptime_s: Seconds
    requests_total: Count = 0
    prompt_tokens_total: Count = 0
    uncached_tokens_total: Count = 0  # of them to be computed, as their first place predicted
    output_tokens_total: Count = 0
    live: Count = 0  # placed and not over
    held: Count = 0  # wait, since no node can take them
    idle_s: Seconds = 0.0  # since it last had a request that was not over
    ttft_counts: Counts = ()
    itl_counts: Counts = ()


LATENCY_BOUNDS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
