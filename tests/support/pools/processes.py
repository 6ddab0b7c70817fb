"""A pool of real processes without a supervisor, which a test breaks and repairs.

In: the number of nodes of each role, and their flags. Out: a pool behind one router. Each link
between router and node is a Wire, each process a RoleProcess, the store a FaultyStore. repair()
ends all faults and restarts dead processes. No process is left at the end.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.clients.http import Json, exchange
from tests.support.pools.baton_up import GONE_S, mark_of
from tests.support.pools.role_process import RoleProcess
from tests.support.stores.store_faults import FaultyStore
from tests.support.wires.wire import Watch, Wire, WireLoop
from tests.support.wires.witness import Witness

READY_S = 280.0
WAIT_S = 180.0
POLL_S = 0.05
SIM = ("--engine", "sim", "--chunk-blocks", "1", "--kv-blocks", "400", "--max-model-len", "2048")


class Node(RoleProcess):
    """A node and its wire."""

    def __init__(
        self,
        loop: WireLoop,
        name: str,
        words: Sequence[str],
        folder: Path,
        mark: str,
        watch: Watch,
        answers: bool,
    ) -> None:
        super().__init__(loop, name, words, folder, mark)
        self.wire = Wire(loop, name, self.port, watch, answers=answers)
        self.words.append(f"--address={self.wire.url}")

    @property
    def role(self) -> str:
        return self.words[0]

    def start(self) -> None:
        super().start()
        self.wire.mend()

    def kill(self) -> None:
        super().kill()
        self.wire.refuse()

    def mend(self) -> None:
        """Wake the node and mend its wire; does not restart a dead node."""
        self.wake()
        if self.alive:
            self.wire.mend()

    def close(self) -> None:
        super().close()
        self.wire.close()


class Cluster:
    """`with Cluster(2, 2) as cluster:`.

    `store` is True for its own store with one data server, False for none, or a store that the
    cluster starts and stops. `own_flags` are those of single nodes, by name. With `static`, the
    router also gets a list of its nodes. Of several `routers`, the first is the default. Requests
    for /pool carry the headers `asking`. Nodes in one of the `states` count as healthy.
    """

    states = frozenset({"ready"})

    def __init__(
        self,
        prefill: int,
        decode: int,
        *,
        flags: Sequence[str] = SIM,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        own_flags: Mapping[str, Sequence[str]] | None = None,
        router_flags: Sequence[str] = (),
        store: bool | FaultyStore = True,
        static: bool = False,
        watch_answers: bool = True,
        routers: int = 1,
        asking: Mapping[str, str] | None = None,
    ) -> None:
        self._asking = asking
        self._watch_answers = watch_answers
        self.store = FaultyStore() if store is True else store or None
        self.witness = Witness()
        self._wires = WireLoop()
        self._mark = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="bc-", dir="/tmp"))
        if self.store is not None:
            self.store.start()
        store_flags = self.store.flags() if self.store is not None else []
        self._arguments = {
            "prefill": ["prefill", *flags, *prefill_flags, *store_flags],
            "decode": ["decode", *flags, *decode_flags, *store_flags],
        }
        self.nodes = {
            name: self._node(name, [*self._arguments[role], *(own_flags or {}).get(name, ())])
            for role, count in (("prefill", prefill), ("decode", decode))
            for name in (f"{role}-{number}" for number in range(count))
        }
        addresses = ",".join(node.wire.url for node in self.nodes.values())
        node_flags = (
            [*store_flags[:1], f"--nodes={addresses}"]
            if static or not store_flags
            else store_flags[:1]
        )
        words = ["router", *router_flags, *node_flags]
        folder_and_mark = (self._folder, self._mark)
        self.routers = [
            RoleProcess(self._wires, name, words, *folder_and_mark)
            for name in ("router", *(f"router-{number}" for number in range(1, routers)))
        ]
        self.router = self.routers[0]

    def __enter__(self) -> Self:
        try:
            for one in self.processes():
                one.start()
            self.await_ready()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.logs())
        for one in self.processes():
            one.close()
        if self.store is not None:
            self.store.stop()
        self._wires.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        deadline = time.monotonic() + GONE_S
        while left := [one for one in psutil.process_iter() if mark_of(one) == self._mark]:
            assert time.monotonic() < deadline, f"processes left: {left}"
            time.sleep(POLL_S)

    # --- nodes that come and go -------------------------------------------------------------------

    def join(self, name: str, role: str, *flags: str) -> None:
        """Start one more node, with additional flags."""
        self.nodes[name] = self._node(name, [*self._arguments[role], *flags])
        self.nodes[name].start()

    def leave(self, name: str) -> None:
        """End a node with SIGTERM, wait for exit code 0, and remove it from the cluster."""
        node = self.nodes[name]
        node.end()
        self.wait(lambda: not node.alive, f"end {name}")
        del self.nodes[name]
        node.close()
        assert node.returncode == 0, node.log_tail()

    # --- parts ------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.router.url

    def of_role(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == role]

    def processes(self) -> list[RoleProcess]:
        """All processes, nodes first because they take longer to start."""
        return [*self.nodes.values(), *self.routers]

    def pool(self) -> Json:
        return exchange(self.url, "/pool", headers=self._asking).body

    def logs(self) -> str:
        return "\n".join(one.log_tail() for one in self.processes())

    # --- repair -----------------------------------------------------------------------------------

    def repair(self) -> None:
        """End every fault, restart dead processes, and return when the pool is healthy."""
        if self.store is not None:
            self.store.mend()
        for node in self.nodes.values():
            node.mend()
        self.wait(
            lambda: self._all_alive_after_restarts() and self._is_healthy(),
            "be healthy again",
            READY_S,
        )

    def await_ready(self) -> None:
        """Wait until each process runs and the router uses each node's current process."""
        self.wait(lambda: self._all_live() and self._is_healthy(), "be healthy", READY_S)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"the cluster did not {what} in {timeout_s:g} s"
            time.sleep(POLL_S)

    def _all_alive_after_restarts(self) -> bool:
        """Restart dead processes, and return whether none was dead. Repeated, because a process may
        die late from an earlier fault."""
        dead = [one for one in self.processes() if not one.alive]
        for one in dead:
            one.start()
        return not dead

    def _all_live(self) -> bool:
        ended = [one.name for one in self.processes() if not one.alive]
        assert ended == [], f"ended: {ended}"
        return True

    def _is_healthy(self) -> bool:
        try:
            nodes: list[dict[str, Any]] = self.pool()["nodes"]
        except OSError:
            return False
        ready = {
            node["id"]: node["pid"]
            for node in nodes
            if node["state"] in self.states and (node["in_use"] or node["state"] != "ready")
        }
        return ready == {name: node.pid for name, node in self.nodes.items()}

    def _node(self, name: str, words: list[str]) -> Node:
        words = [*words, f"--node={name}"]
        folder_and_mark = (self._folder, self._mark)
        return Node(
            self._wires, name, words, *folder_and_mark, self.witness.saw, self._watch_answers
        )
