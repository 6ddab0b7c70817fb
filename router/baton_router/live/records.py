"""The records of GET /pool/events: what the live page and `baton top` show of a pool.

`snapshot` makes one per second, `openapi` describes them. A figure that is unknown, or that the
viewer may not see, is null. Rates and latencies are of the time since the snapshot before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_protocol.store import Exact, Role

# "held": no node has the request yet; the others are the phases of a placed request.
CallPhase = Literal["held", "waiting", "handoff", "running", "over"]


class Viewer(msgspec.Struct, frozen=True):
    """The tenant of the viewer's key, and whether it may see what concerns all tenants."""

    tenant: str
    admin: bool


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that the viewer may see, and all nodes. `running` have a node, `waiting` have
    none."""

    running: int
    waiting: int
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    errors_per_s: float | None = None
    ready_nodes: int
    nodes: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies since the snapshot before. `prediction_error_p50_ms` is the median difference
    between predicted and measured time until a request decodes, and `cache_hit_rate` the share of
    prompt tokens that nodes did not have to compute; both are of the calls in `ended`."""

    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    prediction_error_p50_ms: float | None = None
    cache_hit_rate: float | None = None


class LiveNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node. `free_blocks` includes `cached_blocks`. `running` and `waiting` count sequences, also
    those of other routers. Bytes are those of KV that it fetched from the store (in) and put into
    it (out). A viewer who is no admin gets the id, the role and the state."""

    id: str
    role: Role
    state: str
    reason: str | None = None
    asleep: bool = False
    exact: Exact | None = None
    running: int | None = None
    waiting: int | None = None
    free_blocks: int | None = None
    cached_blocks: int | None = None
    total_blocks: int | None = None
    tokens_per_s: float | None = None
    kv_in_bytes_per_s: float | None = None
    kv_out_bytes_per_s: float | None = None


class Flow(msgspec.Struct, frozen=True):
    """Requests whose KV moves from one node to another now."""

    source: str
    target: str
    requests: int


class RunningCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that runs or waits. Of several prompts, the sums and the nodes of the first."""

    id: str
    tenant: str
    endpoint: str
    phase: CallPhase
    age_ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill: str | None
    decode: str | None
    attempts: int


class EndedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that ended since the snapshot before. `status` is that of HTTP; 499: the client
    left."""

    id: str
    tenant: str
    endpoint: str
    status: int
    error: str | None
    first_token_ms: float | None
    total_ms: float
    prompt_tokens: int
    completion_tokens: int
    attempts: int
    prefill: str | None
    decode: str | None


class TenantCalls(msgspec.Struct, frozen=True):
    """The calls of one tenant. `name` is "" in a pool without keys."""

    name: str
    running: int
    waiting: int


class PlannerDecision(msgspec.Struct, frozen=True):
    """Replicas that the autoscaler decided on. `at_ms` is in Unix milliseconds."""

    at_ms: int
    prefill: int
    decode: int
    reason: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as this router sees it. `at_ms` is in Unix milliseconds, for charts. `requests` are
    the oldest ones; `requests_left_out` counts the others. `ended` are the last ones since the
    snapshot before. `decisions` has the newest first."""

    at_ms: int
    pool: str
    router: str
    model: str | None
    viewer: Viewer
    totals: Totals
    latency: Latency
    nodes: list[LiveNode]
    flows: list[Flow]
    requests: list[RunningCall]
    requests_left_out: int
    ended: list[EndedCall]
    tenants: list[TenantCalls]
    decisions: list[PlannerDecision]
