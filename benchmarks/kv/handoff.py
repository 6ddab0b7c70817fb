"""The share of a hand-off's transfer that the prefill hides.

    python -m benchmarks.kv.handoff [--quick] [--step-tokens 256]

Claim: from 1,024 prompt tokens on, the exposed time, from the prefill node's first token to the
last chunk in the decode node's blocks, is at most half of the time that the same number of chunks
takes if they are published first and fetched then. Two engine processes hand off through a
redis-server on this machine. Both ways take turns, and each pass has a new prompt.

The simulated engines have the KV of a 7B model with grouped heads (28 layers, 4 KV heads of 128,
bfloat16: 56 KiB per token, 1.75 MiB per chunk of 32 tokens) and the prefill speed of such a model
on one A100 (9,200 tokens/s), in steps of --step-tokens. The real time of writing their KV is part
of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from baton_engine.config.engine_config import SimConfig
from baton_engine.sim.memory import SimMemory
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.ipc.messages import Step, ToServer
from baton_node.settings import NodeSettings
from baton_node.store.address import StoreAddress
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.link import FirstTokens, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import Role
from benchmarks.support.figures import Verdict, exit_code, machine, spread
from benchmarks.support.kv.engine_pipe import EnginePipe
from benchmarks.support.kv.publish_then_fetch import OneAfterTheOther
from benchmarks.support.kv.recording_engine import request_id
from benchmarks.support.meter import Notes
from benchmarks.support.servers import empty

LENGTHS = (256, 512, 1024, 2048, 4096)
HIDES_FROM = 1024
HIDDEN = 0.5
PREFILL_MS_PER_TOKEN = 1e3 / 9200
BLOCK_SIZE = 16
POOL_TOKENS = 2 * max(LENGTHS)
STORE_MEMORY = 2 << 30
# The bundled server's allocator would return what is deleted between two passes to the system, and
# the next put would pay for fresh pages: that of a server which is full, or has jemalloc, does not.
KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
ENGINE = "benchmarks.support.kv.recording_engine"


@dataclass
class Passes:
    """Of one length. `requests` are the numbers of those handed over."""

    requests: list[int] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Nodes:
    prefill: EnginePipe
    decode: EnginePipe

    def hand_over(self, number: int, length: int) -> None:
        """What a router does; until the decode node's last token."""
        rng = random.Random(number)
        request = Request(
            id=request_id(number),
            attempt=1,
            prompt_ids=tuple(rng.randrange(32, 127) for _ in range(length)),
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            outputs=((),),
        )
        self.decode.send(RunJob(request, await_first=True))
        self.prefill.send(PrefillJob(request, self.decode.node, self.decode.epoch))
        first = _token(self.prefill, request.id)
        self.decode.send(FirstTokens(request.id, 1, ((first,),)))
        _token(self.decode, request.id)


def _token(node: EnginePipe, request: RequestId) -> int:
    """The next one of this request."""

    def has_one(frame: ToServer) -> bool:
        return isinstance(frame, Step) and any(token.request == request for token in frame.tokens)

    frame = node.wait_for(has_one)
    assert isinstance(frame, Step)
    return next(token.id for token in frame.tokens if token.request == request)


def settings(name: Role, store: EmbeddedStore, step_tokens: int) -> NodeSettings:
    return NodeSettings(
        node=name,
        role=name,
        engine="sim",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        kv_blocks=POOL_TOKENS // BLOCK_SIZE,
        max_batched_tokens=step_tokens,
        index_url=store.index_url,
        data_urls=store.data_urls,
        write_behind_bandwidth=0,
        sim=SimConfig(
            layers=28, kv_heads=4, head_dim=128, prefill_ms_per_token=PREFILL_MS_PER_TOKEN
        ),
    )


