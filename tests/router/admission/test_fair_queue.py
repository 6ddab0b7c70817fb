"""The order of the fair queue: priorities, shares, bounds; and a simulated flood by one tenant."""

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


def make_waiter(tenant: str, tokens: int = 10, **changes: float) -> Waiter:
    return Waiter(tenant, tokens, **changes)  # type: ignore[arg-type]


def take(queue: FairQueue) -> Waiter | None:
    """Take the next waiter."""
    head = next(queue.heads(), None)
    if head is not None:
        queue.take_head(head)
    return head


def take_all(queue: FairQueue) -> list[Waiter]:
    waiters = []
    while (waiter := take(queue)) is not None:
        waiters.append(waiter)
    return waiters


def test_one_tenant_s_requests_go_in_order_of_arrival() -> None:
    queue, waiters = FairQueue(100), [make_waiter("acme", tokens) for tokens in (5, 500, 1, 50)]
    for waiter in waiters:
        assert queue.add(waiter) is None
    assert take_all(queue) == waiters
    assert len(queue) == 0


def test_a_higher_priority_goes_first_whatever_its_arrival() -> None:
    queue = FairQueue(100)
    waiters = [make_waiter("acme", priority=level) for level in (0, 10, -5, 10)]
    for waiter in waiters:
        queue.add(waiter)
    assert queue.lengths() == {0: 1, 10: 2, -5: 1}
    assert take_all(queue) == [waiters[1], waiters[3], waiters[0], waiters[2]]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)])
def test_tenants_share_tokens_by_their_weights(weights: tuple[float, float]) -> None:
    queue = FairQueue(10_000)
    for _ in range(1000):
        queue.add(make_waiter("acme", 30, weight=weights[0]))
        queue.add(make_waiter("globex", 10, weight=weights[1]))
    served: Counter[str] = Counter()
    for _ in range(600):
        waiter = take(queue)
        assert waiter is not None
        served[waiter.tenant] += waiter.tokens
    assert served["acme"] / served["globex"] == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_a_late_tenant_gets_its_share_but_no_credit_for_the_past() -> None:
    queue = FairQueue(1000)
    for _ in range(100):
        queue.add(make_waiter("acme"))
    for _ in range(50):
        take(queue)
    for _ in range(20):
        queue.add(make_waiter("globex"))
    turns = [waiter.tenant for waiter in take_all(queue)]
    assert turns[:20].count("globex") == pytest.approx(10, abs=1)


def test_a_returning_tenant_keeps_its_recorded_usage() -> None:
    queue = FairQueue(1000)
    queue.add(make_waiter("acme", 1000))
    queue.add(make_waiter("globex", 10))
    take(queue)  # acme's only waiter
    queue.add(make_waiter("acme", 1))
    for _ in range(9):
        queue.add(make_waiter("globex", 10))
    assert [waiter.tenant for waiter in take_all(queue)][-1] == "acme"


def test_a_removed_waiter_frees_its_place_and_does_not_change_the_order() -> None:
    queue, waiters = FairQueue(3), [make_waiter("acme"), make_waiter("acme"), make_waiter("globex")]
    for waiter in waiters:
        queue.add(waiter)
    assert queue.remove(waiters[0])
    assert not queue.remove(waiters[0])
    last = make_waiter("globex")
    assert queue.add(last) is None
    assert take_all(queue) == [waiters[1], waiters[2], last]


def test_a_full_queue_refuses_the_tenant_with_the_largest_share() -> None:
    queue = FairQueue(3)
    for _ in range(3):
        queue.add(make_waiter("acme"))
    with pytest.raises(QueueFull, match="already holds 3 requests"):
        queue.add(make_waiter("acme"))
    assert len(queue) == 3


def test_in_a_full_queue_a_new_tenant_replaces_the_largest_tenant_s_last_waiter() -> None:
    queue, flood = FairQueue(3), [make_waiter("acme") for _ in range(3)]
    for waiter in flood:
        queue.add(waiter)
    other = make_waiter("globex")
    assert queue.add(other) is flood[2]
    with pytest.raises(QueueFull):  # acme no longer has more than globex would have
        queue.add(make_waiter("globex"))
    assert set(take_all(queue)) == {flood[0], flood[1], other}


