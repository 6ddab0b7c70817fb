"""A pool as one router believes it: nodes with hellos and loads, and requests ready to be placed.

In: names, layouts, speeds. Out: the router's own records, for benchmarks of placement alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import Kind, NodeLoad, NodeReport, Role, Speeds, kind_of
from baton_router.nodes.marker_lookup import MarkerLookup
from baton_router.nodes.model_offers import Serving
from baton_router.requests.in_flight import InFlightRequest
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.prepared import Prepared
from baton_router.requests.state import RequestRecord
from baton_router.requests.ticket import Ticket

FINGERPRINT = Fingerprint("b" * 32)


def layout(chunk_blocks: int) -> KVLayout:
    """Qwen3-0.6B's: 112 KiB a token."""
    return KVLayout(
        num_layers=28,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype="bfloat16",
        chunk_blocks=chunk_blocks,
    )


def report(name: str, role: Role, shape: KVLayout, speeds: Speeds, load: NodeLoad) -> NodeReport:
    return NodeReport(
        node=NodeId(name),
        role=role,
        address="http://127.0.0.1:1",
        pid=1,
        epoch=Epoch("e"),
        state="ready",
        fingerprint=FINGERPRINT,
        layout=shape,
        model="m",
        engine="sim",
        max_model_len=1 << 17,
        vocab_size=1 << 17,
        artifacts={},
        speeds=speeds,
        load=load,
    )


def no_store() -> MarkerLookup:
    """Of a router without an index; it takes the store for up."""
    return MarkerLookup(None, timeout_s=1.0, clock=lambda: 0.0)


def kind(shape: KVLayout) -> Kind:
    return kind_of(report("any", "decode", shape, Speeds(), NodeLoad()))


def in_flight(
    name: str,
    prompt: tuple[int, ...],
    chunks: tuple[BlockHash, ...],
    of: Kind,
    max_tokens: int = 64,
) -> InFlightRequest:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(
        id=RequestId(name), attempt=1, prompt_ids=prompt, params=params, outputs=((),)
    )
    serving = cast(Serving, SimpleNamespace(kind=of))  # of a Serving, placement reads the kind
    prepared = Prepared(request, chunks, serving, None, False)
    record = RequestRecord(request, lambda: 0.0)
    return InFlightRequest(record, prepared, Ticket(1), OutputQueue(1), 0, 0.0)
