"""What --store-codec int8 saves of a transfer, and what it costs.

    python -m benchmarks.kv.codec [--quick] [--link 1gbit]

Claims for the KV of a 7B model with grouped heads (28 layers, 4 KV heads of 128, bfloat16: 56 KiB
per token): the store gets at most 0.52 times the bytes; on loopback, encoding and decoding take
less than 15 % of the time in which the plain bytes are published and then fetched; on a link, which
--link gives a rate, the transfer takes at most 0.6 times as long.

A connector, as nodes have it, publishes the chunks of a prompt to a redis-server on this machine
and then fetches them into other blocks of the pool. With and without the codec take turns. --link
runs all of it in a network namespace of its own, whose loopback device `tc` limits: it needs root,
`ip`, `tc` and `unshare`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from unittest.mock import patch

import msgspec
import torch

from baton_engine.interface import StoredMemory
from baton_engine.kv.eight_bits import rounded
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.encoded_memory import EncodedMemory
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.store.address import StoreAddress
from baton_protocol.ids import BlockId, Epoch, Fingerprint, NodeId
from baton_protocol.layout import KVLayout, StoreCodec, default_chunk_blocks
from benchmarks.kv.handoff import KEEP_PAGES
from benchmarks.support.figures import Verdict, exit_code, machine, ratio, spread, times_at_most
from benchmarks.support.kv.publish_then_fetch import OneAfterTheOther
from benchmarks.support.servers import data_servers, empty

# Whole chunks of 2 and of 3 blocks.
TOKENS, QUICK_TOKENS = 4032, 1056
PASSES, QUICK_PASSES = 7, 3
STORE_MEMORY = 2 << 30
BYTES, CODED, ON_A_LINK = 0.52, 0.15, 0.6
BURST = "256kb"


class TimedMemory:
    """A memory that counts the seconds of the transfer threads in its reads and writes."""

    def __init__(self, memory: StoredMemory) -> None:
        self.layout = memory.layout
        self.seconds = 0.0
        self._memory = memory
        self._lock = threading.Lock()

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        began = time.thread_time()
        self._memory.read(blocks, into, shard, group)
        self._count(began)

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        began = time.thread_time()
        self._memory.write(blocks, data, shard, group)
        self._count(began)

    def views(self, blocks: Sequence[BlockId]) -> Sequence[memoryview] | None:
        return self._memory.views(blocks)

    def _count(self, began: float) -> None:
        with self._lock:
            self.seconds += time.thread_time() - began


def memory_of(codec: StoreCodec, tokens: int) -> TimedMemory:
    layout = KVLayout(28, 4, 128, block_size=16, dtype="bfloat16", chunk_blocks=1, codec=codec)
    chunk_blocks = default_chunk_blocks(layout.chunk_bytes)
    layout = msgspec.structs.replace(layout, chunk_blocks=chunk_blocks)
    memory = TorchMemory(layout, tokens // layout.block_size, torch.device("cpu"))
    for field in memory.fields.values():
        for layer in range(layout.num_layers):
            field[:, layer] = rounded(torch.randn(field[:, layer].shape).bfloat16())
    return TimedMemory(memory if codec == "none" else EncodedMemory(memory))


def run(options: argparse.Namespace) -> list[Verdict]:
    tokens, passes = (QUICK_TOKENS, QUICK_PASSES) if options.quick else (TOKENS, PASSES)
    print(f"{machine()}; {tokens} tokens; {options.inside or 'loopback'}")
    seconds: dict[str, list[float]] = {"none": [], "int8": []}
    coding: list[float] = []
    sizes = {}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, KEEP_PAGES))
        index = stack.enter_context(EmbeddedStore())
        [data] = stack.enter_context(data_servers(1, STORE_MEMORY, None))
        memories, ways = {}, {}
        for codec in ("none", "int8"):
            memory = memories[codec] = memory_of(codec, tokens)
            address = StoreAddress(
                index_url=index.index_url,
                data_urls=(data.tcp,),
                pool="default",
                node=NodeId(codec),
                epoch=Epoch(f"epoch-of-{codec}"),
                fingerprint=Fingerprint(codec),
                write_behind_bandwidth=0,
            )
            ways[codec] = OneAfterTheOther(address, memory)
            stack.callback(ways[codec].close)
            count = tokens // memory.layout.chunk_tokens
            sizes[codec] = count * memory.layout.chunk_bytes
        for number in range(passes + 1):
            for codec, way in ways.items():
                memory = memories[codec]
                empty([data.tcp])
                memory.seconds = 0.0
                publish, fetch = way.seconds(tokens // memory.layout.chunk_tokens)
                if number:  # the first pass warms up
                    seconds[codec].append(publish + fetch)
                    if codec == "int8":
                        coding.append(memory.seconds)
                    print(
                        f"{codec:5} {sizes[codec] / (1 << 20):6.1f} MiB  publish {publish:.3f} s"
                        f"  fetch {fetch:.3f} s  in memory {memory.seconds:.3f} s"
                    )
    share = sizes["int8"] / sizes["none"]
    verdicts = [Verdict(share <= BYTES, f"bytes {share:.3f}x  goal {BYTES}x")]
    print(f"publish and fetch: none {spread(seconds['none'])} s, int8 {spread(seconds['int8'])} s")
    if options.inside:
        verdicts.append(times_at_most(seconds["int8"], seconds["none"], ON_A_LINK))
    else:
        found = ratio(coding, seconds["none"])
        text = f"encode and decode {found:.3f} of the plain transfer  goal {CODED}"
        verdicts.append(Verdict(found <= CODED, text))
        print(f"encode and decode: {statistics.median(coding):.3f} s of the threads' time")
    for verdict in verdicts:
        print(verdict.text)
    return verdicts


def shape_link(rate: str, arguments: Sequence[str]) -> None:
    """Run this program again in a network namespace with a loopback device of this rate."""
    again = shlex.join([sys.executable, "-m", "benchmarks.kv.codec", *arguments, "--inside", rate])
    limit = f"tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst {BURST} latency 50ms"
    commands = f"ip link set lo up && {limit} && exec {again}"
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", commands])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--link", help="rate of the link, as tc has it: 1gbit")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.link:
        shape_link(options.link, ["--quick"] if options.quick else [])
    return exit_code(run(options), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
