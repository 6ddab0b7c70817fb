"""Step loops in the test's process: simulated engines, a real store, no sockets.

In: SimSettings, a store. Out: `LoopNode`s whose loop the test turns, so that it controls what
happens between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton_cli.engine_process import build_loop
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Complete, TokenOut
from baton_engine.sim.build import SimSettings, build_sim
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_node.engine.grammar_compiler import GrammarCompiler
from baton_node.engine.loop_context import LoopContext, LoopOptions
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.ipc.messages import Prompted, Step, ToEngine, ToServer
from baton_node.store.address import StoreAddress
from baton_node.store.base import KVConnector
from baton_node.store.null_connector import NoStore
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import FirstTokens, JobFailed, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_text.artifacts import BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.grammars import Grammars
from baton_text.tokenizer import Tokenizer
from tests.support.stores.kvstore import PATIENT, patient_index

PATIENCE_S = 120.0
NOBODY = (NodeId("nobody"), Epoch("never"))  # the decode node of a prefill job without one


class FakePort(EngineSocket):
    """A fake socket between a step loop and its server: frames to receive, and frames sent."""

    def __init__(self) -> None:
        self.incoming: list[ToEngine] = []
        self.sent: list[ToServer] = []

    def fileno(self) -> int:
        raise AssertionError("a loop turned by hand does not sleep")

    def receive(self) -> list[ToEngine]:
        frames, self.incoming = self.incoming, []
        return frames

    def send(self, record: ToServer) -> None:
        self.sent.append(record)


def byte_grammars() -> Grammars:
    """The grammar compiler for a simulated engine."""
    return Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)


def without_store(engine: EngineCore) -> NoStore:
    return NoStore()


class LoopNode:
    """One node without its server, with a simulated engine unless `engine` is given, and without a
    store unless `connect` returns a connector to one. Its clock is
    `clock_ahead_s` ahead of the real one; `grammars` makes its grammar compiler. It fetches
    everything that the store has, although a simulated engine computes at no cost."""

    def __init__(
        self,
        name: str,
        settings: SimSettings | None = None,
        *,
        connect: Callable[[EngineCore], KVConnector] = without_store,
        engine: EngineCore | None = None,
        grammars: Callable[[], Grammars] = byte_grammars,
        **options: Any,
    ) -> None:
        self.name = NodeId(name)
        self.epoch = Epoch(f"epoch-of-{name}")
        self.engine = engine or build_sim(settings or SimSettings(chunk_blocks=1))
        self.connector = connect(self.engine)
        self.port = FakePort()
        self.clock_ahead_s = 0.0
        context = LoopContext(
            self.engine,
            self.connector,
            self.port,
            LoopOptions(epoch=self.epoch, **{"fetch": "always", **options}),
            clock=lambda: time.monotonic() + self.clock_ahead_s,
        )
        self.jobs = context.jobs
        self.compiler = GrammarCompiler(grammars, context.counters)
        self.loop = build_loop(context, self.compiler)

    @property
    def compiling(self) -> int:
        """Number of jobs that wait for their grammar."""
        return sum(job.state == "compiling" for job in self.jobs)

    def take(self, *frames: ToEngine) -> None:
        self.port.incoming.extend(frames)

    def tokens(self, request: str) -> list[TokenOut | Complete]:
        """The request's tokens, and the ends of choices that arrived with all their tokens."""
        tokens: list[TokenOut | Complete] = []
        for frame in self.port.sent:
            if isinstance(frame, Step):
                tokens += [end for end in frame.complete if end.request == request]
                tokens += [token for token in frame.tokens if token.request == request]
        return tokens

    def ids(self, request: str, choice: int = 0) -> list[int]:
        tokens = [token for token in self.tokens(request) if isinstance(token, TokenOut)]
        return [token.id for token in tokens if token.choice == choice]

    def prompted(self, request: str) -> Prompted:
        steps = [frame for frame in self.port.sent if isinstance(frame, Step)]
        return next(p for step in steps for p in step.prompts if p.request == request)

    @property
    def freed(self) -> bool:
        """Whether every block is free. Raise if the engine's integrity check fails."""
        self.engine.check_integrity()
        load = self.engine.load()
        return load.free_blocks == load.total_blocks

    def failures(self) -> list[JobFailed]:
        return [frame for frame in self.port.sent if isinstance(frame, JobFailed)]

    def close(self) -> None:
        self.compiler.close()
        self.connector.close()


