"""The store fails as a whole: requests are served by decode nodes alone until it is back.

A hand-off needs both Redis roles to answer and to take writes. Without, every request runs whole on
a decode node, with the reason `store_down`, also where hand-off is always on; and once the store is
back, that is noticed by itself.
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
MANY = 500


class PromptSource:
    """Asks for new prompts, one after another, and checks each answer."""

    def __init__(self, pool: Cluster, calm: Cluster, label: str) -> None:
        self._pool, self._calm, self._label = pool, calm, label
        self._count = 0

    def next(self) -> StreamedAnswer:
        [case] = self._cases()
        told = ask(self._pool.url, PATH, case.body)
        case.check(told)
        return told

    def until_placed(self, fits: Callable[[str], bool]) -> list[str]:
        """Ask until a placement fits; return all of them."""
        placements: list[str] = []
        while not placements or not fits(placements[-1]):
            assert len(placements) < MANY, placements
            placements.append(self.next().placement)
        return placements

    def _cases(self) -> list[Case]:
        self._count += 1
        seed = f"{self._label}/{self._count}"
        return make_cases(self._calm.url, "seeded", "mid-stream", seed, SIZES, [])


@pytest.mark.parametrize(("what", "how"), CELLS)
def test_without_a_store_decode_nodes_compute_alone_and_its_return_is_noticed(
    what: Which, how: str, pool: Cluster, calm: Cluster
) -> None:
    assert pool.store is not None
    asker = PromptSource(pool, calm, f"{what} {how}")
    asker.until_placed(lambda placement: "reason=always" in placement)
    FAULTS[how](pool.store, what)
    try:
        asker.until_placed(lambda placement: "reason=store_down" in placement)
        assert "reason=store_down" in asker.next().placement
    finally:
        pool.store.mend()
    asker.until_placed(lambda placement: "reason=always" in placement)
    pool.repair()
    settle(pool)


def test_a_router_that_starts_while_the_index_is_down_serves(calm: Cluster) -> None:
    with Cluster(1, 1, router_flags=["--handoff=always"], static=True) as pool:
        assert pool.store is not None
        asker = PromptSource(pool, calm, "started blind")
        pool.router.kill()
        pool.store.take_away("index")
        pool.router.start()
        pool.await_ready()
        assert "reason=store_down" in asker.next().placement
        pool.store.mend()
        asker.until_placed(lambda placement: "reason=always" in placement)
