"""GET /pool: the pool as one JSON object, for people, the supervisor's table and tests.

In: the view and the router's other parts. Out: plain JSON values; URLs never carry credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_protocol.store import NodeLoad
from baton_router.view import NodeView, PoolView, state_of

Json = dict[str, Any]


def pool_json(
    view: PoolView,
    *,
    name: str,
    model: str | None,
    store: Json,
    unreachable: Mapping[str, str],
    running: int,
) -> Json:
    """`totals` sums the nodes' loads, and counts what the router itself is doing."""
    nodes = sorted(view.nodes.values(), key=lambda node: node.report.node)
    kind = view.kind()
    return {
        "pool": name,
        "model": model,
        "fingerprint": kind.fingerprint if kind is not None else None,
        "nodes": [_node(node, view) for node in nodes],
        "unreachable": [
            {"address": address, "reason": reason} for address, reason in unreachable.items()
        ],
        "store": store,
        "totals": _totals(nodes) | {"requests_running": running, "nodes": len(nodes)},
    }


def _node(node: NodeView, view: PoolView) -> Json:
    report = node.report
    layout = report.layout
    return {
        "id": report.node,
        "role": report.role,
        "address": report.address,
        "pid": report.pid,
        "epoch": report.epoch,
        "state": state_of(node),
        "store": report.store,
        "in_use": node.ready and node.kind == view.kind(),
        "revision": report.revision,
        "model": report.model,
        "engine": report.engine,
        "fingerprint": report.fingerprint,
        "max_model_len": report.max_model_len,
        "layout": msgspec.to_builtins(layout)
        | {
            "chunk_bytes": layout.chunk_bytes,
            "chunk_tokens": layout.chunk_tokens,
            "block_bytes": layout.block_bytes,
        },
        "speeds": msgspec.structs.asdict(report.speeds),
        "load": msgspec.structs.asdict(report.load),
        "cache": {
            "chunks": node.chunks,
            "total_blocks": report.load.total_blocks,
            "free_blocks": report.load.free_blocks,
            "cached_blocks": report.load.cached_blocks,
        },
        "booked": {
            "requests": len(node.booked),
            "tokens": sum(booking.tokens for booking in node.booked.values()),
            "sequences": sum(booking.sequences for booking in node.booked.values()),
        },
    }


def _totals(nodes: list[NodeView]) -> Json:
    return {
        field.name: sum(getattr(node.report.load, field.name) for node in nodes)
        for field in msgspec.structs.fields(NodeLoad)
    }
