"""Whose turn it is: priorities, shares, bounds; and a flood beside a tenant, in played time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.errors import QueueFull
from baton_router.admission.fair_queue import FairQueue, Waiter


def of(tenant: str, tokens: int = 10, **changes: float) -> Waiter:
    return Waiter(tenant, tokens, **changes)  # type: ignore[arg-type]


def take(queue: FairQueue) -> Waiter | None:
    """The one whose turn it is."""
    head = next(queue.heads(), None)
    if head is not None:
        queue.take(head)
    return head


def drained(queue: FairQueue) -> list[Waiter]:
    found = []
    while (waiter := take(queue)) is not None:
        found.append(waiter)
    return found


def test_one_tenants_requests_go_in_the_order_in_which_they_came() -> None:
    queue, waiters = FairQueue(100), [of("acme", tokens) for tokens in (5, 500, 1, 50)]
    for waiter in waiters:
        assert queue.add(waiter) is None
    assert drained(queue) == waiters
    assert len(queue) == 0


def test_a_higher_priority_goes_first_whenever_it_came() -> None:
    queue = FairQueue(100)
    waiters = [of("acme", priority=level) for level in (0, 10, -5, 10)]
    for waiter in waiters:
        queue.add(waiter)
    assert queue.lengths() == {0: 1, 10: 2, -5: 1}
    assert drained(queue) == [waiters[1], waiters[3], waiters[0], waiters[2]]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)])
def test_tenants_share_tokens_by_their_weights(weights: tuple[float, float]) -> None:
    queue = FairQueue(10_000)
    for _ in range(1000):
        queue.add(of("acme", 30, weight=weights[0]))
        queue.add(of("globex", 10, weight=weights[1]))
    served: Counter[str] = Counter()
    for _ in range(600):
        waiter = take(queue)
        assert waiter is not None
        served[waiter.tenant] += waiter.tokens
    assert served["acme"] / served["globex"] == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_who_comes_late_gets_its_share_and_no_arrears() -> None:
    queue = FairQueue(1000)
    for _ in range(100):
        queue.add(of("acme"))
    for _ in range(50):
        take(queue)
    for _ in range(20):
        queue.add(of("globex"))
    turns = [waiter.tenant for waiter in drained(queue)]
    assert turns[:20].count("globex") == pytest.approx(10, abs=1)


def test_who_left_and_comes_back_has_not_got_rid_of_what_it_used() -> None:
    queue = FairQueue(1000)
    queue.add(of("acme", 1000))
    queue.add(of("globex", 10))
    take(queue)  # acme's, and it waits no more
    queue.add(of("acme", 1))
    for _ in range(9):
        queue.add(of("globex", 10))
    assert [waiter.tenant for waiter in drained(queue)][-1] == "acme"


def test_one_that_leaves_frees_its_place_and_takes_nobodys_turn() -> None:
    queue, waiters = FairQueue(3), [of("acme"), of("acme"), of("globex")]
    for waiter in waiters:
        queue.add(waiter)
    assert queue.remove(waiters[0])
    assert not queue.remove(waiters[0])
    last = of("globex")
    assert queue.add(last) is None
    assert drained(queue) == [waiters[1], waiters[2], last]


def test_a_full_queue_refuses_who_has_most_of_it() -> None:
    queue = FairQueue(3)
    for _ in range(3):
        queue.add(of("acme"))
    with pytest.raises(QueueFull, match="already holds 3 requests"):
        queue.add(of("acme"))
    assert len(queue) == 3


def test_in_a_full_queue_another_tenant_gets_the_place_of_the_last_of_whoever_has_most() -> None:
    queue, flood = FairQueue(3), [of("acme") for _ in range(3)]
    for waiter in flood:
        queue.add(waiter)
    other = of("globex")
    assert queue.add(other) is flood[2]
    with pytest.raises(QueueFull):  # now it has as much of it as the newcomer would have
        queue.add(of("globex"))
    assert set(drained(queue)) == {flood[0], flood[1], other}


def test_in_a_full_queue_a_higher_priority_gets_a_place_and_a_lower_one_none() -> None:
    queue, low = FairQueue(1), of("acme")
    queue.add(low)
    high = of("acme", priority=1)
    assert queue.add(high) is low
    with pytest.raises(QueueFull):
        queue.add(of("globex", priority=0))
    assert drained(queue) == [high]


def test_a_tenant_has_a_bound_of_its_own() -> None:
    queue = FairQueue(100)
    queue.add(of("acme", max_queued=1))
    with pytest.raises(QueueFull, match="this tenant already has 1 waiting requests and may have at most 1"):
        queue.add(of("acme", max_queued=1))
    queue.add(of("globex", max_queued=1))


def test_a_call_that_has_begun_waits_beside_the_bounds_and_loses_its_place_to_nobody() -> None:
    queue, begun = FairQueue(1), [of("acme", max_queued=1, begun=True) for _ in range(3)]
    for waiter in begun:
        assert queue.add(waiter) is None
    new = of("acme", max_queued=1)
    assert queue.add(new) is None
    with pytest.raises(QueueFull, match="this tenant already has 1 waiting"):
        queue.add(of("acme", max_queued=1))
    assert queue.add(of("acme", begun=True)) is None
    high = of("globex", priority=1)
    assert queue.add(high) is new
    with pytest.raises(QueueFull, match="already holds 1 requests"):
        queue.add(of("globex"))
    assert drained(queue)[:4] == [high, *begun]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "next", "remove"]),
            st.sampled_from("abc"),
            st.integers(0, 500),
            st.sampled_from([0.5, 1.0, 3.0]),
            st.integers(-1, 1),
            st.booleans(),
        ),
        max_size=200,
    )
)
def test_nobody_is_lost_doubled_or_overtaken_by_its_own_tenant(
    acts: list[tuple[str, str, int, float, int, bool]],
) -> None:
    queue = FairQueue(12)
    inside: list[Waiter] = []
    for act, tenant, tokens, weight, priority, splits in acts:
        if act == "add":
            waiter = Waiter(tenant, tokens, weight, priority, 8, splits)
            try:
                loser = queue.add(waiter)
            except QueueFull:
                continue
            inside.append(waiter)
            if loser is not None:
                inside.remove(loser)
        elif act == "remove" and inside:
            assert queue.remove(inside.pop(tokens % len(inside)))
        elif act == "next":
            heads = list(queue.heads())
            assert len(heads) == len({(head.tenant, head.splits) for head in heads})
            first = heads[tokens % len(heads)] if heads else None
            if first is not None:
                queue.take(first)
            assert (first is None) == (not inside)
            if first is not None:
                same = [w for w in inside if (w.tenant, w.priority, w.splits) == _lane(first)]
                assert same[0] is first
                assert first.priority == max(w.priority for w in inside)
                inside.remove(first)
        assert len(queue) == len(inside) == sum(queue.lengths().values())
    assert set(drained(queue)) == set(inside)


def _lane(waiter: Waiter) -> tuple[str, int, bool]:
    return waiter.tenant, waiter.priority, waiter.splits


def test_of_one_tenant_the_first_of_the_other_lane_may_pass_and_the_last_of_both_goes() -> None:
    queue = FairQueue(3)
    long, longer, short = of("acme", splits=True), of("acme", splits=True), of("acme")
    for waiter in (long, longer, short):
        queue.add(waiter)
    assert list(queue.heads()) == [long, short]
    assert queue.add(of("globex")) is short
    assert queue.of("acme") == 2
    assert next(queue.heads()) is long
    queue.take(long)
    assert longer in list(queue.heads())


def test_who_passes_another_tenant_pays_for_it_and_delays_no_newcomer() -> None:
    queue = FairQueue(10)
    acme, first, second = of("acme", 100), of("globex", 10), of("globex", 10)
    for waiter in (acme, first, second):
        queue.add(waiter)
    assert list(queue.heads()) == [acme, first]
    queue.take(first)
    assert list(queue.heads()) == [acme, second]
    queue.take(second)
    later, newcomer = of("globex", 10), of("ops", 10)
    queue.add(later)
    queue.add(newcomer)
    assert list(queue.heads()) == [acme, newcomer, later]


# --- a flood, in played time ----------------------------------------------------------------------

# A pool; answers take 0.3 to 2.3 s. Each tenant usually asks for a fifth of what it can.
SLOTS, PREFILL_S, DECODE_S = 256, 0.5, 1.3
USUAL = 0.2 * SLOTS / (PREFILL_S + DECODE_S)
SECONDS, WARM_S = 60.0, 10.0  # at first all answers begin at once


def arrivals(tenant: str, per_s: float, seed: int) -> list[tuple[float, str]]:
    rng, now, found = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(per_s)) < SECONDS:
        found.append((now, tenant))
    return found


def first_tokens(coming: list[tuple[float, str]], fair: bool) -> list[float]:
    """Seconds to the first token of each of globex' requests. A server that is not `fair` is one
    that takes all of them as one tenant's."""
    queue, busy, waits, rng = FairQueue(10**6), [0.0] * SLOTS, [], random.Random(3)
    came: dict[Waiter, tuple[float, str]] = {}
    events = sorted(coming)
    at = 0
    while at < len(events) or len(queue):
        free = busy[0]
        while at < len(events) and (events[at][0] <= free or not len(queue)):
            tenant = events[at][1]
            waiter = of(tenant if fair else "all", 1000)
            came[waiter] = events[at]
            queue.add(waiter)
            at += 1
        waiter_next = take(queue)
        assert waiter_next is not None
        since, tenant = came.pop(waiter_next)
        start = max(since, free)
        heapq.heapreplace(busy, start + PREFILL_S + rng.uniform(DECODE_S - 1, DECODE_S + 1))
        if tenant == "globex" and since > WARM_S:
            waits.append(start + PREFILL_S - since)
    return waits


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[-1]


def test_a_tenant_that_floods_at_ten_times_its_rate_leaves_another_ones_p99_within_1_5() -> None:
    other = arrivals("globex", USUAL, seed=1)
    flood = arrivals("acme", 10 * USUAL, seed=2)
    alone = p99(first_tokens(other, fair=True))
    assert p99(first_tokens([*other, *flood], fair=True)) < 1.5 * alone
    assert p99(first_tokens([*other, *flood], fair=False)) > 10 * alone