def test_in_a_full_queue_a_higher_priority_replaces_a_lower_one_and_not_vice_versa() -> None:
    queue, low = FairQueue(1), make_waiter("acme")
    queue.add(low)
    high = make_waiter("acme", priority=1)
    assert queue.add(high) is low
    with pytest.raises(QueueFull):
        queue.add(make_waiter("globex", priority=0))
    assert take_all(queue) == [high]


def test_a_tenant_may_have_its_own_bound() -> None:
    queue = FairQueue(100)
    queue.add(make_waiter("acme", max_queued=1))
    with pytest.raises(
        QueueFull, match="this tenant already has 1 waiting requests and may have at most 1"
    ):
        queue.add(make_waiter("acme", max_queued=1))
    queue.add(make_waiter("globex", max_queued=1))


def test_calls_that_have_begun_do_not_count_in_the_bounds_and_are_never_replaced() -> None:
    queue, begun = FairQueue(1), [make_waiter("acme", max_queued=1, begun=True) for _ in range(3)]
    for waiter in begun:
        assert queue.add(waiter) is None
    new = make_waiter("acme", max_queued=1)
    assert queue.add(new) is None
    with pytest.raises(QueueFull, match="this tenant already has 1 waiting"):
        queue.add(make_waiter("acme", max_queued=1))
    assert queue.add(make_waiter("acme", begun=True)) is None
    high = make_waiter("globex", priority=1)
    assert queue.add(high) is new
    with pytest.raises(QueueFull, match="already holds 1 requests"):
        queue.add(make_waiter("globex"))
    assert take_all(queue)[:4] == [high, *begun]


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
def test_no_waiter_is_lost_doubled_or_overtaken_by_its_own_tenant(
    actions: list[tuple[str, str, int, float, int, bool]],
) -> None:
    queue = FairQueue(12)
    inside: list[Waiter] = []
    for action, tenant, tokens, weight, priority, splits in actions:
        if action == "add":
            waiter = Waiter(tenant, tokens, weight, priority, 8, splits)
            try:
                evicted = queue.add(waiter)
            except QueueFull:
                continue
            inside.append(waiter)
            if evicted is not None:
                inside.remove(evicted)
        elif action == "remove" and inside:
            assert queue.remove(inside.pop(tokens % len(inside)))
        elif action == "next":
            heads = list(queue.heads())
            assert len(heads) == len({(head.tenant, head.splits) for head in heads})
            first = heads[tokens % len(heads)] if heads else None
            if first is not None:
                queue.take_head(first)
            assert (first is None) == (not inside)
            if first is not None:
                same = [w for w in inside if (w.tenant, w.priority, w.splits) == _lane(first)]
                assert same[0] is first
                assert first.priority == max(w.priority for w in inside)
                inside.remove(first)
        assert len(queue) == len(inside) == sum(queue.lengths().values())
    assert set(take_all(queue)) == set(inside)


def _lane(waiter: Waiter) -> tuple[str, int, bool]:
    return waiter.tenant, waiter.priority, waiter.splits


def test_each_lane_of_a_tenant_has_a_head_and_its_latest_waiter_is_replaced() -> None:
    queue = FairQueue(3)
    long, longer, short = (
        make_waiter("acme", splits=True),
        make_waiter("acme", splits=True),
        make_waiter("acme"),
    )
    for waiter in (long, longer, short):
        queue.add(waiter)
    assert list(queue.heads()) == [long, short]
    assert queue.add(make_waiter("globex")) is short
    assert queue.count_waiting("acme") == 2
    assert next(queue.heads()) is long
    queue.take_head(long)
    assert longer in list(queue.heads())


