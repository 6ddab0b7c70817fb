"""GET /pool: the pool as one record, for people, the table of `baton up` and tests.

In: the view and other parts of the router. Out: a Pool, without secrets.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, Kind, differing
from baton_router.http.pool_records import (
    BookedLoad,
    NameConflict,
    OthersLoad,
    Pool,
    PoolCache,
    PoolInstance,
    PoolLayout,
    PoolLoad,
    PoolNode,
    PoolStore,
    StoreInstance,
    UnreachableNode,
)
from baton_router.nodes.link_table import LinkTable
from baton_router.nodes.node_view import NodeView, state_of
from baton_router.nodes.pool_view import LOAD_NUMBERS, PoolView


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """What a router itself adds to its view: names, links, the index, its running requests."""

    pool: str
    router: str
    model: str | None
    links: LinkTable
    has_store: bool
    store_reachable: bool | None
    running: int


def pool_status(view: PoolView, own: RouterStatus) -> Pool:
    nodes = sorted(view.nodes.values(), key=lambda node: node.report.node)
    kind, used, sample = view.kind(), view.whole(), view.sample()
    return Pool(
        pool=own.pool,
        router=own.router,
        model=own.model,
        fingerprint=kind.fingerprint if kind is not None else None,
        nodes=[_node(node, used, sample) for node in nodes],
        unreachable=[
            UnreachableNode(address, reason) for address, reason in own.links.unreachable().items()
        ],
        conflicts=[
            NameConflict(link.report.node, link.address, link.rival)
            for link in own.links.conflicts()
            if link.report is not None
        ],
        store=PoolStore(
            configured=own.has_store,
            reachable=own.store_reachable,
            chunk_waste=sample.report.layout.waste if sample is not None else None,
            instances=[_store_instance(seen) for seen in view.instances()],
        ),
        totals=_totals(nodes) | {"requests_running": own.running, "nodes": len(nodes)},
    )


def _node(node: NodeView, used: Container[Kind], sample: NodeView | None) -> PoolNode:
    report, load = node.report, node.report.load
    bookings = node.booked.values()
    return PoolNode(
        id=report.node,
        role=report.role,
        address=report.address,
        pid=report.pid,
        epoch=report.epoch,
        state=state_of(node),
        reason=report.reason,
        replaced_by=report.replaced_by,
        store=report.store,
        in_use=node.ready and node.kind in used,
        differs=differing(report, sample.report) if sample is not None else [],
        revision=report.revision,
        model=report.model,
        engine=report.engine,
        exact=report.exact,
        weights=report.weights,
        fingerprint=report.fingerprint,
        max_model_len=report.max_model_len,
        layout=_layout(report.layout),
        speeds=report.speeds,
        load=PoolLoad(**msgspec.structs.asdict(load)),
        instances=[
            PoolInstance(**msgspec.structs.asdict(instance)) for instance in report.instances
        ],
        cache=PoolCache(
            chunks=node.chunks,
            total_blocks=load.total_blocks,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            host_blocks=load.host_blocks,
            host_total_blocks=load.host_total_blocks,
        ),
        booked=BookedLoad(
            requests=len(bookings),
            tokens=sum(booking.tokens for booking in bookings),
            sequences=sum(booking.sequences for booking in bookings),
        ),
        others=OthersLoad(node.others_tokens, node.others_sequences),
    )


def _layout(layout: KVLayout) -> PoolLayout:
    return PoolLayout(
        **msgspec.structs.asdict(layout),
        bytes_of_chunk=layout.chunk_bytes,
        tokens_of_chunk=layout.chunk_tokens,
        bytes_of_block=layout.block_bytes,
        wasted=layout.waste,
    )


def _store_instance(seen: Mapping[NodeId, DataInstance]) -> StoreInstance:
    latest = list(seen.values())[-1]
    return StoreInstance(
        used_bytes=latest.used_bytes,
        limit_bytes=latest.limit_bytes,
        evicted_keys=latest.evicted_keys,
        trouble={node: instance.trouble for node, instance in seen.items() if instance.trouble},
        put_trouble={
            node: instance.put_trouble for node, instance in seen.items() if instance.put_trouble
        },
    )


def _totals(nodes: Sequence[NodeView]) -> dict[str, float]:
    return {name: sum(getattr(node.report.load, name) for node in nodes) for name in LOAD_NUMBERS}
