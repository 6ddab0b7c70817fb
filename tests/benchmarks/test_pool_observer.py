"""An autoscaler observes the state of the simulated pool with a delay of some seconds."""

from __future__ import annotations

import random

import pytest

from baton_operator.autoscaling.planner.inputs import Capability, Phase
from benchmarks.support.autoscaling.pool_model import Pool
from benchmarks.support.autoscaling.pool_nodes import SimRequest
from benchmarks.support.autoscaling.pool_observer import Observer, Sight

TRUTH = Capability(
    prefill_tokens=1000.0,
    step_base_s=0.02,
    step_per_seq_s=0.0,
    step_per_kv_token_s=0.0,
    kv_capacity=100_000,
    start_s=60.0,
)
EACH_SECOND = [SimRequest(float(second), 400, 300, 51) for second in range(1, 400)]


def observed_pool(sight: Sight, requests: list[SimRequest] = EACH_SECOND) -> tuple[Pool, Observer]:
    pool = Pool(TRUTH, random.Random(1), requests, {"prefill": 1, "decode": 1})
    return pool, Observer(pool, random.Random(2), sight)


def look(pool: Pool, observer: Observer, until_s: float, sight: Sight) -> None:
    for tick in range(1, int(until_s / sight.tick_s) + 1):
        pool.run_until(tick * sight.tick_s - sight.delay_s)
        observer.gather()
        pool.run_until(tick * sight.tick_s)


def test_rates_are_means_over_the_window() -> None:
    sight = Sight(noise=0.0)
    pool, observer = observed_pool(sight)
    look(pool, observer, 300.0, sight)
    demand = observer.situation().demand
    assert demand is not None
    assert (demand.window_s, demand.age_s) == (60.0, 3.0)
    assert (demand.requests, demand.prompt_tokens) == (1.0, 400.0)
    assert demand.uncached_prompt_tokens == 300.0
    assert demand.output_tokens == pytest.approx(51.0, rel=0.02)
    assert demand.ttft_s == pytest.approx(0.3)
    assert demand.itl_s == pytest.approx(0.02 + 0.05 / 50)


def test_rates_have_the_configured_noise() -> None:
    sight = Sight(noise=0.1)
    pool, observer = observed_pool(sight)
    seen = []
    for tick in range(1, 25):
        look(pool, observer, 0.0, sight)
        pool.run_until(tick * 15.0)
        observer.gather()
        demand = observer.situation().demand
        assert demand is not None
        assert demand.requests is not None
        seen.append(demand.requests)
    assert 0.7 < min(seen) < 0.95 < 1.05 < max(seen) < 1.3


def test_gauges_have_the_values_and_the_age_of_the_last_gathering() -> None:
    sight = Sight()
    pool, observer = observed_pool(
        sight, [SimRequest(1.0, 20_000, 20_000, 51), SimRequest(2.0, 500, 500, 51)]
    )
    look(pool, observer, 15.0, sight)
    prefill, decode = observer.situation().nodes
    assert (prefill.queued_tokens, prefill.running, prefill.waiting) == (9500, 1, 1)
    assert (decode.running, decode.kv_tokens, decode.kv_capacity) == (0, 0, 100_000)
    assert prefill.age_s == decode.age_s == sight.delay_s
    assert prefill.busy == pytest.approx(11 / 12)
    assert decode.busy == 0.0


def test_after_a_failed_gathering_the_last_values_age() -> None:
    sight = Sight(dropped=1.0)
    pool, observer = observed_pool(sight)
    look(pool, observer, 30.0, sight)
    assert observer.situation().demand is None
    assert {node.running for node in observer.situation().nodes} == {None}

    some = Sight(dropped=0.5)
    pool, observer = observed_pool(some)
    ages = set()
    for tick in range(1, 25):
        pool.run_until(tick * 15.0 - 3.0)
        observer.gather()
        pool.run_until(tick * 15.0)
        demand = observer.situation().demand
        ages.add(None if demand is None else demand.age_s)
    assert {3.0, 18.0} <= ages


def test_a_starting_node_is_listed_without_gauges() -> None:
    sight = Sight()
    pool, observer = observed_pool(sight)
    look(pool, observer, 15.0, sight)
    pool.scale({"prefill": 1, "decode": 2})
    pool.run_until(20.0)
    observer.gather()
    new = observer.situation().nodes[-1]
    assert (new.phase, new.since_s, new.age_s, new.running) == (Phase.STARTING, 5.0, None, None)
    assert observer.situation().current_replicas == {"prefill": 1, "decode": 2}


def test_a_node_is_observed_as_ready_with_its_first_report() -> None:
    sight = Sight()
    pool, observer = observed_pool(sight)
    look(pool, observer, 15.0, sight)
    pool.scale({"prefill": 1, "decode": 2})
    pool.run_until(115.0)
    assert [node.phase for node in pool.decode] == [Phase.READY, Phase.READY]
    assert observer.situation().nodes[-1].phase is Phase.STARTING
    observer.gather()
    seen = observer.situation().nodes[-1]
    assert (seen.phase, seen.age_s) == (Phase.READY, 0.0)


def test_the_capability_is_underestimated_until_it_is_measured() -> None:
    sight = Sight()
    pool, observer = observed_pool(sight)
    first = observer.situation().capability
    assert first is not None
    assert first.samples == 0
    assert first.prefill_tokens == pytest.approx(850.0)
    look(pool, observer, 300.0, sight)
    learnt = observer.situation().capability
    assert learnt is not None
    assert learnt.samples > 0
    assert learnt.prefill_tokens == pytest.approx(1000.0, rel=0.1)
    assert learnt.step_base_s == pytest.approx(0.02, rel=0.1)