def measure(
    nodes: Nodes, sequence: OneAfterTheOther, store: EmbeddedStore, count: int
) -> dict[int, Passes]:
    """Both ways in turns, all lengths in each pass; the first pass warms up."""
    found = {length: Passes() for length in LENGTHS}
    chunk_tokens = nodes.decode.ready.info.layout.chunk_tokens
    number = 0
    for turn in range(count + 1):
        for length, passes in found.items():
            number += 1
            nodes.hand_over(number, length)
            publish_s, fetch_s = sequence.seconds(length // chunk_tokens)
            if turn:
                passes.requests.append(number)
                passes.publish_s.append(publish_s)
                passes.fetch_s.append(fetch_s)
            empty(list(store.data_urls))
    return found


def report(found: dict[int, Passes], tokens: Notes, fetched: Notes, chunk: int) -> list[Verdict]:
    """`tokens` of the prefill node, `fetched` of the decode node."""
    print(f"{'tokens':>6} {'publish ms':>20} {'then fetch ms':>20} {'exposed ms':>20}  hidden")
    verdicts = []
    for length, passes in found.items():
        exposed = [
            _exposed_ms(number, length // chunk, tokens, fetched) for number in passes.requests
        ]
        publish, fetch = _ms(passes.publish_s), _ms(passes.fetch_s)
        hidden = statistics.median(
            1 - e / (p + f) for e, p, f in zip(exposed, publish, fetch, strict=True)
        )
        verdict_text = ""
        if length >= HIDES_FROM:
            verdicts.append(Verdict(hidden >= HIDDEN, ""))
            verdict_text = f"goal {HIDDEN:.0%} {'met' if hidden >= HIDDEN else 'MISSED'}"
        print(
            f"{length:>6} {spread(publish, 1):>20} {spread(fetch, 1):>20} {spread(exposed, 1):>20}"
            f"  {hidden:6.0%}  {verdict_text}"
        )
    return verdicts


def _exposed_ms(number: int, chunks: int, tokens: Notes, fetched: Notes) -> float:
    landed = fetched.times_of(number)
    if len(landed) != chunks:
        raise SystemExit(f"{len(landed)} of {chunks} chunks were fetched: not a hand-off")
    return max(0.0, max(landed) - min(tokens.times_of(number))) * 1e3


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def run(options: argparse.Namespace, place: Path) -> list[Verdict]:
    with ExitStack() as stack:
        with patch.dict(os.environ, KEEP_PAGES):
            store = stack.enter_context(EmbeddedStore(STORE_MEMORY))
        pipes = []
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            pipe = EnginePipe(ENGINE, settings(role, store, options.step_tokens), place)
            stack.callback(pipe.close)
            pipes.append(pipe)
        ready = pipes[1].ready
        address = StoreAddress(
            index_url=store.index_url,
            data_urls=store.data_urls,
            pool="default",
            node=NodeId("sequence"),
            epoch=Epoch("epoch-of-sequence"),
            fingerprint=ready.info.fingerprint,
            write_behind_bandwidth=0,
        )
        chunk = ready.info.layout.chunk_tokens
        layout = ready.info.layout
        memory = SimMemory(layout, max(LENGTHS) // chunk * layout.chunk_blocks)
        sequence = OneAfterTheOther(address, memory)
        stack.callback(sequence.close)
        print(
            f"chunks of {chunk} tokens, {ready.info.layout.chunk_bytes / (1 << 20):.2f} MiB; "
            f"steps of {options.step_tokens} tokens; {options.passes} passes; {machine()}"
        )
        found = measure(Nodes(*pipes), sequence, store, options.passes)
    return report(
        found,
        Notes.read(place / "prefill" / "tokens.notes"),
        Notes.read(place / "decode" / "fetched.notes"),
        chunk,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--step-tokens", type=int, default=256, help="tokens of a prefill step")
    parser.add_argument("--quick", action="store_true", help="3 passes")
    options = parser.parse_args()
    if options.quick:
        options.passes = 3
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        verdicts = run(options, Path(name))
    return exit_code(verdicts, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
