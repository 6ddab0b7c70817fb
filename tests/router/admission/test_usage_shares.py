"""Which tenants have more than their share of a quantity that they hold or have used recently."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.admission.usage_shares import UsageShares
from tests.support.clock import Clock

FADES_S = 5.0


def test_a_share_is_proportional_to_the_weight() -> None:
    shares = UsageShares(Clock())
    for tenant, amount, weight in (("acme", 3, 3.0), ("globex", 1, 1.0)):
        shares.add(tenant, amount, weight)
    assert not shares.has_more("acme", 3.0)
    assert not shares.has_more("globex", 1.0)
    shares.add("globex", 1, 1.0)
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 3.0)
    assert not shares.has_more("newcomer", 1.0)


def test_a_tenant_alone_is_over_the_share_that_it_would_have_beside_another() -> None:
    shares = UsageShares(Clock())
    shares.add("acme", 1, 1.0)
    assert shares.has_more("acme", 1.0)


def test_amounts_that_are_given_back_do_not_count() -> None:
    shares = UsageShares(Clock())
    shares.add("acme", 2, 1.0)
    shares.add("globex", 1, 1.0)
    shares.give_back("acme", 2)
    assert len(shares) == 1
    assert shares.has_more("globex", 1.0)
    shares.give_back("globex", 1)
    assert (len(shares), shares.has_more("globex", 1.0)) == (0, False)


def test_a_small_burst_does_not_outweigh_a_recent_flood() -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    for _ in range(100):
        clock.now += 0.1
        shares.add("flood", 1, 1.0)
    for _ in range(10):
        shares.add("quiet", 1, 1.0)
    assert shares.has_more("flood", 1.0)
    assert not shares.has_more("quiet", 1.0)


def test_old_amounts_are_forgotten() -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    shares.add("acme", 1000, 1.0)
    clock.now += FADES_S
    shares.add("globex", 400, 1.0)  # 368 of acme's 1000 are left
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 1.0)
    for _ in range(6):
        clock.now += 1.01 * FADES_S
        shares.add("globex", 400, 1.0)
    assert len(shares) == 1


@pytest.mark.parametrize("idle_s", [60.0, 4000.0, 1e9])
def test_shares_stay_correct_after_any_idle_time(idle_s: float) -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    shares.add("acme", 1000, 1.0)
    clock.now += idle_s
    shares.add("globex", 2, 1.0)
    shares.add("acme", 1, 1.0)
    assert shares.has_more("globex", 1.0)
    assert not shares.has_more("acme", 1.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000), st.floats(0, 20))))
def test_amounts_decay_exponentially_for_any_sequence_of_times(
    additions: list[tuple[str, int, float]],
) -> None:
    clock = Clock()
    shares = UsageShares(clock, FADES_S)
    added: list[tuple[str, int, float]] = []
    for tenant, amount, elapsed in additions:
        clock.now += elapsed
        shares.add(tenant, amount, 1.0)
        added.append((tenant, amount, clock.now))
        left = {
            name: sum(n * math.exp((at - clock.now) / FADES_S) for t, n, at in added if t == name)
            for name in {name for name, _, _ in added}
        }
        own, total = left[tenant], sum(left.values())
        if total - own > 0.05 * total and len(shares) == len(left):
            share = total / len(left)
            if own != pytest.approx(share, rel=0.05):
                assert shares.has_more(tenant, 1.0) is (own > share)
