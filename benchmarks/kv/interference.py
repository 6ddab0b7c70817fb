"""The effect of KV transfers on a decoding node: lag of its server's loop, length of a step.

    python -m benchmarks.kv.interference [--quick]

Claims: while 2 GiB are put and fetched in turn, the event loop of the node's server is less than 5
ms late at p99, and a decode step grows by less than 10 %. The node is real: a server process and an
engine process with the simulated engine, whose device takes 10 ms a step and whose host work is
real. 8 requests decode all the time. The node's own connector moves the KV, to a redis-server on
this machine (see benchmarks/support/kv/busy_engine.py). Quiet and busy times take turns. A step is
one whole iteration of the step loop.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import psutil

from baton_engine.config.engine_config import SimConfig
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.settings import NodeSettings
from baton_protocol.ids import RequestId
from baton_protocol.link import Abort, RunJob, to_node_codec
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.figures import Verdict, exit_code, machine, percentile, spread
from benchmarks.support.meter import FOLDER, Meter, Notes
from benchmarks.support.role_processes import answer_of, process
from benchmarks.support.servers import HOST, free_port

REQUESTS = 8
MODEL_LEN = 8192
DECODE_MS = 10.0
QUIET_S = 1.5
MOVING_S = 120.0
LAG_MS = 5.0
GROWTH = 0.10


@dataclass(frozen=True)
class Window:
    """A stretch of time.monotonic()."""

    begin: float
    end: float


def settings(store: EmbeddedStore, port: int) -> NodeSettings:
    """8 KiB of KV per token, 1 MiB per chunk."""
    return NodeSettings(
        node="busy",
        role="decode",
        port=port,
        engine="sim",
        dtype="bfloat16",
        kv_blocks=REQUESTS * MODEL_LEN // 16,
        chunk_blocks=8,
        max_model_len=MODEL_LEN,
        index_url=store.index_url,
        data_urls=store.data_urls,
        write_behind_bandwidth=0,
        sim=SimConfig(decode_ms=DECODE_MS, layers=8, kv_heads=4, head_dim=64),
    )


def node(made: NodeSettings, place: Path) -> AbstractContextManager[psutil.Process]:
    """Its notes are written when it ends."""
    words = (sys.executable, "-m", "benchmarks.support.kv.busy_node")
    return process(words, msgspec.json.encode(made), {FOLDER: str(place)})


@asynccontextmanager
async def decoding(port: int) -> AsyncIterator[None]:
    """Requests that do not end by themselves, of a router that reads what it is sent."""
    url = f"http://{HOST}:{port}"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url + "/link", max_msg_size=0, compress=0) as socket,
    ):
        codec = to_node_codec()
        for number in range(REQUESTS):
            await socket.send_bytes(codec.encode(RunJob(_request(number))))

        async def read() -> None:
            async for _ in socket:
                pass

        reading = asyncio.create_task(read())
        yield
        for number in range(REQUESTS):  # else their chunks would be saved when the node drains
            await socket.send_bytes(codec.encode(Abort(RequestId(f"decoding-{number}"), 1)))
        reading.cancel()


def _request(number: int) -> Request:
    return Request(
        id=RequestId(f"decoding-{number}"),
        attempt=1,
        prompt_ids=tuple(b"%64d" % number),
        params=SamplingParams(max_tokens=MODEL_LEN - 100, temperature=0.0, ignore_eos=True),
        outputs=((),),
    )


async def alternate(port: int, meter: Meter, size: int, passes: int) -> list[tuple[Window, Window]]:
    """Quiet and busy windows; the first pair warms up."""
    found = []
    async with decoding(port):
        for _ in range(passes + 1):
            begin = time.monotonic()
            await asyncio.sleep(QUIET_S)
            middle = time.monotonic()
            meter.ask(size)
            async with asyncio.timeout(MOVING_S):
                while meter.moved < meter.asked:
                    await asyncio.sleep(0.005)
            found.append((Window(begin, middle), Window(middle, time.monotonic())))
    return found[1:]


def run(options: argparse.Namespace, place: Path) -> list[tuple[Window, Window]]:
    with EmbeddedStore() as store:
        port = free_port()
        with node(settings(store, port), place):
            answer_of(f"http://{HOST}:{port}/ready")
            return asyncio.run(alternate(port, Meter(place), options.mib << 20, options.passes))


def report(
    pairs: Sequence[tuple[Window, Window]], lags: Notes, turns: Notes, mib: int
) -> list[Verdict]:
    rows = {"quiet": [quiet for quiet, _ in pairs], "busy": [busy for _, busy in pairs]}
    middles: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    print(f"{'':6} {'server loop late, p99 ms':>26} {'step, mean ms':>24} {'step, p99 ms':>24}")
    for name, windows in rows.items():
        steps = [[s * 1e3 for s in turns.between(w.begin, w.end)] for w in windows]
        late[name] = [percentile(lags.between(w.begin, w.end), 0.99) * 1e3 for w in windows]
        middles[name] = [statistics.fmean(found) for found in steps]
        tails = [percentile(found, 0.99) for found in steps]
        print(f"{name:6} {spread(late[name]):>26} {spread(middles[name]):>24} {spread(tails):>24}")
    rates = [mib / 1024 / (busy.end - busy.begin) * 1.073741824 for _, busy in pairs]
    grown = statistics.median(
        busy / quiet - 1 for quiet, busy in zip(middles["quiet"], middles["busy"], strict=True)
    )
    lag = statistics.median(late["busy"])
    print(f"moved at {spread(rates)} GB/s")
    return [
        _say(f"server loop late by {lag:.2f} ms at p99", lag < LAG_MS, f"{LAG_MS:g} ms"),
        _say(f"a decode step grows by {grown:.1%}", grown < GROWTH, f"{GROWTH:.0%}"),
    ]


def _say(what: str, met: bool, goal: str) -> Verdict:
    text = f"{what}, goal < {goal} {'met' if met else 'MISSED'}"
    print(text)
    return Verdict(met, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--mib", type=int, default=2048, help="MiB moved in each pass")
    parser.add_argument("--quick", action="store_true", help="3 passes of 256 MiB")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.mib = 3, 256
    print(f"{options.mib} MiB of KV in each of {options.passes} passes; {machine()}")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        place = Path(name)
        pairs = run(options, place)
        lags, turns = Notes.read(place / "lags.notes"), Notes.read(place / "turns.notes")
    return exit_code(report(pairs, lags, turns, options.mib), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
