"""A router that is killed under kept streams, alone or with a node: their clients get the rest from
the other router."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.router.server.test_several_routers import LIMIT_S, until_ready
from tests.support.clients.stream_events import plain_events
from tests.support.pools.processes import Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.integration

EVENT = re.compile(
    rb"id: (([0-9a-f]{32}):(\d+)(?::[0-9a-f]{1,8})?)\n(?:event: \S+\n)?data: (.*)\n\n"
)
# The last event of each dialect.
LAST = re.compile(rb'\[DONE\]|\{"type":"(message_stop|response\.(?:incomplete|completed))".*')
DECODES = re.compile(r"decode=(\S+)")
FAST = (
    *("--engine=sim", "--chunk-blocks=1", "--kv-blocks=4000", "--max-model-len=2048"),
    *("--sim-decode-ms=10", "--link-grace=2"),
)
TOKENS = 60


@dataclass
class Stream:
    """A client that asks `urls` in turn, whenever its connection breaks, for what it lacks. `node`
    is the first that decodes, `seen` the number of events before the first break."""

    path: str
    body: dict[str, Any]
    data: bytes = b""
    node: str = ""
    broke: int = 0
    seen: int = 0
    events: list[bytes] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.events) and LAST.fullmatch(self.events[-1]) is not None

    async def run(self, session: aiohttp.ClientSession, *urls: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.ended:
                headers, last = {"x-baton-resume": "60"}, EVENT.findall(self.data)
                if last:
                    headers["Last-Event-ID"] = last[-1][0].decode()
                url = urls[min(self.broke, len(urls) - 1)] + self.path
                with suppress(aiohttp.ClientError):
                    await self._read(session, url, headers)
                if not self.ended:
                    self.seen = self.seen if self.broke else len(self.events)
                    self.broke += 1
                    await asyncio.sleep(0.02)

    async def _read(self, session: aiohttp.ClientSession, url: str, headers: Any) -> None:
        try:
            async with session.post(url, json=self.body, headers=headers) as answer:
                if answer.status in (429, 503):
                    return  # it is starting, or full
                assert answer.status == 200, await answer.text()
                if found := DECODES.search(answer.headers["x-baton-placement"]):
                    self.node = self.node or found[1]
                async for chunk in answer.content.iter_any():
                    self.data += chunk
                    self.events = [event[3] for event in EVENT.findall(self.data)]
        finally:
            # Drop the event that the break cut in two.
            self.data = self.data[: self.data.rfind(b"\n\n") + 2] if b"\n\n" in self.data else b""

    def payloads(self) -> list[Any]:
        """The events without what differs from one stream to another."""
        events = EVENT.findall(self.data)
        assert [int(event[2]) for event in events] == list(range(1, len(events) + 1))
        names = {event[1] for event in events}
        assert len(names) == 1, "a stream began twice"
        return plain_events(self.data, *(name.decode() for name in names))


def bodies(number: int, count: int) -> list[Stream]:
    """Streams of each dialect in turn, some with several choices."""
    return [in_dialect(each, f"stream {number} {each} " * 8) for each in range(count)]


def in_dialect(number: int, text: str) -> Stream:
    """A stream of `TOKENS` tokens per choice."""
    messages = [{"role": "user", "content": text}]
    sampling: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "seed": number}
    usage = {"stream_options": {"include_usage": True}}
    response = {name: sampling[name] for name in ("ignore_eos", "seed")}
    dialects: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", sampling | usage | {"messages": messages, "temperature": 0}),
        ("/v1/completions", sampling | usage | {"prompt": text, "n": 2}),
        ("/v1/responses", response | {"input": text, "max_output_tokens": TOKENS}),
        ("/v1/messages", sampling | {"messages": messages}),
        (
            "/inference/v1/generate",
            usage | {"token_ids": list(text.encode()), "sampling_params": sampling | {"n": 2}},
        ),
    ]
    path, body = dialects[number % len(dialects)]
    return Stream(path, body | {"stream": True})


async def check_kill(
    cluster: Cluster,
    session: aiohttp.ClientSession,
    dead: int,
    streams: list[Stream],
    at: int,
    *,
    node: str = "",
) -> None:
    """Kill a router when the first stream has `at` events, and perhaps a node with it. Each stream
    is that of a router that nobody kills."""
    killed, alive = cluster.routers[dead], cluster.routers[1 - dead]
    tasks = []
    for stream in streams:
        tasks.append(asyncio.create_task(stream.run(session, killed.url, alive.url)))
        await asyncio.sleep(0.01)  # so they are at different positions
    await until(lambda: len(streams[0].events) >= at or streams[0].ended)
    kills = [killed.kill, *([cluster.nodes[node].kill] if node else [])]
    await asyncio.gather(*map(asyncio.to_thread, kills))
    await asyncio.gather(*tasks)
    undisturbed = [Stream(stream.path, stream.body) for stream in streams]
    await asyncio.gather(*(stream.run(session, alive.url) for stream in undisturbed))
    for stream, whole in zip(streams, undisturbed, strict=True):
        assert whole.broke == 0
        assert by_choice(stream.payloads()) == by_choice(whole.payloads())


def by_choice(events: list[Any]) -> dict[Any, list[Any]]:
    """The events of each choice; how those of several choices alternate depends on the node."""
    found: dict[Any, list[Any]] = {}
    for event in events:
        choices = event.get("choices")
        choice = choices[0]["index"] if choices else "all"
        found.setdefault(choice, []).append(event)
    return found


@pytest.mark.timeout(600)
async def test_no_kept_stream_breaks_when_its_router_is_killed() -> None:
    with Cluster(0, 2, routers=2, flags=FAST, watch_answers=False) as cluster:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await until_all_ready(session, cluster)
            streams = bodies(0, 12)
            await check_kill(cluster, session, 0, streams, at=20)
            check_broken(streams)
            cluster.routers[0].start()
            await until_all_ready(session, cluster)
            streams = bodies(1, 12)
            await check_kill(cluster, session, 1, streams, at=20, node="decode-0")
            check_broken(streams)
            both = [stream for stream in streams if stream.broke and stream.node == "decode-0"]
            assert both, "no stream lost its node and its router"


def check_broken(streams: list[Stream]) -> None:
    """Raise AssertionError unless the kill hit most streams, and each dialect."""
    broken = [stream.path for stream in streams if stream.broke]
    assert len(broken) > 8
    assert len(set(broken)) == 5


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_no_kept_stream_breaks_however_often_its_routers_are_killed() -> None:
    rng = random.Random(1)
    with Cluster(1, 2, routers=2, flags=FAST, watch_answers=False) as cluster:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await until_all_ready(session, cluster)
            for kill in range(50):
                at = rng.randrange(2 * TOKENS)
                node = rng.choice(("", "decode-0"))
                await check_kill(cluster, session, kill % 2, bodies(kill, 5), at, node=node)
                cluster.routers[kill % 2].start()
                if node:
                    cluster.nodes[node].start()
                await until_all_ready(session, cluster)


async def until_all_ready(session: aiohttp.ClientSession, cluster: Cluster) -> None:
    for router in cluster.routers:
        await until_ready(session, router.url, len(cluster.nodes))