def store_node(
    name: str,
    store: EmbeddedStore,
    settings: SimSettings | None = None,
    *,
    write_behind: int = 0,
    kind: type[StoreConnector] = StoreConnector,
    patient: bool = True,
    **options: Any,
) -> LoopNode:
    """A node on a real store; the test closes it. It writes behind only with a `write_behind`
    bandwidth. `kind` may be a connector that records its calls. With `patient`, a server that is
    slow on a busy machine does not count as lost."""

    def connect(engine: EngineCore) -> StoreConnector:
        connector = kind(
            StoreAddress(
                index_url=store.index_url,
                data_urls=store.data_urls,
                pool="default",
                node=NodeId(name),
                epoch=Epoch(f"epoch-of-{name}"),
                fingerprint=engine.info.fingerprint,
                write_behind_bandwidth=write_behind,
            ),
            engine.stored,
            patient_index if patient else Index,
            PATIENT if patient else None,
        )
        connector.start()
        assert connector.plane.wait_connected(PATIENCE_S)
        return connector

    # Wait long for lookups: on a busy machine the node must not compute what the store holds.
    return LoopNode(name, settings, connect=connect, **{"lookup_wait_s": PATIENCE_S, **options})


class NodeMaker:
    """Makes nodes on one store, or on the store `on`; close() closes them all."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self._nodes: list[LoopNode] = []

    def __call__(self, name: str, settings: SimSettings | None = None, **options: Any) -> LoopNode:
        self._nodes.append(store_node(name, options.pop("on", self.store), settings, **options))
        return self._nodes[-1]

    def close(self) -> None:
        for node in self._nodes:
            node.close()


@pytest.fixture
def make_node(store: EmbeddedStore) -> Iterator[NodeMaker]:
    """Makes nodes on the test's store and closes them."""
    with closing(NodeMaker(store)) as maker:
        yield maker


def with_deadline(request: Request, time_left: float) -> Request:
    return msgspec.structs.replace(request, time_left=time_left)


def spin(nodes: Sequence[LoopNode], condition: Callable[[], bool], what: str) -> None:
    """Turn the loops until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        for node in nodes:
            node.loop.turn()
        time.sleep(0.0002)


def settle(nodes: Sequence[LoopNode]) -> None:
    """Turn the loops until no work is left, and check the integrity of every engine."""
    spin(nodes, lambda: all(n.loop.idle and not n.engine.has_work() for n in nodes), "idleness")
    assert all(node.freed for node in nodes)


def hand_off(
    prefill: LoopNode, decode: LoopNode, request: Request, *, send_first: bool = True
) -> None:
    """Do what a router does with a request up to the first token."""
    decode.take(RunJob(request, await_first=True))
    prefill.take(PrefillJob(request, decode.name, decode.epoch))
    choices = range(request.params.n)
    both = (prefill, decode)
    spin(both, lambda: len(prefill.tokens(request.id)) == len(choices), "the first tokens")
    if send_first:
        outputs = tuple(tuple(prefill.ids(request.id, choice)) for choice in choices)
        decode.take(FirstTokens(request.id, request.attempt, outputs))


def finish_hand_off(pair: Sequence[LoopNode], request: Request) -> list[list[int]]:
    """Wait for the end of a request that hand_off() started. Return the ids of each choice: the
    first one is from the prefill node, the others from the decode node."""
    prefill, decode = pair

    def finished() -> bool:
        tokens = decode.tokens(request.id)
        return sum(token.finish is not None for token in tokens) == request.params.n

    spin(pair, finished, "the request's end")
    settle(pair)
    choices = range(request.params.n)
    return [prefill.ids(request.id, c)[:1] + decode.ids(request.id, c) for c in choices]


def publish_prompt(node: LoopNode, request: Request) -> int:
    """Run a prefill job until its chunks are stored. Return how many chunks the node has put."""
    before = node.loop.counters["published_chunks"]
    node.take(PrefillJob(request, node.name, node.epoch))
    spin([node], lambda: bool(node.tokens(request.id)) and node.loop.idle, "the puts")
    settle([node])
    return int(node.loop.counters["published_chunks"] - before)


def run_alone(node: LoopNode, request: Request) -> list[list[int]]:
    """Return the ids of each choice as one node computes them alone."""
    node.take(RunJob(request))
    count = request.params.n

    def finished() -> bool:
        return sum(t.finish is not None for t in node.tokens(request.id)) == count

    spin([node], finished, "the request's end")
    return [node.ids(request.id, choice) for choice in range(count)]


def undisturbed(request: Request, settings: SimSettings) -> list[list[int]]:
    """Return the ids of each choice as a node without a store computes them."""
    with closing(LoopNode("undisturbed", settings)) as node:
        return run_alone(node, request)
