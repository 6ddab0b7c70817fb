"""Put and get of KV-sized values: the whole library beside LMCache, redis-py and bare sockets.

    python -m benchmarks.kv.put_get [--quick] [--unix] [--kib 64 256 ...] [--server PROGRAM]

Claims, checksum included: at least the rate of LMCache's C++ client; for 1, 2 and 4 MiB also 1.5
times redis-py's gets, and 0.8 times a bare socket loop with as many threads and connections. All
put and get the same number of values on one server over TCP, in turn, after one warm-up pass: new
keys cost page faults that overwritten ones do not. Then the library runs on two data servers beside
one.

If other programs run on the machine, `chrt -r 1` before the command keeps them off.

"staged" is the library with memory that sockets cannot reach, such as a GPU's: it copies each
value.

Prints GB/s of payload, median and range of the passes, and the library's ratio to each contender.
redis-py parses with hiredis, which Baton installs. LMCache, and redis-py in an environment of its
own, take part if `make peers` has installed them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import redis

from baton_kvstore.data.tuning import Tuning
from baton_protocol.ids import BlockHash
from benchmarks.support.figures import Verdict, at_least, exit_code, machine, ratio, rotated, spread
from benchmarks.support.kv.contenders import KIB, Act, Bare, Plane, RedisPy, Side
from benchmarks.support.kv.peers import NAMES, Peer, Worker, peers
from benchmarks.support.servers import Server, data_servers, empty, version

SIZES = (1024, 2048, 4096)  # KiB
MOST_VALUES = 256
OURS = "baton"
CORES_FOR_TWO = 4  # two servers, and on our side as much work as they have


@dataclass(frozen=True)
class Contender:
    """`goals`: the least ratio of the library's rate to this one's, per act."""

    side: Side
    goals: dict[Act, float]


def sides(
    server: Server, worker: Worker | None, kib: int, options: argparse.Namespace
) -> list[Contender]:
    names = names_of(count_of(kib, options))
    threads, url = options.threads, address(server, options)
    own_goals = kib in SIZES
    redis_py: dict[Act, float] = {"get": 1.5} if own_goals else {}
    python_client = f"redis-py {redis.__version__}, {threads} threads"
    found = [
        Contender(Plane(OURS, [url], kib, names, threads), {}),
        Contender(
            Bare("bare sockets", url, kib, names, threads),
            {"put": 0.8, "get": 0.8} if own_goals else {},
        ),
        Contender(Plane("baton, staged", [url], kib, names, threads, staged=True), {}),
        Contender(RedisPy(python_client, url, kib, names, threads), redis_py),
    ]
    if worker is not None:
        goals: dict[str, dict[Act, float]] = {
            "lmcache": {"put": 1.0, "get": 1.0},
            "redis-py": redis_py,
        }
        found += [
            Contender(Peer(worker, key, kib, len(names)), goals[key])
            for key in worker.peers
            if key in (options.rivals or NAMES)
        ]
    return found


def address(server: Server, options: argparse.Namespace) -> str:
    return server.unix if options.unix else server.tcp


def count_of(kib: int, options: argparse.Namespace) -> int:
    """Values per pass."""
    return int(max(1, min(MOST_VALUES, options.mib * 1024 // kib)))


def names_of(count: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(b"%d" % n).digest()[:16]) for n in range(count)]


def measure(
    contenders: Sequence[Side], size: int, passes: int
) -> dict[tuple[str, Act], list[float]]:
    """GB/s of each, pass by pass, the first one left out."""
    rates: dict[tuple[str, Act], list[float]] = {}
    acts: tuple[Act, ...] = ("put", "get")
    for turn in range(passes + 1):
        for side in rotated(contenders, turn):
            for act in acts:
                seconds = side.seconds(act)
                if turn:
                    rates.setdefault((side.name, act), []).append(size / seconds / 1e9)
    return rates


def compare(
    server: Server, worker: Worker | None, kib: int, options: argparse.Namespace
) -> list[Verdict]:
    contenders = sides(server, worker, kib, options)
    size = count_of(kib, options) * kib * KIB
    rates = measure([each.side for each in contenders], size, options.passes)
    verdicts = []
    for act in ("put", "get"):
        ours = rates[OURS, act]
        print(f"{kib} KiB {act}  {OURS:44} {spread(ours):>18}")
        for each in contenders[1:]:
            theirs = rates[each.side.name, act]
            comparison = f"{ratio(ours, theirs):5.2f}x"
            if act in each.goals:
                verdict = at_least(ours, theirs, each.goals[act])
                verdicts.append(verdict)
                comparison = verdict.text
            print(f"{'':13} {each.side.name:44} {spread(theirs):>18}  {comparison}")
    for each in contenders:
        each.side.close()
    empty([server.tcp])
    return verdicts


def compare_servers(servers: Sequence[Server], options: argparse.Namespace) -> list[Verdict]:
    """Two data servers beside one: a goal only where there are cores for them."""
    cores = os.cpu_count() or 1
    able = cores >= CORES_FOR_TWO
    why = "goal 1.5x" if able else "no goal: one server and its client use all cores"
    print(f"\ntwo data servers beside one: {cores} cores, {why}")
    verdicts = []
    urls = [address(server, options) for server in servers]
    for kib in options.kib:
        names = names_of(count_of(kib, options))
        both = Plane("two", urls, kib, names, options.threads)
        one = Plane("one", urls[:1], kib, names, options.threads)
        rates = measure([both, one], len(names) * kib * KIB, options.passes)
        for act in ("put", "get"):
            two_rates, one_rates = rates["two", act], rates["one", act]
            comparison = f"{ratio(two_rates, one_rates):5.2f}x"
            if able:
                verdict = at_least(two_rates, one_rates, 1.5)
                verdicts.append(verdict)
                comparison = verdict.text
            print(
                f"{kib} KiB {act}  two {spread(two_rates)}  one {spread(one_rates)}  {comparison}"
            )
        both.close()
        one.close()
        empty(urls)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument(
        "--mib", type=int, default=64, help=f"per pass, in at most {MOST_VALUES} values"
    )
    parser.add_argument("--kib", type=int, nargs="+", default=SIZES, help="sizes of a value")
    parser.add_argument(
        "--threads",
        type=int,
        default=Tuning().threads_per_instance,
        help="transfer threads of Baton, per server, and threads of redis-py",
    )
    parser.add_argument(
        "--unix",
        action="store_true",
        help="use unix sockets, except for the peers, which support only TCP",
    )
    parser.add_argument(
        "--rivals",
        nargs="*",
        choices=NAMES,
        help="those of `make peers` to compare (default: all that are there)",
    )
    parser.add_argument("--server", type=Path, help="redis-server to start, default: the bundled")
    parser.add_argument("--quick", action="store_true", help="3 passes of 16 MiB")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.mib = 3, 16
    with ExitStack() as stack:
        servers = stack.enter_context(data_servers(2, 3 << 30, options.server))
        worker = stack.enter_context(peers(servers[0].port, options.rivals))
        way = "unix socket (peers: TCP)" if options.unix else "TCP"
        print(f"{version(servers[0].tcp)}, {way}; {machine()}")
        print(f"{options.passes} passes of {options.mib} MiB in turns, warm; GB/s of payload")
        verdicts = []
        for kib in options.kib:
            verdicts += compare(servers[0], worker, kib, options)
        verdicts += compare_servers(servers, options)
    return exit_code(verdicts, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
