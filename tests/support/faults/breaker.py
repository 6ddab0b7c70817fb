"""Injects the faults of a chaos plan into a cluster, and ends each one in time.

In: a plan, a cluster. Out: a timeline of the faults, and the share of time in which a decode node
was up: started, ready, awake and connected.
"""

from __future__ import annotations

import heapq
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tests.support.clients.http import exchange
from tests.support.faults.chaos_plan import ALL_DECODE, Fault
from tests.support.pools.processes import Cluster, Node
from tests.support.stores.store_faults import which

POLL_S = 0.05
TimelineEntry = tuple[float, str]  # time and description


class Breaker:
    """`with Breaker(cluster, plan) as breaker:` injects faults in its own thread. `failure` is the
    exception that ended this thread early, or None."""

    def __init__(self, cluster: Cluster, plan: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._due: list[tuple[float, int, Callable[[], None], str]] = []
        self._hit_nodes: set[str] = set()  # nodes
        self._ready: dict[str, int] = {}  # node -> pid that was seen ready
        self._samples = self._samples_up = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breaker")
        self.timeline: list[TimelineEntry] = []
        self.restarts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        for fault in plan:
            self._plan(fault.at, partial(self._hit, fault), str(fault))

    def __enter__(self) -> Breaker:
        self.began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def decode_share(self) -> float:
        """The share of samples in which a decode node was up."""
        return self._samples_up / max(1, self._samples)

    def _plan(self, at: float, act: Callable[[], None], description: str) -> None:
        heapq.heappush(self._due, (at, len(self._due) + len(self.timeline), act, description))

    def _run(self) -> None:
        try:
            while not self._ending.wait(POLL_S):
                now = time.monotonic() - self.began
                while self._due and self._due[0][0] <= now:
                    _, _, act, description = heapq.heappop(self._due)
                    self.timeline.append((time.monotonic(), description))
                    act()
                self._restart_dead_nodes()
                self._sample()
        except BaseException as error:
            self.failure = error
            raise

    def _sample(self) -> None:
        self._samples += 1
        self._samples_up += any(self._is_up(node) for node in self._cluster.of_role("decode"))

    def _restart_dead_nodes(self) -> None:
        for node in self._cluster.nodes.values():
            if not node.alive and node.name not in self._hit_nodes:
                self.timeline.append((time.monotonic(), f"{node.name} started again"))
                self.restarts[node.name] += 1
                node.start()

    def _is_up(self, node: Node) -> bool:
        if not node.alive or node.name in self._hit_nodes:
            return False
        if self._ready.get(node.name) != node.pid and _is_ready(node):
            self._ready[node.name] = node.pid
        return self._ready.get(node.name) == node.pid

    # --- faults -----------------------------------------------------------------------------------

    def _hit(self, fault: Fault) -> None:
        nodes = self._nodes(fault)
        for node in nodes:
            self._hit_node(node, fault.how)
        if not nodes:
            self._hit_store(fault)
        end = time.monotonic() - self.began + fault.lasts
        self._plan(end, partial(self._mend, nodes), f"{fault.what} repaired")

    def _nodes(self, fault: Fault) -> list[Node]:
        """The nodes that the fault hits; an empty list for a fault of the store."""
        if fault.what == ALL_DECODE:
            return self._cluster.of_role("decode")
        return [node for name, node in self._cluster.nodes.items() if name == fault.what]

    def _hit_node(self, node: Node, how: str) -> None:
        acts = {
            "kill": node.kill,
            "kill engine": node.kill_engine,
            "freeze": node.freeze,
            "freeze engine": node.freeze_engine,
            "break": node.wire.break_off,
            "blip": node.wire.blip,
            "hold": node.wire.hold,
        }
        self._hit_nodes.add(node.name)
        acts[how]()

    def _hit_store(self, fault: Fault) -> None:
        store = self._cluster.store
        assert store is not None
        acts = {
            "kill": store.kill,
            "freeze": store.freeze,
            "fill": store.fill,
            "take away": store.take_away,
            "slow link": store.slow_link,
            "stall link": store.stall_link,
            "cut link": store.cut_link,
            "lossy link": store.lose_on_link,
        }
        acts[fault.how](which(fault.what))

    def _mend(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._hit_nodes.discard(node.name)
            node.mend()
        if not nodes and self._cluster.store is not None:
            self._cluster.store.mend()


def _is_ready(node: Node) -> bool:
    try:
        return exchange(node.url, "/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False
