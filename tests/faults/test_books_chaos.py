"""The books while nodes are killed one after another, and one of two routers.

Each router has clients of one tenant. All calls of the router that lives are in the books, token
for token, whatever happened to their nodes. Of the router that is killed, calls that ended in its
last moments may be missing, and nothing is there twice. The parts add up to the time of the nodes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.clients.http import Json, exchange
from tests.support.pools.books import await_books, books, rows_by
from tests.support.pools.processes import SIM, Cluster

pytestmark = pytest.mark.integration

CHAOS_S = 40.0
KILL_EVERY_S = 4.0
CLIENTS = 6  # of each tenant
TENANTS = ("a", "b")
BOSS = "key-of-boss"
UNWRITTEN_S = 10.0  # a router writes once a second; the machine may be busy
FIGURES = ("prompt_tokens", "completion_tokens")


@dataclass
class Calls:
    """Clients of one tenant at one router. `answered`: when each answer came, and its usage."""

    tenant: str
    url: str
    seed: int
    stop: threading.Event
    answered: list[tuple[float, Json]] = field(default_factory=list)

    def run(self) -> None:
        rng = random.Random(self.seed)
        while not self.stop.is_set():
            prompt = [32 + rng.randrange(90) for _ in range(rng.randrange(20, 300))]
            body = {"prompt": prompt, "max_tokens": rng.randrange(1, 60), "ignore_eos": True}
            key = {"authorization": f"Bearer key-of-{self.tenant}"}
            try:
                answer = exchange(self.url, "/v1/completions", body, key)
            except OSError:
                return  # its router is dead
            assert answer.status == 200, answer.body
            self.answered.append((time.monotonic(), answer.body["usage"]))

    def used(self, until: float) -> Json:
        usages = [usage for at, usage in self.answered if at <= until]
        return {name: sum(usage[name] for usage in usages) for name in FIGURES}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "keys"
    keys = [f"{tenant} key-of-{tenant}\n" for tenant in TENANTS]
    path.write_text("".join(keys) + f"boss {BOSS} admin\n")
    cluster = Cluster(
        *(2, 2),
        flags=[*SIM, "--sim-decode-ms=10", "--sim-prefill-ms-per-token=0.2"],
        router_flags=[f"--api-keys={path}", "--handoff-min-tokens=32", "--stall-timeout=4"],
        routers=2,
        asking={"authorization": f"Bearer {BOSS}"},
    )
    with cluster:
        yield cluster


@pytest.mark.long  # 40 s of faults
def test_books_balance_through_deaths_of_nodes_and_of_a_router(pool: Cluster) -> None:
    living, dying = pool.routers
    stop, rng, began = threading.Event(), random.Random(7), time.monotonic()
    clients = [
        Calls(tenant, router.url, number, stop)
        for number in range(CLIENTS)
        for tenant, router in zip(TENANTS, (living, dying), strict=True)
    ]
    killed_at = 0.0
    with ThreadPoolExecutor(len(clients)) as threads:
        running = [threads.submit(client.run) for client in clients]
        try:
            while time.monotonic() < began + CHAOS_S:
                time.sleep(KILL_EVERY_S)
                victim = rng.choice(list(pool.nodes.values()))
                victim.kill()
                victim.start()
                if not killed_at and time.monotonic() > began + CHAOS_S / 2:
                    killed_at = time.monotonic()
                    dying.kill()
        finally:
            stop.set()
        for client in running:
            client.result()
    ended = time.monotonic()

    def used(tenant: str, until: float = ended) -> Json:
        parts = [client.used(until) for client in clients if client.tenant == tenant]
        return {name: sum(part[name] for part in parts) for name in FIGURES}

    def booked(tenant: str) -> Json:
        row = rows_by(living.url, "tenant", BOSS)[tenant]
        return {name: row[name] for name in FIGURES}

    await_books(lambda: booked("a") == used("a"), "all calls of the living router count")
    least, most, found = used("b", killed_at - UNWRITTEN_S), used("b"), booked("b")
    assert all(least[name] <= found[name] for name in FIGURES), (least, found, most)
    # The router may have counted answers that its death kept from their clients.
    slack = CLIENTS * 300
    assert all(found[name] <= most[name] + slack for name in FIGURES), (least, found, most)

    causes = rows_by(living.url, "cause", BOSS)  # which checks that they balance
    assert causes["lost"]["busy_ms"] > 0
    wall_s = books(living.url, key=BOSS)["wall_ms"] / 1000
    assert wall_s <= len(pool.nodes) * (time.monotonic() - began + UNWRITTEN_S)
    print(f"{ended - began:.0f} s, {wall_s:.1f} s of nodes, {causes}; a {used('a')}, b {found}")
