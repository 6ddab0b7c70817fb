"""RateMeter and Average, with a fake clock."""

from __future__ import annotations

from baton_kvstore.data.rate_meter import Average, RateMeter
from tests.support.clock import Clock


def test_a_rate_is_bytes_over_the_time_with_a_running_transfer() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    assert meter.bytes_per_s == 0.0
    meter.begin_transfer()
    clock.advance(2.0)
    meter.end_transfer(1000)
    assert meter.bytes_per_s == 500.0
    clock.advance(1000.0)  # idle
    meter.begin_transfer()
    clock.advance(2.0)
    meter.end_transfer(1000)
    assert meter.bytes_per_s == 500.0


def test_bytes_of_parallel_transfers_add_up() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin_transfer()
    meter.begin_transfer()
    clock.advance(1.0)
    meter.end_transfer(1000)
    meter.end_transfer(0)
    assert meter.bytes_per_s == 1000.0


def test_a_new_rate_moves_the_average_and_a_failure_does_not() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for size in (1000, 2000, 0):
        meter.begin_transfer()
        clock.advance(1.0)
        meter.end_transfer(size)
    assert meter.bytes_per_s == 1250.0


def test_a_link_that_is_never_idle_is_measured() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin_transfer()
    for _ in range(3):
        meter.begin_transfer()
        clock.advance(1.0)
        meter.end_transfer(700)
    assert meter.bytes_per_s == 700.0


def test_a_total_counts_the_transfers_of_two_meters() -> None:
    clock = Clock()
    total = RateMeter(clock)
    one, other = RateMeter(clock, total), RateMeter(clock, total)
    one.begin_transfer()
    other.begin_transfer()
    clock.advance(1.0)
    one.end_transfer(1000)
    clock.advance(1.0)
    other.end_transfer(3000)
    assert (one.bytes_per_s, other.bytes_per_s) == (1000.0, 1500.0)
    # The total adds a sample when the first transfer ends, after 1 s, and when the second does.
    assert total.bytes_per_s == 1000.0 + 0.25 * (3000.0 - 1000.0)


def test_an_average_starts_at_its_first_sample_and_follows_the_next() -> None:
    average = Average()
    assert average.value == 0.0
    average.add(4.0)
    assert average.value == 4.0
    average.add(8.0)
    assert average.value == 5.0
