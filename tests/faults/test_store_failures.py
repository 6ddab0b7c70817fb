"""While a Redis role fails as a whole, decode nodes serve requests alone.

A hand-off needs both Redis roles to answer and to accept writes. Otherwise every request runs whole
on a decode node with the reason `store_down`, even under `--handoff=always`. When the store works
again, hand-offs resume by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.cases import PATH, Case, Sizes, make_cases
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster
from tests.support.stores.store_faults import FaultyStore, Which

SIZES = Sizes(target=128, answer=8)
FAULTS: dict[str, Callable[[FaultyStore, Which], None]] = {
    "away": FaultyStore.take_away,
    "frozen": FaultyStore.freeze,
    "full": FaultyStore.fill,
}
SHORT = (("index", "away"), ("data", "frozen"), ("data", "full"))
CELLS = [
    pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long)
    for cell in product(("index", "data"), FAULTS)
]
MAX_REQUESTS = 500


class Client:
    """Sends requests with new prompts one after another, and checks each answer."""

    def __init__(self, pool: Cluster, undisturbed: Cluster, label: str) -> None:
        self._pool, self._undisturbed, self._label = pool, undisturbed, label
        self._count = 0

    def next(self) -> StreamedAnswer:
        [case] = self._cases()
        answer = ask(self._pool.url, PATH, case.body)
        case.check(answer)
        return answer

    def until_placed(self, matches: Callable[[str], bool]) -> list[str]:
        """Send requests until a placement matches, and return all placements."""
        placements: list[str] = []
        while not placements or not matches(placements[-1]):
            assert len(placements) < MAX_REQUESTS, placements
            placements.append(self.next().placement)
        return placements

    def _cases(self) -> list[Case]:
        self._count += 1
        seed = f"{self._label}/{self._count}"
        return make_cases(self._undisturbed.url, "seeded", "mid-stream", seed, SIZES, [])


@pytest.mark.parametrize(("what", "how"), CELLS)
def test_without_a_store_decode_nodes_serve_alone_until_it_works_again(
    what: Which, how: str, pool: Cluster, undisturbed: Cluster
) -> None:
    assert pool.store is not None
    client = Client(pool, undisturbed, f"{what} {how}")
    client.until_placed(lambda placement: "reason=always" in placement)
    FAULTS[how](pool.store, what)
    try:
        client.until_placed(lambda placement: "reason=store_down" in placement)
        assert "reason=store_down" in client.next().placement
    finally:
        pool.store.mend()
    client.until_placed(lambda placement: "reason=always" in placement)
    pool.repair()
    settle(pool)


def test_a_router_that_starts_while_the_index_is_down_serves_requests(undisturbed: Cluster) -> None:
    with Cluster(1, 1, router_flags=["--handoff=always"], static=True) as pool:
        assert pool.store is not None
        client = Client(pool, undisturbed, "started blind")
        pool.router.kill()
        pool.store.take_away("index")
        pool.router.start()
        pool.await_ready()
        assert "reason=store_down" in client.next().placement
        pool.store.mend()
        client.until_placed(lambda placement: "reason=always" in placement)
