"""Runs a pool on one machine: starts its children, keeps them alive, and ends them all.

In: a PoolPlan, and signals. Out: a live table, and at the end no process.

    starting -> ready -> stopping -> over

    a child exits before the pool is ready   the pool fails with the child's last line
    a child is killed, or exits later        it restarts: soon if it had served, else with backoff
    nodes miss the ready timeout             the pool is ready without them if it can serve a
                                             request, else it fails
    first signal                             the router finishes its running streams (up to the
                                             drain timeout), then the nodes end, then the store
    second signal                            everything is killed at once
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton_cli.errors import CommandError
from baton_cli.local_pool.children import ChildProcess, ChildSpec, describe_end
from baton_cli.local_pool.display import Display, TableRow
from baton_cli.local_pool.router_client import PoolState, RouterAddress, look
from baton_cli.local_pool.stop_requests import StopRequests

POLL_STARTING_S = 0.1


@dataclass(frozen=True)
class PoolPlan:
    """The pool's processes. `nodes` end after the router, so that they can finish its streams.
    `warning` is a line for the user, or ""."""

    address: RouterAddress
    nodes: tuple[ChildSpec, ...]
    router: ChildSpec
    environment: Mapping[str, str]
    drain_timeout_s: float
    ready_timeout_s: float
    warning: str = ""


@dataclass(frozen=True)
class Timing:
    """Seconds.

    poll_s        between two polls of a ready pool
    exit_grace_s  for a child to close its sockets and exit, beyond its drain timeout
    last_look_s   limit for the poll at shutdown
    """

    poll_s: float = 1.0
    exit_grace_s: float = 3.0
    last_look_s: float = 0.5


class Supervisor:
    """Runs a PoolPlan. `ready` is set once all nodes and the router are ready, or once the ready
    timeout has passed and the nodes that are ready can serve."""

    def __init__(
        self,
        plan: PoolPlan,
        stop: StopRequests,
        display: Display,
        look_at: Callable[[RouterAddress], PoolState | None] = look,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self.failure = ""
        self._clock = clock
        self._timing = timing or Timing()
        self._began = clock()
        self._plan = plan
        self._stop = stop
        self._display = display
        self._look_at = look_at
        self._view: PoolState | None = None
        self._nodes = [self._child(spec) for spec in plan.nodes]
        self._router = self._child(plan.router)

    @property
    def chunks(self) -> str:
        """The chunks in which nodes exchange KV, "" before the router answers."""
        return self._view.chunks if self._view is not None else ""

    async def run(self) -> None:
        """Run until the user stops the pool; raise CommandError if it could not start."""
        everyone = [*self._nodes, self._router]
        try:
            async with asyncio.TaskGroup() as group:
                for child in everyone:
                    group.create_task(child.run())
                poll = group.create_task(self._poll())
                await self._stop.requested.wait()
                poll.cancel()
                await self._end()
        finally:
            for child in everyone:
                child.kill()
        if self.failure:
            raise CommandError(self.failure)

    def _child(self, spec: ChildSpec) -> ChildProcess:
        return ChildProcess(spec, self._plan.environment, self._on_line, self._on_end)

    def _on_line(self, name: str, line: str) -> None:
        self._display.log(f"{name} | {line}")

    def _on_end(self, child: ChildProcess, code: int) -> None:
        name, how = child.spec.name, describe_end(code)
        if not self.ready.is_set() and code >= 0:
            self.failure = f"{name} {how} while starting: {child.last_words()}"
            self._stop.requested.set()
            return
        if code >= 0:
            how += f" ({child.last_words()})"
        self._display.note(f"{name} {how}; restarting it in {child.pause_s:g} s")
        self._show()

    async def _poll(self) -> None:
        """Update the table, and set `ready` when the pool is ready."""
        while True:
            self._view = await asyncio.to_thread(self._look_at, self._plan.address)
            self._note_who_serves()
            self._show()
            if not self.ready.is_set():
                self._note_readiness()
            await asyncio.sleep(self._timing.poll_s if self.ready.is_set() else POLL_STARTING_S)

    def _note_readiness(self) -> None:
        """Set `ready` if all nodes are ready. After the ready timeout, set it if the ready nodes
        can serve, else fail the pool."""
        limit_s = self._plan.ready_timeout_s
        if self._all_ready():
            self.ready.set()
        elif self._clock() - self._began >= limit_s:
            rows = [self._row(child) for child in self._nodes if not self._is_ready(child)]
            late = ", ".join(f"{row.node} ({row.state})" for row in rows)
            problem = f"not ready after {limit_s:g} s (--ready-timeout): {late or 'the router'}"
            if self._some_ready():
                self._display.note(f"{problem}; the pool serves with the nodes that are ready")
                self.ready.set()
            else:
                self.failure = problem
                self._stop.requested.set()

    def _some_ready(self) -> bool:
        """Whether the router would serve a request and each started role has a ready node."""
        roles = {child.spec.role for child in self._nodes}
        ready_roles = {child.spec.role for child in self._nodes if self._is_ready(child)}
        return self._view is not None and self._view.ready and ready_roles == roles

    def _note_who_serves(self) -> None:
        for child in self._nodes:
            if self._is_ready(child):
                child.served()
        if self._view is not None:
            self._router.served()

    def _all_ready(self) -> bool:
        ready = self._view is not None and self._view.ready
        return ready and all(self._is_ready(child) for child in self._nodes)

    def _is_ready(self, child: ChildProcess) -> bool:
        node = self._seen().get(child.spec.name)
        return node is not None and node.state == "ready" and node.pid == child.pid

    def _seen(self) -> dict[str, TableRow]:
        return {node.node: node for node in self._view.nodes} if self._view else {}

    def _show(self) -> None:
        rows = [self._row(child) for child in self._nodes]
        rows.append(self._router_row())
        self._display.rows(rows)

    def _row(self, child: ChildProcess) -> TableRow:
        return _row(child, self._seen().get(child.spec.name))

    def _router_row(self) -> TableRow:
        state = _process_state(self._router)
        if state == "starting" and self._view is not None:
            state = "ready" if self._view.ready else "waiting for nodes"
        requests = self._view.requests if self._view else None
        return TableRow(
            "router", "router", self._router.pid, state, requests, self._plan.address.shown
        )

    async def _end(self) -> None:
        """Stop the router, then the nodes; kill everything on a second signal. After a failed
        start, stop all at once."""
        killer = asyncio.create_task(self._kill_when_asked())
        try:
            if not self.failure:
                self._display.note(await self._goodbye())
                await self._router.stop(self._plan.drain_timeout_s + self._timing.exit_grace_s)
            everyone = [self._router, *self._nodes]
            await asyncio.gather(*(child.stop(self._timing.exit_grace_s) for child in everyone))
        finally:
            killer.cancel()

    async def _kill_when_asked(self) -> None:
        await self._stop.at_once.wait()
        for child in [self._router, *self._nodes]:
            child.kill()

    async def _goodbye(self) -> str:
        """The shutdown message. Polls again, because the last view may be a second old."""
        view = None
        with contextlib.suppress(TimeoutError):
            view = await asyncio.wait_for(
                asyncio.to_thread(self._look_at, self._plan.address), self._timing.last_look_s
            )
        if view is None or not view.requests:
            return "stopping"
        return (
            f"stopping: {view.requests} running requests get up to {self._plan.drain_timeout_s:g} s"
            " (Ctrl-C again ends at once)"
        )


def _process_state(child: ChildProcess) -> str:
    """The child's state as the table shows it; "starting" until /pool reports the node."""
    if child.state == "waiting":
        return f"restarting ({child.restarts})"
    return "starting" if child.state == "running" else child.state


def _row(child: ChildProcess, node: TableRow | None) -> TableRow:
    state = _process_state(child)
    current = node is not None and node.pid == child.pid and state == "starting"
    if node is None or not current:
        return TableRow(child.spec.name, child.spec.role, child.pid, state, None, "")
    return node
