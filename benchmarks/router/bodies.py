"""The effect of large bodies on the router's memory, and on the latency of its other clients.

    python -m benchmarks.router.bodies [--seconds 20] [--clients 16] [--kinds text ...] [--quick]

Claim: 16 clients of one tenant that each send a body of 16 MB at the same moment, every 5 s, raise
the router's resident memory by at most 256 MB at its peak, and another tenant's p99 of the time to
the first token by at most 1.5x.

The router is a process in front of a node with the simulated engine, which serves the demo model's
tokenizer (`baton model fetch-demo`). Each kind of body has a new router. The small tenant sends the
same requests alone, then while the senders send the same bytes to a process that discards them (on
few cores this alone delays others), then while they send them to the router: the goal compares the
last with the second. Memory is the kernel's count (VmHWM, reset before the bodies arrive; VmRSS 5 s
after them). Exit 1 if a goal is missed. `--quick` sends one kind for 6 s.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from baton_cli.models.demo_model import fetch_demo
from baton_engine.config.engine_config import SimConfig
from baton_node.settings import NodeSettings
from baton_router import RouterSettings
from benchmarks.support import role_processes
from benchmarks.support.figures import Verdict, exit_code, machine, percentile
from benchmarks.support.role_processes import answer_of, decode_node, process
from benchmarks.support.servers import HOST, free_port

GOAL_MB, GOAL_RATIO = 256.0, 1.5
BODY_BYTES = 15_600_000
SMALL, LARGE = "key-of-small", "key-of-large"
KEYS = f"small {SMALL}\nlarge {LARGE}\n"
PATHS = {"chat": "/v1/chat/completions"}
PER_S = 15.0
EVERY_S = 5.0
SETTLE_S = 5.0
WORDS = "the router of a pool reads each request once, and a node answers it in its own time. "


def _text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def _ids(size: int) -> list[int]:
    return [10_000 + number % 30_000 for number in range(size // 6)]


BODIES: dict[str, Callable[[int], object]] = {
    "text": lambda size: {"prompt": _text(size)},
    "one word": lambda size: {"prompt": "x" * size},
    "unusual characters": lambda size: {"prompt": "\u2603\u00e9\u4e16 " * (size // 9)},
    "texts": lambda size: {"prompt": [_text(30_000)] * (size // 30_000)},
    "chat": lambda size: {"messages": [{"role": "user", "content": _text(size)}]},
    "ids": lambda size: {"prompt": _ids(size)},
    "lists of ids": lambda size: {"prompt": [_ids(42_000)] * (size // 42_000)},
    "empty objects": lambda size: {"prompt": "x", "unknown": [{}] * (size // 3)},
}


def send(port: int, kind: str, clients: int, seconds: float) -> None:
    """The sending process: all clients at once, again and again."""
    body = {"max_tokens": 1, **BODIES[kind](BODY_BYTES)}  # type: ignore[dict-item]
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    answers: collections.Counter[str] = collections.Counter()
    began = time.monotonic()

    def client() -> None:
        turn = 0
        while (due := began + turn * EVERY_S) < began + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            turn = max(turn + 1, int((time.monotonic() - began) / EVERY_S))
            connection = http.client.HTTPConnection(HOST, port, timeout=300)
            headers = {"Authorization": f"Bearer {LARGE}", "Content-Type": "application/json"}
            try:
                connection.request("POST", PATHS.get(kind, "/v1/completions"), data, headers)
                answer = connection.getresponse()
                response = json.loads(answer.read())
                code = response["error"]["code"] if "error" in response else ""
                answers[f"{answer.status} {code}".strip()] += 1
            except (OSError, http.client.HTTPException) as error:
                answers[type(error).__name__] += 1
            finally:
                connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("   ", len(data), "bytes each:", dict(answers), flush=True)


def sink(port: int) -> None:
    """Reads requests and answers each with 400; of its bytes it keeps none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while left:
            left -= len(await reader.read(min(left, 1 << 18)))
        writer.write(b"HTTP/1.1 400 Sink\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, HOST, port) as server:
            await server.serve_forever()

    asyncio.run(run())


async def firsts(port: int, seconds: float) -> list[float]:
    """The small tenant's times to the first token, of requests at random times for `seconds`."""
    rng, tasks = random.Random(1), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> float:
            body = {"prompt": _text(400), "max_tokens": 4, "stream": True}
            headers = {"Authorization": f"Bearer {SMALL}"}
            began, first = time.perf_counter(), 0.0
            url = f"http://{HOST}:{port}/v1/completions"
            async with session.post(url, json=body, headers=headers) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if not first and line.startswith(b"data: {"):
                        first = time.perf_counter() - began
            return first

        began, at = time.perf_counter(), 0.0
        while (at := at + rng.expovariate(PER_S)) < seconds:
            await asyncio.sleep(began + at - time.perf_counter())
            tasks.append(asyncio.create_task(ask()))
        return list(await asyncio.gather(*tasks))


def memory_mb(pid: int, name: str) -> float:
    """VmRSS or VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"the kernel does not report {name}")


def measure(kind: str, options: argparse.Namespace, model: Path) -> Verdict:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        (folder / "keys").write_text(KEYS)
        node, port = free_port(), free_port()
        settings = NodeSettings(
            node="decode",
            role="decode",
            port=node,
            engine="sim",
            model=str(model),
            kv_blocks=20_000,
            max_model_len=8192,
            sim=SimConfig(prefill_ms_per_token=0.1, decode_ms=10.0),
        )
        stack.enter_context(decode_node(settings))
        answer_of(f"http://{HOST}:{node}/ready")
        router_settings = RouterSettings(
            port=port, nodes=(f"http://{HOST}:{node}",), api_keys=str(folder / "keys")
        )
        router = stack.enter_context(role_processes.router(router_settings))
        answer_of(f"http://{HOST}:{port}/ready")
        asyncio.run(firsts(port, 3.0))  # the node's speeds are measured
        alone = asyncio.run(firsts(port, options.seconds))
        waste = free_port()
        mine = (sys.executable, "-m", "benchmarks.router.bodies")
        stack.enter_context(process((*mine, "--sink", str(waste))))
        elsewhere = beside(stack, waste, port, kind, options)
        before = memory_mb(router.pid, "VmRSS")
        Path(f"/proc/{router.pid}/clear_refs").write_text("5")
        here = beside(stack, port, port, kind, options)
        peak, after = memory_mb(router.pid, "VmHWM"), memory_mb(router.pid, "VmRSS")
    raised = peak - before
    phases = (alone, elsewhere, here)
    p50s, p99s = ([1e3 * percentile(one, share) for one in phases] for share in (0.5, 0.99))
    met = raised <= GOAL_MB and p99s[2] <= GOAL_RATIO * p99s[1]
    verdict = Verdict(
        met,
        f"{kind:<18} router {before:.0f} MB, peak {raised:+.0f}, after {after - before:+.0f}"
        f" (goal +{GOAL_MB:g}); first token alone / beside bodies elsewhere / here, ms:"
        f" p50 {' / '.join(f'{one:.0f}' for one in p50s)},"
        f" p99 {' / '.join(f'{one:.0f}' for one in p99s)}: {p99s[2] / p99s[1]:.2f}x"
        f" (goal {GOAL_RATIO:g}x) {'met' if met else 'MISSED'}",
    )
    print(verdict.text, flush=True)
    return verdict


def beside(
    stack: ExitStack, to: int, port: int, kind: str, options: argparse.Namespace
) -> list[float]:
    """The small tenant's times at `port` while the senders send to port `to`, until they ended."""
    words = (sys.executable, "-m", "benchmarks.router.bodies", "--send", str(to))
    load = ("--kinds", kind, "--clients", str(options.clients))
    sending = stack.enter_context(process((*words, *load, "--seconds", str(options.seconds + 3))))
    time.sleep(2.0)  # it has made its bodies
    found = asyncio.run(firsts(port, options.seconds))
    sending.wait()
    time.sleep(SETTLE_S)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each phase")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", choices=list(BODIES), default=list(BODIES))
    parser.add_argument("--quick", action="store_true", help="one kind, 6 s")
    parser.add_argument("--send", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--sink", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.sink:
        sink(options.sink)
        return 0
    if options.send:
        send(options.send, options.kinds[0], options.clients, options.seconds)
        return 0
    if options.quick:
        options.kinds, options.seconds = options.kinds[:1], 6.0
    print(machine())
    model = fetch_demo(None, lambda line: None)
    verdicts = [measure(kind, options, model) for kind in options.kinds]
    return exit_code(verdicts, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
