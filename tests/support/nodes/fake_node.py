"""A node without an engine: a real aiohttp server that speaks the link protocol and gives a fixed
reply.

In: a router's frames; a Script, which tests may change at any time. Out: a node's frames, and
artifacts of the byte tokenizer. Its tokens are the reply's bytes, so that tests know texts and ids.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from aiohttp import WSMsgType, web

from baton_protocol import PROTOCOL_VERSION
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.link import (
    ROUTER_HEADER,
    Abort,
    CacheEvents,
    Delta,
    Deltas,
    DrainNode,
    FirstTokens,
    Hello,
    JobFailed,
    Load,
    NoFirstTokens,
    PinPrefix,
    PinReport,
    PinState,
    PrefillDone,
    PrefillJob,
    RequestStats,
    ResetPrefixCache,
    ResumeNode,
    Resync,
    RunJob,
    ToNode,
    ToRouter,
    UnpinPrefix,
    to_node_codec,
    to_router_codec,
)
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.store import (
    DataInstance,
    NodeLoad,
    NodeReport,
    NodeState,
    Role,
    Speeds,
    StoreHealth,
)
from baton_text.artifacts import byte_artifacts, digest

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32", chunk_blocks=2
)
SPEEDS = Speeds(
    prefill_tokens_per_s=10_000.0,
    decode_step_ms=5.0,
    put_bytes_per_s=1e9,
    get_bytes_per_s=1e9,
    get_latency_ms=0.01,
)
VOCAB = 259
Behaviour = Literal["answer", "fail", "silent", "half"]


@dataclass
class Script:
    """What the node does with jobs. "half" sends half of the reply and then falls silent."""

    reply: bytes = b"Hello, world!"
    prefill: Behaviour = "answer"
    run: Behaviour = "answer"
    token_s: float = 0.0
    stats: RequestStats | None = None  # replaces the node's own statistics
    vector: list[float] | None = None  # replaces the answer to a pooling request
    failure: ErrorRecord = field(
        default_factory=lambda: ErrorRecord("the engine said no", "engine_error", status=500)
    )


def make_report(name: str, role: Role, **changes: Any) -> NodeReport:
    """A ready node's report; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "node": NodeId(name),
        "role": role,
        "address": "http://127.0.0.1:1",
        "pid": 1,
        "epoch": Epoch("epoch-1"),
        "state": "ready",
        "fingerprint": Fingerprint("f" * 32),
        "layout": LAYOUT,
        "model": "fake-model",
        "engine": "fake",
        "max_model_len": 256,
        "vocab_size": VOCAB,
        "artifacts": {},
        "speeds": SPEEDS,
        "protocol": PROTOCOL_VERSION,
    }
    return NodeReport(**(fields | changes))


