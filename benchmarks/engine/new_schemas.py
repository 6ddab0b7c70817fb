"""The effect of compiling schemas on concurrent streams: token gaps of a running answer.

    python -m benchmarks.engine.new_schemas [--passes 5] [--seconds 12] [--quick]

Claim: requests with new JSON schemas of 2 KB lengthen the token gaps of an answer that streams
beside them by at most 10 %, at the median and at p99, compared with requests without a schema.

Router and node are processes; the node serves the demo model. One client streams an answer for
`--seconds`. Every 200 ms another request for 2 tokens arrives, whether or not the last one is
answered: in turn without a schema, with a new one each time, and with a known one, which shows the
cost of the masks alone. Gaps are measured at the client's socket. `--quick` runs one pass of 4 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

import aiohttp

from baton_cli.models.demo_model import fetch_demo
from baton_node.settings import NodeSettings
from baton_router import RouterSettings
from benchmarks.support.figures import (
    Verdict,
    exit_code,
    machine,
    percentile,
    ratio,
    rotated,
    spread,
    times_at_most,
)
from benchmarks.support.role_processes import answer_of, decode_node, model_of, router
from benchmarks.support.servers import HOST, free_port

GOAL = 1.10
EVERY_S = 0.2
WARM_S = 3.0
FIELDS = 40
KINDS = ("none", "new", "known")
PROMPT = "The people who live in this town, each with name, age and trade, are: "
JSON = dict[str, Any]


def new_schema(serial: int) -> JSON:
    """2 KB that no other serial has."""
    fields = {f"of_{serial}_{n}": {"type": "string", "maxLength": n} for n in range(1, FIELDS)}
    return {"type": "object", "properties": fields, "required": list(fields)}


class Client:
    """Of the router at `port`; what it sends is new each time."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._url = f"http://{HOST}:{port}/v1/completions"
        self._model = model_of(port)
        self._serial: Iterator[int] = count()

    async def gaps(self, kind: str, seconds: float) -> list[float]:
        """Milliseconds between the tokens of an answer, while requests of this kind arrive."""
        first, others = asyncio.Event(), list[asyncio.Task[None]]()
        stream = asyncio.create_task(self._stream(first, seconds))
        await asyncio.wait(
            (stream, asyncio.create_task(first.wait())), return_when="FIRST_COMPLETED"
        )
        begun = time.perf_counter()
        for number in count(1):
            await asyncio.sleep(max(0.0, begun + number * EVERY_S - time.perf_counter()))
            if stream.done():
                break
            others.append(asyncio.create_task(self._ask(kind)))
        await asyncio.gather(*others)
        return await stream

    async def _stream(self, first: asyncio.Event, seconds: float) -> list[float]:
        gaps: list[float] = []
        body = self._body({"stream": True, "max_tokens": 4000, "ignore_eos": True})
        async with self._session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            begun = last = 0.0
            async for line in answer.content:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                if b'"error"' in line:
                    raise SystemExit(f"the stream broke: {line.decode()}")
                if last:
                    gaps.append(1e3 * (now - last))
                else:
                    begun = now
                    first.set()
                last = now
                if now - begun > seconds:
                    return gaps
        raise SystemExit(f"the answer ended within {seconds:g} s; use fewer --seconds")

    async def _ask(self, kind: str) -> None:
        fields: JSON = {"max_tokens": 2, "ignore_eos": True}
        if kind != "none":
            serial = next(self._serial) if kind == "new" else -1
            fields["structured_outputs"] = {"json": new_schema(serial)}
        async with self._session.post(self._url, json=self._body(fields)) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise SystemExit(f"a request with {kind} schema got {answer.status}: {text}")
            assert json.loads(text)["usage"]["completion_tokens"] == 2, text

    def _body(self, fields: JSON) -> JSON:
        prompt = f"{next(self._serial)}. {PROMPT}"
        return {"model": self._model, "prompt": prompt, "temperature": 0, **fields}


async def measure(port: int, passes: int, seconds: float) -> Mapping[str, list[list[float]]]:
    """The gaps of each pass, by kind. Each kind is warmed once."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit) as session:
        client = Client(session, port)
        for kind in KINDS:
            await client.gaps(kind, WARM_S)
        for number in range(passes):
            for kind in rotated(KINDS, number):
                found[kind].append(await client.gaps(kind, seconds))
    return found


def run(options: argparse.Namespace) -> Mapping[str, list[list[float]]]:
    folder = fetch_demo(None, print)
    with ExitStack() as stack:
        node, port = free_port(), free_port()
        settings = NodeSettings(
            node="decode", role="decode", port=node, model=str(folder), kv_blocks=2000
        )
        stack.enter_context(decode_node(settings))
        answer_of(f"http://{HOST}:{node}/ready")
        router_settings = RouterSettings(port=port, nodes=(f"http://{HOST}:{node}",))
        stack.enter_context(router(router_settings))
        answer_of(f"http://{HOST}:{port}/ready")
        return asyncio.run(measure(port, options.passes, options.seconds))


def report(found: Mapping[str, list[list[float]]]) -> list[Verdict]:
    shares = {"median": 0.5, "p99": 0.99}
    figures = {
        kind: {name: [percentile(gaps, share) for gaps in passes] for name, share in shares.items()}
        for kind, passes in found.items()
    }
    print(f"{'schemas':8} {'gaps':>6} {'median, ms':>22} {'p99, ms':>22} {'mean, ms':>10}")
    for kind, passes in found.items():
        middle, tail = (spread(figures[kind][name], 1) for name in shares)
        every = [gap for gaps in passes for gap in gaps]
        print(f"{kind:8} {len(every):6} {middle:>22} {tail:>22} {statistics.fmean(every):10.2f}")
    verdicts = []
    for name in shares:
        plain, new, known = (figures[kind][name] for kind in KINDS)
        verdicts.append(times_at_most(new, plain, GOAL))
        print(
            f"token gap beside new schemas, {name}: {verdicts[-1].text};"
            f" beside a known one {ratio(known, plain):.2f}x"
        )
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=5, help="passes of each kind (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="seconds of each pass (default 12)"
    )
    parser.add_argument("--quick", action="store_true", help="one pass of 4 s")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.seconds = 1, 4.0
    size = len(json.dumps(new_schema(100)))
    print(f"schemas of {size} bytes, one request each {EVERY_S:g} s; {machine()}")
    return exit_code(report(run(options)), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
