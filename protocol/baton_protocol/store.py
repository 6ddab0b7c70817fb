"""Records kept in Redis by the KV exchange (keys are the KV store's business).

Marker       index: a chunk is completely stored, and where
InboxEntry   index: a prefill node tells a decode node which chunks exist
NodeReport   index, and a link's hello: who a node is, what it holds and how fast it is
FetchReport  index: how far a node that has no engine yet is with fetching its model
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_protocol.ids import Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.layout import KVLayout

Role = Literal["prefill", "decode"]
NodeState = Literal["starting", "ready", "draining"]
# What a node's last operations say: "down" when it cannot publish (index or every data instance
# away, full or too slow), "none" when it was given no store. A hand-off needs "up" on both sides.
StoreHealth = Literal["up", "down", "none"]


class Marker(msgspec.Struct, frozen=True):
    """Commit marker of one chunk. `instance` is the index of the data URL, `run_id` that server's
    run id when the chunk was written; another run id now means the bytes are gone."""

    instance: int
    run_id: str
    payload_bytes: int
    shards: int
    depth: int


class InboxEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a prefill node tells a decode node about one request's chunks.

    kind "chunks": chunks [first, first + len(markers)) of the prompt exist. "end": no more will
    come. "abort": the prefill job died; `reason` says why.
    """

    request: RequestId
    attempt: int
    kind: Literal["chunks", "end", "abort"]
    first: int = 0
    markers: tuple[Marker, ...] = ()
    reason: str = ""


class Speeds(msgspec.Struct, frozen=True):
    """Measured by the node itself: at start, then as moving averages. 0 means not measured."""

    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    put_bytes_per_s: float = 0.0
    get_bytes_per_s: float = 0.0


class NodeLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node is doing now, and its counters since start (`*_total`)."""

    waiting: int = 0
    running: int = 0
    parked: int = 0
    queued_tokens: int = 0  # prompt tokens known and not yet computed
    free_blocks: int = 0  # cached ones included: they can be had
    cached_blocks: int = 0  # free, but still holding a findable block
    total_blocks: int = 0
    engine_steps_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    computed_prompt_tokens_total: int = 0  # prompt tokens this node really computed
    cached_prompt_tokens_total: int = 0  # found in its own cache
    fetched_prompt_tokens_total: int = 0  # came from the store
    generated_tokens_total: int = 0
    published_bytes_total: int = 0
    published_chunks_total: int = 0
    announced_chunks_total: int = 0  # existed already; announced without a put
    fetched_bytes_total: int = 0
    fetched_chunks_total: int = 0
    reused_chunks_total: int = 0  # fetched chunks that a request then really used
    lost_chunks_total: int = 0  # asked for and not there, or not what was asked for
    handoffs_total: int = 0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who a node is. `artifacts` maps a file name (tokenizer.json, ...) to the SHA-256 hex digest
    under which the node serves it at GET {address}/artifacts/{digest}."""

    node: NodeId
    role: Role
    address: str
    pid: int
    epoch: Epoch
    state: NodeState
    fingerprint: Fingerprint
    layout: KVLayout
    model: str
    engine: str
    max_model_len: int
    vocab_size: int
    artifacts: dict[str, str]
    revision: str = ""
    speeds: Speeds = Speeds()
    load: NodeLoad = NodeLoad()
    store: StoreHealth = "up"


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model on its way to a node. `total_bytes` is 0 until the hub has said how much it is."""

    node: NodeId
    source: str
    done_bytes: int
    total_bytes: int