def test_a_tenant_that_passes_another_is_charged_and_delays_no_newcomer() -> None:
    queue = FairQueue(10)
    acme, first, second = (
        make_waiter("acme", 100),
        make_waiter("globex", 10),
        make_waiter("globex", 10),
    )
    for waiter in (acme, first, second):
        queue.add(waiter)
    assert list(queue.heads()) == [acme, first]
    queue.take_head(first)
    assert list(queue.heads()) == [acme, second]
    queue.take_head(second)
    later, newcomer = make_waiter("globex", 10), make_waiter("ops", 10)
    queue.add(later)
    queue.add(newcomer)
    assert list(queue.heads()) == [acme, newcomer, later]


# --- a flood in simulated time --------------------------------------------------------------------

# The simulated pool. A request takes PREFILL_S plus 0.3 to 2.3 s. The usual load of a tenant is a
# fifth of the pool's capacity.
SLOTS, PREFILL_S, DECODE_S = 256, 0.5, 1.3
USUAL = 0.2 * SLOTS / (PREFILL_S + DECODE_S)
SECONDS, WARM_S = 60.0, 10.0  # in the beginning all answers start at once


def arrivals(tenant: str, per_s: float, seed: int) -> list[tuple[float, str]]:
    rng, now, times = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(per_s)) < SECONDS:
        times.append((now, tenant))
    return times


def first_tokens(requests: list[tuple[float, str]], fair: bool) -> list[float]:
    """Seconds to the first token of each of globex's requests. If not `fair`, the queue treats all
    requests as one tenant's."""
    queue, busy, waits, rng = FairQueue(10**6), [0.0] * SLOTS, [], random.Random(3)
    arrived: dict[Waiter, tuple[float, str]] = {}
    events = sorted(requests)
    at = 0
    while at < len(events) or len(queue):
        free = busy[0]
        while at < len(events) and (events[at][0] <= free or not len(queue)):
            tenant = events[at][1]
            waiter = make_waiter(tenant if fair else "all", 1000)
            arrived[waiter] = events[at]
            queue.add(waiter)
            at += 1
        waiter_next = take(queue)
        assert waiter_next is not None
        since, tenant = arrived.pop(waiter_next)
        start = max(since, free)
        heapq.heapreplace(busy, start + PREFILL_S + rng.uniform(DECODE_S - 1, DECODE_S + 1))
        if tenant == "globex" and since > WARM_S:
            waits.append(start + PREFILL_S - since)
    return waits


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[-1]


def test_a_flood_at_ten_times_the_usual_rate_keeps_another_tenant_s_p99_within_1_5() -> None:
    other = arrivals("globex", USUAL, seed=1)
    flood = arrivals("acme", 10 * USUAL, seed=2)
    alone = p99(first_tokens(other, fair=True))
    assert p99(first_tokens([*other, *flood], fair=True)) < 1.5 * alone
    assert p99(first_tokens([*other, *flood], fair=False)) > 10 * alone


def test_a_call_s_rank_orders_its_tenant_s_calls_and_no_others() -> None:
    queue = FairQueue(100)
    late = [make_waiter("acme", rank=rank) for rank in (5, 0, -3, 0)]
    others = [make_waiter("globex", rank=9), make_waiter("globex", splits=True, rank=1)]
    for waiter in (*late, *others):
        queue.add(waiter)
    turns = take_all(queue)
    acme = [waiter for waiter in turns if waiter.tenant == "acme"]
    assert acme == [late[2], late[1], late[3], late[0]]
    assert [waiter for waiter in turns if waiter.tenant == "globex"] == [others[1], others[0]]
    # The shares are those without ranks: turns alternate.
    assert [waiter.tenant for waiter in turns[:4]] == ["acme", "globex", "acme", "globex"]


def test_a_full_queue_loses_the_call_with_the_highest_rank_of_the_largest_tenant() -> None:
    queue = FairQueue(3)
    waiters = [make_waiter("acme", rank=rank) for rank in (2, 7, 0)]
    for waiter in waiters:
        queue.add(waiter)
    assert queue.add(make_waiter("globex")) is waiters[1]
    assert not queue.remove(waiters[1])
    assert queue.remove(waiters[0])
    assert len(queue) == 2
