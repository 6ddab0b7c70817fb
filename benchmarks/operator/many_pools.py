"""The operator with 100 pools: the delay until a change reaches the children, and its cost.

    python -m benchmarks.operator.many_pools [--pools 100] [--changes 100] [--idle 60]

A control plane of its own (etcd, API server, controllers; the tests' programs, built by `make
cluster-tools`), one operator process, and at first a proxy between the two that counts requests.
Each pool has a simulated engine and its own store: 17 children. Prints:

    create   from the creation of all pools to the last child of each
    change   an edit of nodes, router and store of one pool after the other, until all four
             workloads have it; then the same edit of all pools at once
    idle     requests per second while nothing happens, including renewals of watches
    restart  the operator is killed and started again, without the proxy: the time until it is idle
    memory   the operator's maximum resident memory

All of it shares the machine's cores. The file is not called operator.py: a script beside it would
then import it instead of Python's own `operator`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' control plane

if TYPE_CHECKING:
    from tests.cluster.fault_proxy import FaultProxy
    from tests.cluster.operators import ApiClient, Operator

CHILDREN = 17
PATIENCE_S = 900.0
IDLE_S, IDLE_PERCENT = 5.0, 10.0
NAMESPACE = "default"


class Bench:
    """Pools by number in one namespace. A change is a note in the pods of all four workloads."""

    def __init__(self, api_client: ApiClient, pools: int) -> None:
        self._api_client = api_client
        self._pools = range(pools)

    def create(self) -> float:
        from baton_operator.kube.kinds import POOL

        begun = time.monotonic()
        for number in self._pools:
            head = {"apiVersion": POOL.api_version, "kind": POOL.kind}
            body = {**head, "metadata": {"name": name_of(number)}, "spec": spec("first")}
            self._api_client.send("POST", POOL.path(NAMESPACE), body)
        return wait(lambda: self._children() >= CHILDREN * len(self._pools), 1.0) - begun

    def change(self, number: int, note: str) -> Callable[[], bool]:
        """Edit one pool; what is returned says whether its workloads have it."""
        from baton_operator.kube.kinds import POOL

        path = POOL.path(NAMESPACE, name_of(number))
        self._api_client.send("PATCH", path, {"spec": spec(note)}, "merge-patch+json")
        return lambda: self._marked(number, note)

    def one_by_one(self, changes: int) -> list[float]:
        times = []
        for turn in range(changes):
            begun = time.monotonic()
            done = self.change(turn % len(self._pools), f"turn-{turn}")
            times.append(wait(done) - begun)
        return times

    def all_at_once(self) -> list[float]:
        begun = time.monotonic()
        waiting = {number: self.change(number, "burst") for number in self._pools}
        times = []
        while waiting:
            for number, done in list(waiting.items()):
                if done():
                    times.append(time.monotonic() - begun)
                    del waiting[number]
            if time.monotonic() - begun > PATIENCE_S:
                raise SystemExit(f"{len(waiting)} pools did not become ready")
        return times

    def _children(self) -> int:
        from baton_operator.kube.kinds import CHILDREN as KINDS

        return sum(len(self._list(kind.path(NAMESPACE))) for kind in KINDS if not kind.optional) - (
            len(self._list(f"/api/v1/namespaces/{NAMESPACE}/pods"))
        )

    def _marked(self, number: int, note: str) -> bool:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
        found = self._list(path, name_of(number))
        text = json.dumps(note)
        return sum(text in json.dumps(one["spec"]) for one in found) >= 5

    def _list(self, path: str, pool: str = "") -> Sequence[Any]:
        selector = f"baton.dev/pool={pool}" if pool else "baton.dev/pool"
        items: Sequence[Any] = self._api_client.get(f"{path}?labelSelector={selector}")["items"]
        return items


def name_of(number: int) -> str:
    return f"pool-{number}"


def spec(note: str) -> dict[str, Any]:
    noted = {"podTemplate": {"metadata": {"annotations": {"note": note}}}}
    roles = dict.fromkeys(("prefill", "decode", "router"), noted)
    return {"engine": {"kind": "sim"}, "kvStore": {"managed": noted}, **roles}


def wait(done: Callable[[], object], pause_s: float = 0.05) -> float:
    """The moment at which `done()` was seen to be true."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the operator did not reach the expected state")
        time.sleep(pause_s)
    return time.monotonic()


def idle_rate(proxy: FaultProxy, seconds: float) -> float:
    """Requests per second."""
    begun = time.monotonic()
    time.sleep(seconds)
    return sum(call.at >= begun for call in list(proxy.calls)) / seconds


def peak_mib(operator: Operator) -> float:
    """The most memory that it ever had."""
    status = Path(f"/proc/{operator.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def until_idle(operator: Operator) -> float:
    """Seconds from now until it computes nothing for some time."""
    begun = time.monotonic()
    process = psutil.Process(operator.pid)
    while process.cpu_percent(IDLE_S) > IDLE_PERCENT:
        if time.monotonic() - begun > PATIENCE_S:
            raise SystemExit("the operator did not become idle")
    return time.monotonic() - begun


def percentiles(times: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def goal(what: str, value: float, limit: float, unit: str) -> None:
    verdict = "met" if value < limit else "MISSED"
    print(f"{what:34} {value:8.3f} {unit:4} goal: under {limit:g}: {verdict}")


def run(arguments: argparse.Namespace, folder: Path) -> None:
    from baton_operator.api.crd import crd
    from tests.cluster.fault_proxy import FaultProxy
    from tests.cluster.installed import definition
    from tests.cluster.machine.control_plane import ControlPlane
    from tests.cluster.machine.programs import built_programs
    from tests.cluster.operators import ApiClient, Operator

    programs = built_programs()
    if programs is None:
        print("skipped: the control plane is not built; make cluster-tools")
        return
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(programs, folder / "plane"))
        stack.enter_context(definition(plane, crd()))
        api_client = stack.enter_context(ApiClient(plane.kubeconfig, programs, folder))
        bench = Bench(api_client, arguments.pools)
        print(f"{arguments.pools} pools, {CHILDREN} children each")
        with (
            FaultProxy(plane.kubeconfig, folder) as proxy,
            Operator(proxy.kubeconfig, folder / "first", "--log-level=warning") as operator,
        ):
            print(f"{'create, to the last child':34} {bench.create():8.1f} s")
            until_idle(operator)
            rate, memory = idle_rate(proxy, arguments.idle), [peak_mib(operator)]
        with Operator(plane.kubeconfig, folder / "second", "--log-level=warning") as operator:
            print(f"{'restart, until it is idle':34} {until_idle(operator):8.1f} s")
            one_by_one = percentiles(bench.one_by_one(arguments.changes))
            until_idle(operator)
            burst = percentiles(bench.all_at_once())
            memory.append(peak_mib(operator))
    print(f"{'change, all pools at once':34} p50 {burst[0]:.2f} s, p99 {burst[1]:.2f} s")
    goal("change, one by one, p50", one_by_one[0], 1.0, "s")
    goal("change, one by one, p99", one_by_one[1], 5.0, "s")
    goal("idle, requests/s per 10 pools", rate * 10 / arguments.pools, 1.0, "")
    goal("memory, the most ever", max(memory), 150.0, "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pools", type=int, default=100)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument(
        "--idle", type=float, default=60.0, help="seconds during which requests are counted"
    )
    parser.add_argument("--quick", action="store_true", help="10 pools, 10 changes, 10 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pools, arguments.changes, arguments.idle = 10, 10, 10.0
    if not shutil.which("go") or not shutil.which("setpriv"):
        print("skipped: needs Go and setpriv, to build and run a control plane")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
