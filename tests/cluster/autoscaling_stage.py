"""An autoscaled pool whose nodes and clients are made up.

As `stage`: the control plane, its pods and the Redis are real. In: what a test says of the
clients; a thread tells it to the pool's index each half second, as routers would. Out: what the
operator made of it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from baton_kvstore.connection.endpoint import with_login
from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_operator.autoscaling.planner.records import Reason
from baton_protocol.store import RouterReport
from tests.cluster.operators import Body, Pool, until
from tests.cluster.stage import ROLES, Stage
from tests.operator.state.test_index_reader import PASSWORD

TELL_S = 0.5
TTL_S = 5.0
# Nobody waits long for a mean to fall.
QUICK: Body = {"scaleDown": {"stabilizationSeconds": 10}, "staleAfterSeconds": 10}


class Clients:
    """What they ask of the only router: `uncached` and `output` tokens per second, in requests of
    1,000 prompt tokens. `silent`: the router says nothing."""

    def __init__(self, url: str, key: str) -> None:
        self.uncached = 0.0
        self.output = 0.0
        self.held = 0
        self.idle_s = 0.0
        self.silent = False
        self._url, self._key = url, key
        self._uncached = self._output = 0.0
        self._begun = time.monotonic()
        self._stopped = threading.Event()

    def run(self) -> None:
        told = time.monotonic()
        while not self._stopped.wait(TELL_S):
            # On a busy machine a turn takes longer; the rates are what they are.
            since, told = told, time.monotonic()
            self._uncached += self.uncached * (told - since)
            self._output += self.output * (told - since)
            if not self.silent:
                with suppress(StoreError):  # routers go on without an index too
                    asyncio.run(self._tell())

    def stop(self) -> None:
        self._stopped.set()

    async def _tell(self) -> None:
        uncached = int(self._uncached)
        report = RouterReport(
            router="router-a",
            uptime_s=time.monotonic() - self._begun,
            requests_total=uncached // 1000,
            prompt_tokens_total=uncached,
            uncached_tokens_total=uncached,
            output_tokens_total=int(self._output),
            held=self.held,
            idle_s=self.idle_s,
        )
        async with Registry(self._url, self._key) as registry:
            await registry.announce_router(report, TTL_S)


@contextmanager
def clients_of(pool: Pool, index_url: str) -> Iterator[Clients]:
    url = with_login(index_url, "", PASSWORD)
    clients = Clients(url, f"{pool.namespace}.{pool.name}")
    thread = threading.Thread(target=clients.run)
    thread.start()
    try:
        yield clients
    finally:
        clients.stop()
        thread.join()


class Scaled(Stage):
    """One prefill and one decode node at first, at most four of each."""

    def begin(self, decode: int = 1, /, **autoscaling: Any) -> str:
        """`autoscaling` is laid over what scales it."""
        bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
        return super().begin(decode, autoscaling={"mode": "auto", **bounds, **QUICK, **autoscaling})

    def said(self) -> Body:
        """What the status says of the planner's last decision."""
        found: Body = self.pool.body().get("status", {}).get("autoscaling", {})
        return found

    def moves(self) -> list[str]:
        """Events of decisions that changed a number."""
        return [note for reason in Reason for note in self.pool.events(reason) if " -> " in note]

    def counts(self) -> tuple[int, int]:
        """Of the Deployments: prefill, decode."""
        prefill, decode = (self.pool.child("Deployment", role) for role in ROLES)
        return prefill["spec"]["replicas"], decode["spec"]["replicas"]

    def until_known(self) -> None:
        """The planner knows what clients ask for."""
        unknown = ("", "DemandUnknown", "DemandStale", "CapabilityUnknown")
        until(lambda: self.said().get("reason", "") not in unknown, "a decision that knows")