class FakeNode:
    """`async with FakeNode(...) as node`: a node that listens at node.address.

    `got` holds all received frames; the next hello sends `report`; without `pongs` it ignores
    pings; with `obeys` it acknowledges drain and resume. It keeps no state of jobs: a job that is
    sent again continues after the outputs in it.
    """

    def __init__(self, name: str, role: Role, script: Script | None = None, **report: Any) -> None:
        self.script = script or Script()
        self.artifacts: dict[str, bytes] = {}
        self.report = make_report(name, role)
        self.serve_artifacts(byte_artifacts(VOCAB))
        self.report = msgspec.structs.replace(self.report, **report)
        self.got: list[ToNode] = []
        self.chunks: tuple[BlockHash, ...] = ()
        self.events = 0  # frames of cache events that were sent
        self.links = 0
        self.routers: list[str] = []  # the name that each link's router sent
        self.token = ""  # the token that links need; "" accepts every router
        self.refused = 0
        self.pongs = True
        self.obeys = True
        self.pins: dict[str, PinReport] = {}
        # State and reason that it reports of a prefix that it is to pin; None: nothing.
        self.pins_as: tuple[PinState, str] | None = ("pinned", "")
        self.sleeps: list[dict[str, str]] = []  # the queries of sleeps that it obeyed
        self.wakes: list[list[str]] = []  # the tags of wake-ups that were asked for
        self.refusal = ""  # of sleeps and wake-ups
        self._sockets: dict[web.WebSocketResponse, asyncio.Transport | None] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self._decoder, self._encoder = to_node_codec(), to_router_codec()
        self._jobs: dict[RequestId, asyncio.Task[None]] = {}
        self._firsts: dict[RequestId, asyncio.Future[FirstTokens | NoFirstTokens]] = {}
        self._runner: web.AppRunner | None = None

    def rename(self, name: str) -> None:
        """Change the node's name from the next hello on."""
        self.report = msgspec.structs.replace(self.report, node=NodeId(name))

    def serve_artifacts(self, files: Mapping[str, bytes]) -> None:
        """Change the served artifacts from the next hello on."""
        self.artifacts |= {digest(data): data for data in files.values()}
        names = {name: digest(data) for name, data in files.items()}
        self.report = msgspec.structs.replace(self.report, artifacts=names)

    async def __aenter__(self) -> FakeNode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.add_routes([web.get("/link", self._link), web.get("/artifacts/{d}", self._artifact)])
        app.add_routes([web.post("/sleep", self._sleep), web.post("/wake_up", self._wake_up)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.report = msgspec.structs.replace(self.report, address=address)

    async def stop(self) -> None:
        """Close all links and refuse new connections."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            self.wake()
            await self.drop_links()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, epoch: str) -> None:
        """Restart at the same address with a new engine epoch."""
        port = int(self.address.rsplit(":", 1)[1])
        await self.stop()
        self.report = msgspec.structs.replace(self.report, epoch=Epoch(epoch))
        await self.start(port)

    @property
    def address(self) -> str:
        return self.report.address

    def got_of(self, kind: type[ToNode]) -> list[Any]:
        return [frame for frame in self.got if isinstance(frame, kind)]

    async def drop_links(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        self._jobs.clear()
        for socket in list(self._sockets):
            await socket.close()

    def cut_links(self) -> None:
        """Abort the connections. The node keeps running, and its frames go nowhere."""
        for transport in self._sockets.values():
            if transport is not None:
                transport.abort()
        self._sockets.clear()

    def freeze(self) -> None:
        """Behave as after SIGSTOP: keep the connections, but answer nothing."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    async def say(self, frame: ToRouter) -> None:
        """Send a frame to every linked router."""
        await self._awake.wait()
        data = self._encoder.encode(frame)
        for socket in list(self._sockets):
            with suppress(ConnectionError):
                await socket.send_bytes(data)

    async def say_raw(self, data: bytes) -> None:
        """Send bytes that may not be a valid frame."""
        for socket in list(self._sockets):
            with suppress(ConnectionError):
                await socket.send_bytes(data)

    async def say_load(
        self,
        state: NodeState = "ready",
        store: StoreHealth = "up",
        instances: tuple[DataInstance, ...] = (),
        leaving: bool = False,
        **load: int,
    ) -> None:
        self.report = msgspec.structs.replace(
            self.report, state=state, store=store, load=NodeLoad(**load), instances=instances
        )
        report = self.report
        frame = Load(report.epoch, state, report.speeds, report.load, store, instances)
        await self.say(
            msgspec.structs.replace(
                frame,
                reason=report.reason if state != "ready" else "",
                leaving=leaving,
                replaced_by=report.replaced_by if state != "ready" else "",
                pins=tuple(self.pins.values()),
                asleep=report.asleep,
                wakes=report.wakes,
            )
        )

    async def fall_asleep(self, *, wakes: bool) -> None:
        """Tell the routers that it sleeps. `wakes`: until it is needed."""
        self.report = msgspec.structs.replace(self.report, asleep=True, wakes=wakes)
        await self.say_load("draining")

    async def _sleep(self, request: web.Request) -> web.Response:
        self._admit(request)
        if self.refusal:
            return web.Response(status=409, text=self.refusal)
        self.sleeps.append(dict(request.query))
        await self.fall_asleep(wakes="idle_s" in request.query)
        return web.json_response({"is_sleeping": True, "away": ["weights", "kv_cache"]})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self._admit(request)
        self.wakes.append(request.query.getall("tags", []))
        if self.refusal:
            return web.Response(status=409, text=self.refusal)
        self.report = msgspec.structs.replace(self.report, asleep=False, wakes=False)
        await self.say_load("ready")
        return web.json_response({"is_sleeping": False, "away": []})

    def _admit(self, request: web.Request) -> None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            raise web.HTTPUnauthorized

    async def _artifact(self, request: web.Request) -> web.Response:
        self._admit(request)
        data = self.artifacts.get(request.match_info["d"])
        return web.Response(body=data) if data is not None else web.Response(status=404)

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        await self._awake.wait()
        self._admit(request)
        socket = web.WebSocketResponse(compress=False, autoping=False)
        await socket.prepare(request)
        self.links += 1
        self.routers.append(request.headers.get(ROUTER_HEADER, ""))
        await socket.send_bytes(self._encoder.encode(Hello(self.report)))
        await socket.send_bytes(self._encoder.encode(self._listing()))
        self._sockets[socket] = request.transport
        try:
            async for message in socket:
                await self._awake.wait()
                if message.type is WSMsgType.PING and self.pongs:
                    await socket.pong(message.data)
                elif message.type is WSMsgType.BINARY:
                    await self._receive(self._decoder.decode(message.data))
        finally:
            self._sockets.pop(socket, None)
        return socket

    def _listing(self) -> CacheEvents:
        return CacheEvents(self.report.epoch, stored=self.chunks, reset=True, seq=self.events)

    async def _receive(self, frame: ToNode) -> None:
        self.got.append(frame)
        if isinstance(frame, DrainNode | ResumeNode):
            await self._obey(frame)
        elif isinstance(frame, Resync):
            await self.say(self._listing())
        elif isinstance(frame, ResetPrefixCache):
            pass
        elif isinstance(frame, PinPrefix):
            if self.pins_as is not None:
                self.pins[frame.id] = PinReport(frame.id, frame.until, *self.pins_as)
                await self.say_load()
        elif isinstance(frame, UnpinPrefix):
            self.pins.pop(frame.id, None)
            await self.say_load()
        elif isinstance(frame, RunJob):
            if frame.await_first:
                self._firsts[frame.request.id] = asyncio.get_running_loop().create_future()
            self._start(frame.request.id, self._run(frame, self.script.run))
        elif isinstance(frame, PrefillJob):
            self._start(frame.request.id, self._prefill(frame.request, self.script.prefill))
        elif isinstance(frame, Abort):
            if frame.request in self._jobs:
                self._jobs.pop(frame.request).cancel()
        elif not self._firsts[frame.request].done():
            self._firsts[frame.request].set_result(frame)

    async def _obey(self, frame: DrainNode | ResumeNode) -> None:
        if self.obeys:
            drains = isinstance(frame, DrainNode)
            drain = frame if isinstance(frame, DrainNode) else DrainNode()
            self.report = msgspec.structs.replace(
                self.report, reason=drain.reason, replaced_by=drain.replaced_by
            )
            await self.say_load("draining" if drains else "ready", requests=len(self._jobs))

    def _start(self, request: RequestId, work: Coroutine[Any, Any, None]) -> None:
        if request in self._jobs:
            self._jobs[request].cancel()
        self._jobs[request] = asyncio.create_task(work)

    async def _prefill(self, request: Request, behaviour: Behaviour) -> None:
        if behaviour == "fail":
            await self.say(JobFailed(request.id, request.attempt, self.script.failure))
        if behaviour != "answer":
            return
        firsts = tuple(self._delta(request, choice, 0) for choice in range(request.params.n))
        stats = RequestStats(prompt_tokens=len(request.prompt_ids), cached_tokens=8)
        await self.say(PrefillDone(request.id, request.attempt, firsts, self.script.stats or stats))

    async def _run(self, job: RunJob, behaviour: Behaviour) -> None:
        """Run a job; `behaviour` is the script's choice at its arrival."""
        request, outputs, ended = job.request, job.request.outputs, set(job.finished)
        if behaviour == "fail":
            await self.say(JobFailed(request.id, request.attempt, self.script.failure))
        if behaviour in ("fail", "silent"):
            return
        if request.pooling is not None:
            await asyncio.sleep(self.script.token_s)
            await self.say(Deltas((_pooled(request, self.report.pooling, self.script),)))
            return
        if job.await_first:
            frame = await self._firsts[request.id]
            if isinstance(frame, FirstTokens):
                outputs, ended = frame.outputs, set(frame.finished)
        length = self._length(request)
        end = length // 2 if behaviour == "half" else length
        for offset in range(min(map(len, outputs)), end):
            await asyncio.sleep(self.script.token_s)
            choices = [c for c, ids in enumerate(outputs) if c not in ended and len(ids) <= offset]
            await self.say(Deltas(tuple(self._delta(request, c, offset) for c in choices)))

    def _length(self, request: Request) -> int:
        return min(len(self.script.reply), request.params.max_tokens)

    def _delta(self, request: Request, choice: int, offset: int) -> Delta:
        token = self.script.reply[offset]
        last = offset + 1 == self._length(request)
        whole = offset + 1 == len(self.script.reply)
        prompt = len(request.prompt_ids)
        stats = RequestStats(prompt_tokens=prompt, cached_tokens=4, computed_tokens=prompt)
        return Delta(
            request.id,
            request.attempt,
            choice,
            offset,
            ids=(token,),
            text=_text(self.script.reply, offset),
            logprobs=_logprobs(token, request.params.logprobs, request.params.logprob_token_ids),
            finish=None if not last else ("stop" if whole else "length"),
            stats=self.script.stats or stats if last and choice + 1 == request.params.n else None,
            prompt_logprobs=_prompt_logprobs(request) if offset == choice == 0 else (),
        )


def vector_of_ids(ids: Sequence[int], pooling: PoolingParams) -> list[float]:
    """What a node that embeds answers: the number of even and odd ids, their sum, and 0."""
    even = sum(1 for token in ids if token % 2 == 0)
    vector = [float(even), float(len(ids) - even), float(sum(ids)), 0.0][: pooling.dimensions]
    length = math.hypot(*vector) if pooling.normalize else 1.0
    return [value / length for value in vector]


def _pooled(request: Request, task: Pooling, script: Script) -> Delta:
    """A classifier answers with the share of its first class: how often the prompt has an `e`."""
    assert request.pooling is not None, "only a pooling request gets a vector"
    ids, vector = request.prompt_ids, script.vector
    if vector is None and task == "embed":
        vector = vector_of_ids(ids, request.pooling)
    if vector is None:
        share = ids.count(ord("e")) / len(ids)
        vector = [share if request.pooling.activate else -share]
    stats = RequestStats(prompt_tokens=len(ids), cached_tokens=4, computed_tokens=len(ids))
    return Delta(
        *(request.id, request.attempt, 0, 0),
        finish="stop",
        stats=script.stats or stats,
        vector=struct.pack(f"<{len(vector)}f", *vector),
    )


def _text(reply: bytes, offset: int) -> str:
    """The character that the byte at `offset` completes; empty if it completes none."""
    first = offset
    while reply[first] & 0xC0 == 0x80 and first:
        first -= 1
    return reply[first : offset + 1].decode(errors="ignore")


def _prompt_logprobs(request: Request) -> tuple[PositionLogprobs, ...]:
    count = request.params.prompt_logprobs
    return tuple(
        position for token in request.prompt_ids[1:] for position in _logprobs(token, count)
    )


def _logprobs(
    token: int, count: int | None, named: Sequence[int] = ()
) -> tuple[PositionLogprobs, ...]:
    if count is None:
        return ()
    ranked = tuple(
        TokenLogprob(
            token + rank, -0.5 - rank, rank + 1, chr(token + rank), chr(token + rank).encode()
        )
        for rank in range(max(1, count))
    )
    asked = (TokenLogprob(id, -float(id) / 16, 0, chr(id), chr(id).encode()) for id in named)
    return (PositionLogprobs(ranked[0], ranked[:count], tuple(asked)),)
