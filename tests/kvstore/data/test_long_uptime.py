"""The data plane after a year without work, and after a week of trouble or load."""

from __future__ import annotations

import math
import random

import pytest

from baton_kvstore.data.circuit_breaker import CircuitBreaker
from baton_kvstore.data.rate_meter import Average, RateMeter
from baton_kvstore.data.write_behind_budget import BURST_S, TokenBucket, WriteBehindBudget
from baton_kvstore.keys import ttl_ms
from tests.support.clock import Clock
from tests.support.growth import WEEK_S, YEAR_S, grown, nan_paths, sizes

MIB = 1 << 20


def test_a_server_that_was_down_for_a_year_is_probed_at_the_longest_pause_and_used_again() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.1, 5.0, clock)
    probes = 0
    began = clock.now
    while clock.now < began + WEEK_S:
        circuit.fail("away", clock.now)
        pause = circuit.wait_s()
        assert pause is not None
        assert 0.099 <= pause <= 5.001
        clock.advance(pause + 1e-6)
        assert circuit.claim_probe()
        probes += 1
    assert probes > WEEK_S / 5.1
    clock.advance(YEAR_S)
    circuit.succeed(clock.now)
    assert circuit.reason == ""
    circuit.fail("away again", clock.now)
    assert circuit.wait_s() == pytest.approx(0.1, abs=1e-6)


def test_a_rate_survives_a_year_without_transfers() -> None:
    clock = Clock()
    total = RateMeter(clock)
    meter = RateMeter(clock, total)
    for _ in range(1000):
        meter.begin_transfer()
        clock.advance(0.01)
        meter.end_transfer(MIB)
    usual = meter.bytes_per_s
    clock.advance(YEAR_S)
    assert meter.bytes_per_s == usual
    meter.begin_transfer()
    clock.advance(0.01)
    meter.end_transfer(MIB)
    assert math.isclose(meter.bytes_per_s, usual, rel_tol=0.01)
    assert math.isclose(total.bytes_per_s, usual, rel_tol=0.01)


def test_rates_stay_finite_over_a_week_of_extreme_measurements() -> None:
    clock, rng = Clock(), random.Random(1)
    meter, average = RateMeter(clock), Average()
    before = sizes(meter)
    for _ in range(100_000):
        meter.begin_transfer()
        clock.advance(rng.choice((0.0, 1e-9, 1e-3, 3600.0)))
        meter.end_transfer(rng.choice((0, 1, MIB, 1 << 40)))
        average.add(rng.choice((0.0, 1e-300, 1.0, 1e300)))
    assert 0.0 < meter.bytes_per_s < math.inf
    assert 0.0 <= average.value < math.inf
    assert nan_paths(meter) == []
    assert grown(before, sizes(meter)) == {}


def test_an_idle_year_saves_up_at_most_a_second_of_write_behind() -> None:
    clock = Clock()
    bucket, behind = TokenBucket(clock), WriteBehindBudget(None, clock)
    clock.advance(YEAR_S)
    passed = 0
    while bucket.take(MIB, 10.0 * MIB):
        passed += 1
    assert passed == 10 * BURST_S
    clock.advance(YEAR_S)
    assert behind.take(MIB, put_bytes_per_s=0.0, fullest=0.0, others=False)


def test_a_chunk_of_any_depth_has_a_valid_ttl() -> None:
    for depth in (0, 1, 1 << 20, 1 << 62):
        assert 1000 * 1800 <= ttl_ms(depth) <= 1000 * 3600
