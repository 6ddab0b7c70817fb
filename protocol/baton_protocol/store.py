"""Records that the KV store keeps in Redis. `baton_kvstore.keys` defines their keys.

Marker       index: a chunk is completely stored, and where
InboxEntry   index: tells a decode node which chunks of a request exist
NodeReport   index, and Hello frames: a node's identity, state, load and speeds
FetchReport  index: the progress of a node that still downloads its model
RouterReport index: one router's request counts and latencies
PinnedPrefix index: a prefix that nodes are to keep
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
    TokenId,
    Tokens,
    Url,
)
from baton_protocol.ids import Epoch, Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.metrics import MetricSpec
from baton_protocol.pooling import Pooling
from baton_protocol.sampling import MAX_LOGPROBS

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
MAX_PINS = 64  # pinned prefixes of a pool
# Upper bounds of the latency histograms in a RouterReport.
LATENCY_BOUNDS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
PinId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
FileName = Annotated[str, Meta(min_length=1, max_length=512)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_BOUNDS)]
DRAFTED_AT = ("baton_drafted_at_position_total", "Drafts, by their position in a row of drafts.")
ACCEPTED_AT = (
    "baton_accepted_at_position_total",
    "Drafts that were the next tokens, by their position in a row of drafts.",
)


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
    one. If `kept_until` is later than the chunk's own lifetime, in Unix seconds, value and marker
    stay until then: a pinned prefix has the chunk.

    Encoded without field names, which halves the size: one lookup reads hundreds of markers. So add
    fields only at the end, with a default.
    """

    instance: int
    run_id: str
    payload_bytes: int
    shards: int
    depth: int
    stamp: int = 0
    kept_until: int = 0


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

    prefill_tokens_per_s: Annotated[
        PerSecond, MetricSpec("baton_prefill_tokens_per_second", "Measured prefill speed.")
    ] = 0.0
    decode_step_ms: Annotated[
        Milliseconds,
        MetricSpec("baton_decode_step_milliseconds", "Measured time of a decode step."),
    ] = 0.0
    put_bytes_per_s: Annotated[
        PerSecond,
        MetricSpec(
            "baton_kv_put_bytes_per_second", "Measured put rate, all data servers together."
        ),
    ] = 0.0
    get_bytes_per_s: Annotated[
        PerSecond,
        MetricSpec(
            "baton_kv_get_bytes_per_second", "Measured get rate, all data servers together."
        ),
    ] = 0.0
    get_latency_ms: Annotated[
        Milliseconds,
        MetricSpec(
            "baton_kv_get_latency_milliseconds",
            "Measured round trip of a get, of the slowest data server.",
        ),
    ] = 0.0

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

    used_bytes: Annotated[
        Count, MetricSpec("baton_store_used_bytes", "Memory that the data server uses.")
    ] = 0
    limit_bytes: Annotated[
        Count,
        MetricSpec("baton_store_limit_bytes", "Memory that the data server may use; 0: no limit."),
    ] = 0
    evicted_keys: Annotated[
        Count,
        MetricSpec(
            "baton_store_evicted_keys_total", "Keys that the data server evicted since its start."
        ),
    ] = 0
    put_bytes_per_s: Annotated[
        PerSecond,
        MetricSpec(
            "baton_store_put_bytes_per_second",
            "Measured put rate of this node into the data server.",
        ),
    ] = 0.0
    get_bytes_per_s: Annotated[
        PerSecond,
        MetricSpec(
            "baton_store_get_bytes_per_second",
            "Measured get rate of this node from the data server.",
        ),
    ] = 0.0
    get_latency_ms: Annotated[
        Milliseconds,
        MetricSpec(
            "baton_store_get_latency_milliseconds",
            "Measured round trip of a get from the data server.",
        ),
    ] = 0.0
    trouble: Text = ""
    put_trouble: Text = ""


Instances = Annotated[tuple[DataInstance, ...], Meta(max_length=MAX_INSTANCES)]


class NodeLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's current load, and its counters since start (`*_total`).

    Each field is declared with its metric: its name on the pages of the node and of the router, and
    the help text, which says what the field counts.
    """

    waiting: Annotated[
        Count,
        MetricSpec("baton_requests_waiting", "Sequences that wait until the scheduler runs them."),
    ] = 0
    running: Annotated[
        Count, MetricSpec("baton_requests_running", "Sequences in the running batch.")
    ] = 0
    parked: Annotated[
        Count,
        MetricSpec(
            "baton_requests_parked", "Sequences that wait for chunks or for their first token."
        ),
    ] = 0
    queued_tokens: Annotated[
        Count,
        MetricSpec("baton_queued_tokens", "Prompt tokens that the node still has to compute."),
    ] = 0
    # Including cached_blocks, which can be evicted.
    free_blocks: Annotated[
        Count,
        MetricSpec(
            "baton_kv_blocks_free", "KV blocks that can be allocated, including cached ones."
        ),
    ] = 0
    cached_blocks: Annotated[
        Count,
        MetricSpec("baton_kv_blocks_cached", "Free KV blocks that the prefix cache still finds."),
    ] = 0
    total_blocks: Annotated[Count, MetricSpec("baton_kv_blocks", "KV blocks of the node.")] = 0
    pinned_blocks: Annotated[
        Count,
        MetricSpec(
            "baton_kv_blocks_pinned", "KV blocks of pinned prefixes, which are not evicted."
        ),
    ] = 0
    engine_steps_total: Annotated[
        Count, MetricSpec("baton_engine_steps_total", "Steps of the engine.")
    ] = 0
    preemptions_total: Annotated[
        Count, MetricSpec("baton_preemptions_total", "Sequences that lost their blocks to others.")
    ] = 0
    prompt_tokens_total: Annotated[
        Count, MetricSpec("baton_prompt_tokens_total", "Prompt tokens, from every source.")
    ] = 0
    computed_prompt_tokens_total: Annotated[
        Count,
        MetricSpec("baton_prompt_tokens_computed_total", "Prompt tokens that this node computed."),
    ] = 0
    cached_prompt_tokens_total: Annotated[
        Count,
        MetricSpec("baton_prompt_tokens_cached_total", "Prompt tokens found in the node's cache."),
    ] = 0
    host_prompt_tokens_total: Annotated[
        Count,
        MetricSpec("baton_prompt_tokens_host_total", "Prompt tokens loaded from the host tier."),
    ] = 0
    fetched_prompt_tokens_total: Annotated[
        Count,
        MetricSpec("baton_prompt_tokens_fetched_total", "Prompt tokens fetched from the store."),
    ] = 0
    generated_tokens_total: Annotated[
        Count, MetricSpec("baton_generated_tokens_total", "Tokens sampled.")
    ] = 0
    drafted_tokens_total: Annotated[
        Count,
        MetricSpec("baton_drafted_tokens_total", "Drafts of next tokens that steps computed."),
    ] = 0
    accepted_drafts_total: Annotated[
        Count, MetricSpec("baton_accepted_drafts_total", "Drafts that were the next tokens.")
    ] = 0
    drafted_rows_total: Annotated[
        Count,
        MetricSpec(
            "baton_drafted_rows_total",
            "Sequences of steps that had drafts: each got a token, and one more per right draft.",
        ),
    ] = 0
    drafted_at_1_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "1"),))] = 0
    accepted_at_1_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "1"),))] = 0
    drafted_at_2_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "2"),))] = 0
    accepted_at_2_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "2"),))] = 0
    drafted_at_3_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "3"),))] = 0
    accepted_at_3_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "3"),))] = 0
    drafted_at_4_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "4"),))] = 0
    accepted_at_4_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "4"),))] = 0
    drafted_at_5_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "5-8"),))] = 0
    accepted_at_5_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "5-8"),))] = 0
    drafted_at_9_total: Annotated[Count, MetricSpec(*DRAFTED_AT, (("position", "9-"),))] = 0
    accepted_at_9_total: Annotated[Count, MetricSpec(*ACCEPTED_AT, (("position", "9-"),))] = 0
    draft_seconds_won_total: Annotated[
        Seconds,
        MetricSpec(
            "baton_draft_seconds_won_total", "Estimated time that steps with drafts have saved."
        ),
    ] = 0.0
    draft_seconds_lost_total: Annotated[
        Seconds,
        MetricSpec(
            "baton_draft_seconds_lost_total",
            "Estimated time of steps whose drafts took longer than they saved.",
        ),
    ] = 0.0
    grammar_dead_ends_total: Annotated[
        Count,
        MetricSpec(
            "baton_grammar_dead_ends_total",
            "Requests that failed because their grammar allowed no further token.",
        ),
    ] = 0
    published_bytes_total: Annotated[
        Count, MetricSpec("baton_kv_published_bytes_total", "KV bytes put into the store.")
    ] = 0
    published_chunks_total: Annotated[
        Count, MetricSpec("baton_kv_published_chunks_total", "Chunks put into the store.")
    ] = 0
    announced_chunks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_announced_chunks_total",
            "Chunks already in the store, announced without a put.",
        ),
    ] = 0
    fetched_bytes_total: Annotated[
        Count, MetricSpec("baton_kv_fetched_bytes_total", "KV bytes fetched from the store.")
    ] = 0
    fetched_chunks_total: Annotated[
        Count, MetricSpec("baton_kv_fetched_chunks_total", "Chunks fetched from the store.")
    ] = 0
    reused_chunks_total: Annotated[
        Count, MetricSpec("baton_kv_chunks_reused_total", "Fetched chunks that a request used.")
    ] = 0
    lost_chunks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_chunks_lost_total",
            "Fetches that failed: the chunk was missing or damaged, or the store was down.",
        ),
    ] = 0
    queried_blocks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_blocks_queried_total",
            "Full blocks of prompts, each looked up once per request.",
        ),
    ] = 0
    matched_blocks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_blocks_matched_total",
            "Queried blocks found in the node's cache or in the store.",
        ),
    ] = 0
    fetched_blocks_total: Annotated[
        Count, MetricSpec("baton_kv_blocks_fetched_total", "Matched blocks fetched from the store.")
    ] = 0
    used_blocks_total: Annotated[
        Count, MetricSpec("baton_kv_blocks_used_total", "Matched blocks that their request used.")
    ] = 0
    declined_blocks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_blocks_declined_total",
            "Matched blocks left in the store: computing them was predicted to be faster.",
        ),
    ] = 0
    behind_chunks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_behind_chunks_total",
            "Chunks stored by write-behind, for which no request waits.",
        ),
    ] = 0
    behind_bytes_total: Annotated[
        Count, MetricSpec("baton_kv_behind_bytes_total", "KV bytes stored by write-behind.")
    ] = 0
    # Not stored: no bandwidth, blocks held, or store half full.
    behind_skipped_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_behind_skipped_total",
            "Chunks that write-behind skipped: no bandwidth, or the store is over half full.",
        ),
    ] = 0
    handoffs_total: Annotated[
        Count, MetricSpec("baton_handoffs_total", "Requests continued from a prefill node.")
    ] = 0
    # Requests and prefill jobs whose last frame was not sent yet.
    requests: Annotated[
        Count, MetricSpec("baton_requests", "Requests and prefill jobs that have not ended.")
    ] = 0
    host_blocks: Annotated[
        Count, MetricSpec("baton_kv_host_blocks_held", "KV blocks in the host tier.")
    ] = 0
    host_bytes: Annotated[
        Count, MetricSpec("baton_kv_host_bytes_held", "KV bytes in the host tier.")
    ] = 0
    host_total_blocks: Annotated[
        Count,
        MetricSpec(
            "baton_kv_host_blocks", "Capacity of the host tier in KV blocks; 0: the node has none."
        ),
    ] = 0
    host_stored_blocks_total: Annotated[
        Count,
        MetricSpec(
            "baton_kv_host_blocks_stored_total", "Blocks that the cache evicted into the host tier."
        ),
    ] = 0
    host_loaded_blocks_total: Annotated[
        Count,
        MetricSpec("baton_kv_host_blocks_loaded_total", "Blocks loaded back from the host tier."),
    ] = 0
    host_evicted_blocks_total: Annotated[
        Count,
        MetricSpec("baton_kv_host_blocks_evicted_total", "Blocks that the host tier evicted."),
    ] = 0
    jobs_total: Annotated[
        Count, MetricSpec("baton_jobs_total", "Jobs of routers that the engine process received.")
    ] = 0
    grammars_compiled_total: Annotated[
        Count, MetricSpec("baton_grammars_compiled_total", "Grammars compiled.")
    ] = 0
    grammar_hits_total: Annotated[
        Count,
        MetricSpec("baton_grammar_hits_total", "Requests whose grammar was already compiled."),
    ] = 0
    grammar_compile_seconds_total: Annotated[
        Seconds, MetricSpec("baton_grammar_compile_seconds_total", "Time spent compiling grammars.")
    ] = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's identity, state, load and speeds.

    `artifacts` maps a file name (tokenizer.json, ...) to the SHA-256 hex digest under which the
    node serves it at GET {address}/artifacts/{digest}. `reason` is why the node drains, and
    `replaced_by` the revision that replaces it for good; both are "" if unset. `protocol` is the
    node's PROTOCOL_VERSION. `max_num_seqs` is how many sequences it computes at once (0: unknown).
    `model_made` is when its model's files were written, in Unix seconds (0: it has no files).
    `exact` is that of its engine; a node that does not report it counts as "numeric". `weights` is
    the dtype of its weights, or how they are quantized ("": unknown or none). `max_logprobs` is how
    many likely tokens a request may ask for at a position. A node that is `asleep` drains, and its
    engine has given its memory back. One that `wakes` is asleep, or about to be, until a router
    needs it. `pooling` is what its model answers with if it generates no tokens.
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
    weights: Text = ""
    max_logprobs: Count = MAX_LOGPROBS
    asleep: bool = False
    wakes: bool = False
    pooling: Pooling = ""

    @property
    def serves(self) -> bool:
        """Whether the node takes requests, now or as soon as it has woken up for one."""
        return self.state == "ready" or self.wakes

    @property
    def drains(self) -> bool:
        """Whether the node takes no requests, for good or until its drain is ended."""
        return self.state == "draining" and not self.wakes


def exact_together(nodes: Iterable[Exact]) -> Exact:
    """How exact nodes are together: "bitwise" only if each of them is."""
    return "bitwise" if all(each == "bitwise" for each in nodes) else "numeric"


class Kind(msgspec.Struct, frozen=True):
    """What nodes must have in common to be paired, or to continue each other's requests.

    Equal `fingerprint` and `tokenizer` mean that KV and token ids are interchangeable. Equal
    `files`, a digest of all artifacts, means that a stream continues and ends on another node as it
    would have on the first, up to rounding: the artifacts hold EOS ids, sampling defaults, chat
    template and special tokens. `pooling` is what they answer with if they generate no tokens.
    """

    fingerprint: Fingerprint
    tokenizer: str
    files: str
    pooling: Pooling = ""


def kind_of(report: NodeReport) -> Kind:
    artifacts = msgspec.json.encode(report.artifacts, order="sorted")
    files = hashlib.sha256(artifacts).hexdigest()
    tokenizer = report.artifacts.get("tokenizer.json", "")
    return Kind(report.fingerprint, tokenizer, files, report.pooling)


def differing(first: NodeReport, second: NodeReport) -> list[str]:
    """Return what makes two nodes differ in Kind: "fingerprint", of its parts the "weights"' format
    and the "layout" of KV, names of artifacts, and "pooling". Empty if they are of one Kind."""
    first_files, second_files = first.artifacts, second.artifacts
    names = [
        name
        for name in sorted({*first_files, *second_files})
        if first_files.get(name) != second_files.get(name)
    ]
    names += ["pooling"] * (first.pooling != second.pooling)
    if first.fingerprint == second.fingerprint:
        return names
    weights = ["weights"] * (first.weights != second.weights)
    return ["fingerprint", *weights, *["layout"] * (first.layout != second.layout), *names]


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prefix that nodes with this tokenizer (the digest of its file) are to keep until `until`,
    in Unix seconds: see PinPrefix. `id` follows from model, tenant and tokens. `tenant` is whose
    requests find it; "" if tenants share KV, or if there are none. Of two records of one id, the
    one with the later `changed` (Unix milliseconds) is valid. One that is `removed` has no tokens:
    it tells other routers."""

    id: PinId
    model: Text
    tokenizer: Text
    tenant: Text = ""
    prompt_ids: tuple[TokenId, ...] = ()
    until: Count
    changed: Count
    removed: bool = False


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a node's model download. `total_bytes` is 0 until the hub has reported it."""

    node: Name
    source: Text
    done_bytes: Count
    total_bytes: Count


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of both roles that the planner decided on at `at_ms` (Unix milliseconds), and why:
    the reason's name, and a sentence."""

    at_ms: Count
    prefill: Count
    decode: Count
    reason: Text
    message: Text = ""


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
