"""GET /pool: the pool as one JSON object, for people, the supervisor's table and tests.

In: the view and other parts of the router. Out: plain JSON values without secrets. `openapi` takes
the records below as documentation; the JSON may have more fields.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, Exact, Kind, NodeLoad, Speeds, differing
from baton_router.nodes.link import NodeLink
from baton_router.nodes.node_view import NodeView, state_of
from baton_router.nodes.pool_view import LOAD_NUMBERS, PoolView

Json = dict[str, Any]


class PoolNode(msgspec.Struct, kw_only=True):
    id: str
    role: str
    address: str
    state: str
    reason: str
    in_use: bool
    differs: list[str]
    model: str
    engine: str
    exact: Exact
    fingerprint: str
    max_model_len: int
    layout: KVLayout
    speeds: Speeds
    load: NodeLoad
    instances: list[DataInstance]
    cache: dict[str, int]
    booked: dict[str, int]


class Unreachable(msgspec.Struct):
    address: str
    reason: str


class Conflict(msgspec.Struct):
    """The node at `address` is not used: the one at `held_by` has its name and is newer."""

    node: str
    address: str
    held_by: str


class Pool(msgspec.Struct, kw_only=True):
    """The pool as this router sees it."""

    pool: str
    model: str | None
    fingerprint: str | None
    nodes: list[PoolNode]
    unreachable: list[Unreachable]
    conflicts: list[Conflict]
    store: dict[str, Any]
    totals: dict[str, float]


def pool_json(
    view: PoolView,
    *,
    name: str,
    router: str,
    model: str | None,
    store: Json,
    unreachable: Mapping[str, str],
    conflicts: Sequence[NodeLink],
    running: int,
) -> Json:
    """`router` is the name of this router. `store` is what the router knows of the store; the data
    servers' state from the nodes is added. `totals` sums the nodes' loads and counts this router's
    requests."""
    nodes = sorted(view.nodes.values(), key=lambda node: node.report.node)
    kind, used, sample = view.kind(), view.whole(), view.sample()
    return {
        "pool": name,
        "router": router,
        "model": model,
        "fingerprint": kind.fingerprint if kind is not None else None,
        "nodes": [_node(node, used, sample) for node in nodes],
        "unreachable": [
            {"address": address, "reason": reason} for address, reason in unreachable.items()
        ],
        "conflicts": [
            {"node": link.report.node, "address": link.address, "held_by": link.rival}
            for link in conflicts
            if link.report is not None
        ],
        "store": store | _store(view),
        "totals": _totals(nodes) | {"requests_running": running, "nodes": len(nodes)},
    }


def _node(node: NodeView, used: Container[Kind], sample: NodeView | None) -> Json:
    report = node.report
    layout = report.layout
    return {
        "id": report.node,
        "role": report.role,
        "address": report.address,
        "pid": report.pid,
        "epoch": report.epoch,
        "state": state_of(node),
        "reason": report.reason,
        "replaced_by": report.replaced_by,
        "store": report.store,
        "in_use": node.ready and node.kind in used,
        "differs": differing(report, sample.report) if sample is not None else [],
        "revision": report.revision,
        "model": report.model,
        "engine": report.engine,
        "exact": report.exact,
        "fingerprint": report.fingerprint,
        "max_model_len": report.max_model_len,
        "layout": msgspec.to_builtins(layout)
        | {
            "chunk_bytes": layout.chunk_bytes,
            "chunk_tokens": layout.chunk_tokens,
            "block_bytes": layout.block_bytes,
            "waste": layout.waste,
        },
        "speeds": msgspec.structs.asdict(report.speeds),
        "load": msgspec.structs.asdict(report.load),
        "instances": [msgspec.structs.asdict(instance) for instance in report.instances],
        "cache": {
            "chunks": node.chunks,
            "total_blocks": report.load.total_blocks,
            "free_blocks": report.load.free_blocks,
            "cached_blocks": report.load.cached_blocks,
            "host_blocks": report.load.host_blocks,
            "host_total_blocks": report.load.host_total_blocks,
        },
        "booked": {
            "requests": len(node.booked),
            "tokens": sum(booking.tokens for booking in node.booked.values()),
            "sequences": sum(booking.sequences for booking in node.booked.values()),
        },
        "others": {"tokens": node.others_tokens, "sequences": node.others_sequences},
    }


def _store(view: PoolView) -> Json:
    """`chunk_waste` is the allocator's overhead per chunk, as a share of the chunk's payload."""
    sample = view.sample()
    return {
        "chunk_waste": sample.report.layout.waste if sample is not None else None,
        "instances": [_instance(seen) for seen in view.instances()],
    }


def _instance(seen: Mapping[NodeId, DataInstance]) -> Json:
    """One data server: usage from the node with the latest report, troubles of each node."""
    latest = list(seen.values())[-1]
    return {
        "used_bytes": latest.used_bytes,
        "limit_bytes": latest.limit_bytes,
        "evicted_keys": latest.evicted_keys,
        "trouble": {node: instance.trouble for node, instance in seen.items() if instance.trouble},
        "put_trouble": {
            node: instance.put_trouble for node, instance in seen.items() if instance.put_trouble
        },
    }


def _totals(nodes: list[NodeView]) -> Json:
    return {name: sum(getattr(node.report.load, name) for node in nodes) for name in LOAD_NUMBERS}
