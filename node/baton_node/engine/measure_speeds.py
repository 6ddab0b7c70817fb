"""Measures the engine's and the store's speeds when a node starts.

In: an engine without requests, the data plane. Out: Speeds for the first load report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from baton_engine.interface import EngineInfo, Row, Runner, Sample
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.errors import StoreError
from baton_kvstore.keys import chunk_key
from baton_protocol.hashing import HASH_BYTES
from baton_protocol.ids import BlockHash, BlockId, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.pooling import PoolingParams
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import Priority, Speeds

PREFILL_TOKENS = 64
# On a GPU, a step of 64 tokens takes as long as its launches, 4 to 5 ms: less than 20,000 tokens/s,
# where prompts reach ten times as many.
GPU_PREFILL_TOKENS = 2048
PROMPT_FROM = 32  # first id of the prompt: printable, so never the simulator's poison token
WARM_TOKENS = 8
DECODE_STEPS = 4
COMPUTE_BUDGET_S = 0.35  # start no more decode steps after this, but always run one
TRANSFER_BUDGET_S = 0.5
TRANSFERS = 3  # per data server
TRIES_PER_SERVER = 64  # random hashes to try until one belongs to a given server
DEEP = 1 << 16  # depth in a chain: if the deletion fails, the chunk still expires before others


def measure_compute(info: EngineInfo, runner: Runner, *, gpu: bool = False) -> Speeds:
    """Measure prefill tokens/s and milliseconds per decode step. Call it before the first request:
    it writes into blocks from number 1 on. On a `gpu` the prompt is longer, and is computed once
    before it is measured: kernels are compiled or loaded at their first launch.

    It calls the runner directly, so it leaves no request, no cache entry and no count.
    """
    size, groups = info.layout.block_size, info.layout.num_groups
    room = min(info.num_blocks // groups * size, info.max_model_len)
    most = min(GPU_PREFILL_TOKENS if gpu else PREFILL_TOKENS, info.max_batched_tokens)
    count = max(1, min(most, room - DECODE_STEPS))
    spans = -(-min(room, count + DECODE_STEPS) // size)
    blocks = [BlockId(1 + i) for i in range(min(info.num_blocks, spans * groups))]
    prompt = [(PROMPT_FROM + i) % info.vocab_size for i in range(count)]
    pooling = PoolingParams() if info.pooling else None
    _run(runner, prompt if gpu else prompt[:WARM_TOKENS], 0, blocks, pooling)
    began = time.monotonic()
    prefill_s = _run(runner, prompt, 0, blocks, pooling)
    decode_s: list[float] = []
    for step in range(0 if info.whole_prompts else DECODE_STEPS):
        late = time.monotonic() - began > COMPUTE_BUDGET_S
        if count + step >= room or (late and decode_s):
            break
        decode_s.append(_run(runner, prompt[:1], count + step, blocks, pooling))
    return Speeds(
        prefill_tokens_per_s=count / prefill_s,
        decode_step_ms=min(decode_s) * 1e3 if decode_s else 0.0,
    )


def _run(
    runner: Runner,
    tokens: list[int],
    start: int,
    blocks: list[BlockId],
    pooling: PoolingParams | None,
) -> float:
    """Run one step, which samples a token unless it asks for a vector, and return its seconds."""
    began = time.monotonic()
    sample = Sample(0, start + len(tokens), SamplingParams(temperature=0.0))
    samples = () if pooling is not None else (sample,)
    runner.launch([Row(tokens, start, blocks, samples, pooling=pooling)]).read()
    return max(1e-6, time.monotonic() - began)


def measure_transfers(
    plane: DataPlane,
    urls: Sequence[str],
    fingerprint: Fingerprint,
    layout: KVLayout,
    budget_s: float = TRANSFER_BUDGET_S,
) -> tuple[float, float, float]:
    """Measure the store: return (put bytes/s, get bytes/s, get latency in ms).

    The rates are the best of up to TRANSFERS transfers of a chunk on each data server; the latency
    is that of the slowest server. The chunks are deleted afterwards. A value that cannot be
    measured is 0.0: a node starts even if its store is down. Waits at most `budget_s` seconds for
    the connections and for each transfer.
    """
    put_rate = get_rate = 0.0
    plane.wait_connected(budget_s)
    reached = [number for number, run_id in enumerate(plane.run_ids) if run_id]
    for number in reached:
        chunk = _chunk_of(plane, number)
        if chunk is None:
            continue
        put, get = _move(plane, chunk, layout, budget_s, len(reached))
        put_rate, get_rate = max(put_rate, put), max(get_rate, get)
        shards = range(layout.kv_shards)
        keys = [chunk_key(fingerprint, chunk, shard) for shard in shards]
        _delete(urls[number], keys, budget_s)
    latencies = [instance.get_latency_ms for instance in plane.instances()]
    return put_rate, get_rate, max(latencies, default=0.0)


def _chunk_of(plane: DataPlane, number: int) -> BlockHash | None:
    """Return a random hash of a chunk that belongs to data server `number`, or None if the server
    accepts no chunks."""
    for _ in range(TRIES_PER_SERVER * len(plane.run_ids)):
        chunk = BlockHash(os.urandom(HASH_BYTES))
        if plane.instance_for(chunk) == number:
            return chunk
    return None


def _move(
    plane: DataPlane, chunk: BlockHash, layout: KVLayout, budget_s: float, servers: int
) -> tuple[float, float]:
    """Put and get one chunk up to TRANSFERS times; return the best rates in bytes/s. Start no more
    after a quarter of the budget divided by the number of servers."""
    puts: SimpleQueue[PutResult] = SimpleQueue()
    gets: SimpleQueue[GetResult] = SimpleQueue()
    put_rate = get_rate = 0.0
    began = time.monotonic()
    try:
        for _ in range(TRANSFERS):  # the first transfers touch cold pages and are slower
            plane.submit_put(
                chunk, layout.chunk_tokens, DEEP, _nothing, _copied, puts.put, Priority.HANDOFF
            )
            put = puts.get(timeout=budget_s)
            if put.marker is None:
                break
            plane.submit_get(chunk, put.marker, DEEP, _nothing, gets.put, Priority.HANDOFF)
            got = gets.get(timeout=budget_s)
            put_rate = max(put_rate, put.bytes / max(1e-6, put.seconds))
            get_rate = max(get_rate, got.bytes / max(1e-6, got.seconds))
            if time.monotonic() - began > budget_s / 4 / servers:
                break
    except Empty:
        pass
    return put_rate, get_rate


def _nothing(payload: memoryview, shard: int) -> None:
    """Leave the payload as it is: its content does not matter here."""


def _copied() -> None:
    """Release nothing: no block is held for these puts."""


def _delete(url: str, keys: Sequence[bytes], budget_s: float) -> None:
    connection = RespConnection(parse_endpoint(url))
    deadline = time.monotonic() + budget_s
    try:
        connection.open(deadline)
        connection.command(deadline, b"DEL", *keys)
    except StoreError:
        pass  # the keys have a TTL
    finally:
        connection.close()
