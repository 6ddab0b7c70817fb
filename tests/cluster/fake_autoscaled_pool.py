"""An autoscaled pool whose nodes and clients are fake.

As in `fake_pool`, the control plane, its pods and the Redis are real. In: the load of the clients,
which a thread reports to the pool's index each half second, as a router would. Out: what the
operator did.
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
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_protocol.store import RouterReport
from tests.cluster.fake_pool import ROLES, FakePool
from tests.cluster.operators import Body, Pool, until
from tests.operator.index_servers import PASSWORD

REPORT_EVERY_S = 0.5
TTL_S = 5.0
# Short windows, so that tests need not wait long for a mean to fall.
QUICK_SCALE_DOWN: Body = {"scaleDown": {"stabilizationSeconds": 10}, "staleAfterSeconds": 10}


class Clients:
    """The load on the pool's only router: `uncached` and `output` tokens per second, in requests of
    1,000 prompt tokens. If `silent`, the router does not report."""

    def __init__(self, url: str, key: str) -> None:
        self.uncached = 0.0
        self.output = 0.0
        self.held = 0
        self.idle_s = 0.0
        self.silent = False
        self._url, self._key = url, key
        self._uncached = self._output = 0.0
        self._started = time.monotonic()
        self._stopped = threading.Event()

    def run(self) -> None:
        now = time.monotonic()
        while not self._stopped.wait(REPORT_EVERY_S):
            # A busy machine may delay this thread, so count tokens by the time that has passed.
            last, now = now, time.monotonic()
            self._uncached += self.uncached * (now - last)
            self._output += self.output * (now - last)
            if not self.silent:
                with suppress(StoreError):  # like a router, go on without an index
                    asyncio.run(self._report())

    def stop(self) -> None:
        self._stopped.set()

    async def _report(self) -> None:
        uncached = int(self._uncached)
        report = RouterReport(
            router="router-a",
            uptime_s=time.monotonic() - self._started,
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
def running_clients(pool: Pool, index_url: str) -> Iterator[Clients]:
    url = with_login(index_url, "", PASSWORD)
    clients = Clients(url, f"{pool.namespace}.{pool.name}")
    thread = threading.Thread(target=clients.run)
    thread.start()
    try:
        yield clients
    finally:
        clients.stop()
        thread.join()


class FakeAutoscaledPool(FakePool):
    """A pool that starts with one prefill and one decode node and may have four of each."""

    def start(self, decode: int = 1, /, **autoscaling: Any) -> str:
        """Fields of `autoscaling` override the pool's own."""
        bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
        return super().start(
            decode, autoscaling={"mode": "auto", **bounds, **QUICK_SCALE_DOWN, **autoscaling}
        )

    def decision(self) -> Body:
        """The planner's last decision, from the pool's status."""
        found: Body = self.pool.body().get("status", {}).get("autoscaling", {})
        return found

    def scale_events(self) -> list[str]:
        """The messages of events about decisions that changed a number of nodes."""
        return [
            note for reason in ScalingReason for note in self.pool.events(reason) if " -> " in note
        ]

    def replica_counts(self) -> tuple[int, int]:
        """The replicas of the prefill and the decode Deployment."""
        prefill, decode = (self.pool.child("Deployment", role) for role in ROLES)
        return prefill["spec"]["replicas"], decode["spec"]["replicas"]

    def wait_demand_known(self) -> None:
        """Wait until the planner knows the demand."""
        unknown = ("", "DemandUnknown", "DemandStale", "CapabilityUnknown")
        until(
            lambda: self.decision().get("reason", "") not in unknown, "a decision by known demand"
        )
