"""The effect of a tenant that floods a real pool on another tenant's time to the first token.

    python -m benchmarks.router.fairness [--passes 2] [--seconds 30] [--quick]

Claim: a tenant that sends ten times its usual load leaves another tenant's p99 within 1.5x of that
without it, and so does one whose single call asks for 16,384 sequences: 256 prompts with n 64. The
baseline is the same flood by the measured tenant itself, which nothing limits.

A pool is `baton up` with the simulated engine, a process tree with a real store. The clients run
here in an open loop: requests are sent at random times, whatever happens to earlier ones. The usual
load is about a fifth of the pool's capacity. Prompts are new, and answers have 0.5 to 1.5 times the
given number of tokens. Phases on the same pool take turns: alone, beside the other tenant's flood,
beside its own; in each phase of a pass requests are sent at the same times. A flood has started
before anything is measured, and the number of its answers is printed. The large call is sent again
whenever it ends; its answers that ended in time are counted. A request that waits for 30 s is
refused and counts with that time. Exit 1 if a ratio misses the goal.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import string
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.support.figures import percentile
from benchmarks.support.role_processes import answer_of, process
from benchmarks.support.servers import HOST, free_port

GOAL = 1.5
FLOOD = 10
KEY = "key-of-globex"
KEYS = "globex key-of-globex\nglobex another-of-globex\nacme key-of-acme\n"
PHASES = {"alone": "", "flood of another": "key-of-acme", "flood of its own": "another-of-globex"}
BEFORE_S = 5.0


@dataclass(frozen=True)
class Load:
    """`per_s` is usual. A flood is FLOOD times of it, or calls of `call` prompts and choices, one
    after the other."""

    name: str
    prompt: int
    answer: int
    per_s: float
    flags: tuple[str, ...]
    call: tuple[int, int] | None = None

    @property
    def flood(self) -> str:
        if self.call is None:
            return f"{FLOOD * self.per_s:g}/s"
        prompts, n = self.call
        return f"calls of {prompts} prompts, n {n}"


LOADS = (
    Load("prompts of 64 ms", 256, 64, 3.0, ("--sim-prefill-ms-per-token", "0.25")),
    Load(
        "one call of 16,384 sequences",
        *(256, 64, 3.0),
        (
            *("--sim-prefill-ms-per-token", "0.25", "--sim-decode-ms", "100"),
            *("--max-call-sequences", "16384"),
        ),
        call=(256, 64),
    ),
    Load("prompts of 256 ms", 1024, 64, 0.8, ("--sim-prefill-ms-per-token", "0.25")),
    Load(
        "one node for all",
        *(256, 64, 2.0),
        ("--sim-prefill-ms-per-token", "0.25", "--prefill", "0"),
    ),
    Load(
        "64 long answers",
        *(32, 200, 3.0),
        ("--sim-prefill-ms-per-token", "0.05", "--max-num-seqs", "64"),
    ),
)


@dataclass
class Phase:
    """Seconds to the first token, of all passes; answers to the flood per second, of each."""

    firsts: list[float] = field(default_factory=list)
    flood_per_s: list[float] = field(default_factory=list)


class Client:
    """`ended`: answers so far."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, load: Load, rng: random.Random
    ) -> None:
        self._url = url
        self._session = session
        self._load = load
        self._rng = rng
        self.ended = 0

    async def ask(self, key: str) -> float:
        load, rng = self._load, self._rng
        body = {
            "prompt": "".join(rng.choices(string.ascii_letters, k=load.prompt)),
            "max_tokens": rng.randint(load.answer // 2, load.answer * 3 // 2),
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        began, first = time.perf_counter(), 0.0
        async with self._session.post(self._url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not first and line.startswith(b"data: {"):
                    first = time.perf_counter() - began
        self.ended += 1
        return first

    async def call(self, key: str, prompts: int, n: int) -> None:
        """Send calls with `prompts` prompts and `n` choices one after the other until cancelled."""
        load, rng = self._load, self._rng
        headers = {"Authorization": f"Bearer {key}"}
        while True:
            body = {
                "prompt": [
                    "".join(rng.choices(string.ascii_letters, k=load.prompt))
                    for _ in range(prompts)
                ],
                "n": n,
                "max_tokens": load.answer,
                "ignore_eos": True,
                "stream": True,
            }
            async with self._session.post(self._url, json=body, headers=headers) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    self.ended += b'"finish_reason":"' in line

    async def stream(
        self, key: str, per_s: float, seconds: float, seed: int
    ) -> list[asyncio.Task[float]]:
        """Send requests at random times for `seconds`."""
        rng, began, at = random.Random(seed), time.perf_counter(), 0.0
        tasks = []
        while (at := at + rng.expovariate(per_s)) < seconds:
            await asyncio.sleep(began + at - time.perf_counter())
            tasks.append(asyncio.create_task(self.ask(key)))
        return tasks


async def timed(
    client: Client, load: Load, flood_key: str, seconds: float, seed: int, found: Phase
) -> None:
    flood, calling = None, None
    if flood_key and load.call is not None:
        calling = asyncio.create_task(client.call(flood_key, *load.call))
    elif flood_key:
        streaming = client.stream(flood_key, FLOOD * load.per_s, BEFORE_S + seconds, -1 - seed)
        flood = asyncio.create_task(streaming)
    await asyncio.sleep(BEFORE_S)
    before = client.ended
    tasks = await client.stream(KEY, load.per_s, seconds, seed)
    answers = client.ended - before - sum(task.done() for task in tasks)
    found.flood_per_s.append(answers / seconds)
    found.firsts += await asyncio.gather(*tasks)
    if calling is not None:
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling
    if flood is not None:
        left = await flood
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def measure(url: str, load: Load, options: argparse.Namespace) -> Mapping[str, Phase]:
    found: defaultdict[str, Phase] = defaultdict(Phase)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(url + "/v1/completions", session, load, random.Random(0))
        # Nodes measure their speeds.
        await asyncio.gather(*await client.stream(KEY, load.per_s, BEFORE_S, 0))
        for seed in range(1, options.passes + 1):
            for phase, key in PHASES.items():
                await timed(client, load, key, options.seconds, seed, found[phase])
    return found


def run(load: Load, options: argparse.Namespace) -> Mapping[str, Phase]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        (folder / "keys").write_text(KEYS)
        port = free_port()
        flags = ("--engine", "sim", "--sim-decode-ms", "20", "--api-keys", str(folder / "keys"))
        words = (sys.executable, "-m", "baton_cli", "up", "--port", str(port), *flags, *load.flags)
        admin = {"BATON_ADMIN_KEY": "admin-of-the-benchmark"}
        stack.enter_context(process(words, variables=admin, quiet=True))
        url = f"http://{HOST}:{port}"
        answer_of(url + "/ready")
        return asyncio.run(measure(url, load, options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds of each phase of a pass"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one pass of 10 s of the first two loads"
    )
    options = parser.parse_args()
    if options.quick:
        options.passes, options.seconds = 1, 10.0
    met = True
    for load in LOADS[:2] if options.quick else LOADS:
        found = run(load, options)
        alone = percentile(found["alone"].firsts, 0.99)
        print(f"{load.name}, {load.per_s:g} requests/s, flood {load.flood}")
        for name, phase in found.items():
            firsts, summary = phase.firsts, ""
            p50, p99 = percentile(firsts, 0.5), percentile(firsts, 0.99)
            if name != "alone":
                rate = statistics.median(phase.flood_per_s)
                summary = f"   {p99 / alone:5.2f}x   flood gets {rate:5.1f} answers/s"
            if name == "flood of another":
                fair = p99 < GOAL * alone
                summary += f"   goal < {GOAL:g}x {'met' if fair else 'MISSED'}"
                met = met and fair
            print(
                f"  {name:<17} n={len(firsts):<4} p50 {1e3 * p50:7.0f} ms"
                f"   p99 {1e3 * p99:7.0f}{summary}",
                flush=True,
            )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
