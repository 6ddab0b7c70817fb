"""Who has more than its share: of what it holds, and of what it got lately."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.admission.fair_queue import UsageShares
from tests.support.clock import Clock

FADES_S = 5.0


def test_a_share_goes_by_weight() -> None:
    shares = UsageShares(Clock())
    for tenant, amount, weight in (("acme", 3, 3.0), ("globex", 1, 1.0)):
        shares.add(tenant, amount, weight)
    assert not shares.has_more("acme", 3.0)
    assert not shares.has_more("globex", 1.0)
    shares.add("globex", 1, 1.0)
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 3.0)
    assert not shares.has_more("newcomer", 1.0)


def test_who_is_alone_has_more_than_if_another_one_came() -> None:
    shares = UsageShares(Clock())
    shares.add("acme", 1, 1.0)
    assert shares.has_more("acme", 1.0)


def test_what_is_given_back_is_nobodys() -> None:
    shares = UsageShares(Clock())
    shares.add("acme", 2, 1.0)
    shares.add("globex", 1, 1.0)
    shares.give_back("acme", 2)
    assert len(shares) == 1
    assert shares.has_more("globex", 1.0)
    shares.give_back("globex", 1)
    assert (len(shares), shares.has_more("globex", 1.0)) == (0, False)


def test_a_burst_of_little_does_not_outweigh_a_flood_of_the_last_seconds() -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    for _ in range(100):
        clock.now += 0.1
        shares.add("flood", 1, 1.0)
    for _ in range(10):
        shares.add("quiet", 1, 1.0)
    assert shares.has_more("flood", 1.0)
    assert not shares.has_more("quiet", 1.0)


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    shares.add("acme", 1000, 1.0)
    clock.now += FADES_S
    shares.add("globex", 400, 1.0)  # of acme's are left 368
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 1.0)
    for _ in range(6):
        clock.now += 1.01 * FADES_S
        shares.add("globex", 400, 1.0)
    assert len(shares) == 1


@pytest.mark.parametrize("idle_s", [60.0, 4000.0, 1e9])
def test_after_any_time_without_requests_it_goes_on(idle_s: float) -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    shares.add("acme", 1000, 1.0)
    clock.now += idle_s
    shares.add("globex", 2, 1.0)
    shares.add("acme", 1, 1.0)
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 1.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000), st.floats(0, 20))))
def test_amounts_fade_alike_however_time_goes(acts: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    got: list[tuple[str, int, float]] = []
    for tenant, amount, passed in acts:
        clock.now += passed
        shares.add(tenant, amount, 1.0)
        got.append((tenant, amount, clock.now))
        left = {
            name: sum(n * math.exp((at - clock.now) / FADES_S) for t, n, at in got if t == name)
            for name in {name for name, _, _ in got}
        }
        mine, total = left[tenant], sum(left.values())
        if total - mine > 0.05 * total and len(shares) == len(left):
            most = total / len(left)
            if mine != pytest.approx(most, rel=0.05):
                assert shares.has_more(tenant, 1.0) is (mine > most)
