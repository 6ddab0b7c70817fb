"""Circuit and averages, by a clock that stands still."""

from __future__ import annotations

from baton_kvstore.data.circuit_breaker import CircuitBreaker
from baton_kvstore.data.transfer_rate import Average, RateMeter
from tests.support.clock import Clock


def test_a_closed_circuit_wants_no_probe() -> None:
    circuit = CircuitBreaker(0.1, 2.0, Clock())
    assert circuit.reason == ""
    assert circuit.wait_s() is None
    assert not circuit.claim_probe()


def test_after_a_failure_one_thread_probes_when_the_pause_is_over() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 2.0, clock)
    circuit.fail("gone", clock.now)
    assert circuit.reason == "gone"
    assert circuit.wait_s() == 0.5
    assert not circuit.claim_probe()
    clock.advance(0.5)
    assert circuit.wait_s() == 0.0
    assert circuit.claim_probe()
    assert not circuit.claim_probe()
    assert circuit.wait_s() is None
    circuit.succeed()
    assert circuit.reason == ""


def test_the_pause_doubles_up_to_its_limit_and_starts_anew_after_success() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 2.0, clock)
    pauses = []
    for _ in range(5):
        circuit.fail("gone", clock.now)
        pause = circuit.wait_s()
        assert pause is not None
        pauses.append(pause)
        clock.advance(pause)
    assert pauses == [0.5, 1.0, 2.0, 2.0, 2.0]
    circuit.succeed()
    circuit.fail("again", clock.now)
    assert circuit.wait_s() == 0.5


def test_a_failure_that_began_before_a_success_opens_nothing() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 2.0, clock)
    clock.advance(1.0)
    circuit.succeed()
    assert not circuit.fail("late", clock.now - 0.5)
    assert circuit.reason == ""
    assert circuit.fail("now", clock.now)
    assert circuit.reason == "now"


def test_a_circuit_on_trial_pauses_longer_each_time_until_an_operation_has_worked() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 4.0, clock)
    pauses = []
    for turn in range(5):
        circuit.fail("full", clock.now)
        assert not circuit.on_trial
        pauses.append(circuit.wait_s())
        clock.advance(10.0)
        circuit.succeed(trial=True)
        assert (circuit.reason, circuit.on_trial) == ("", True)
        if turn == 3:
            assert circuit.prove()
            assert not circuit.prove()
        clock.advance(1.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 0.5]


def test_what_works_without_a_trial_proves_nothing() -> None:
    circuit = CircuitBreaker(0.5, 4.0, Clock())
    assert not circuit.prove()
    circuit.fail("gone", 100.0)
    circuit.succeed()
    assert not circuit.prove()


def test_a_rate_is_bytes_over_the_time_something_ran() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    assert meter.bytes_per_s == 0.0
    meter.begin()
    clock.advance(2.0)
    meter.end(1000)
    assert meter.bytes_per_s == 500.0
    clock.advance(1000.0)  # idle
    meter.begin()
    clock.advance(2.0)
    meter.end(1000)
    assert meter.bytes_per_s == 500.0


def test_parallel_transfers_count_together() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin()
    meter.begin()
    clock.advance(1.0)
    meter.end(1000)
    meter.end(0)
    assert meter.bytes_per_s == 1000.0


def test_a_new_rate_moves_the_average_and_a_failure_does_not() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for size in (1000, 2000, 0):
        meter.begin()
        clock.advance(1.0)
        meter.end(size)
    assert meter.bytes_per_s == 1250.0


def test_a_link_that_is_never_idle_is_measured_too() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin()
    for _ in range(3):
        meter.begin()
        clock.advance(1.0)
        meter.end(700)
    assert meter.bytes_per_s == 700.0


def test_what_two_meters_count_their_total_counts_together() -> None:
    clock = Clock()
    total = RateMeter(clock)
    one, other = RateMeter(clock, total), RateMeter(clock, total)
    one.begin()
    other.begin()
    clock.advance(1.0)
    one.end(1000)
    clock.advance(1.0)
    other.end(3000)
    assert (one.bytes_per_s, other.bytes_per_s) == (1000.0, 1500.0)
    # It was folded in when the first one ended, after 1 s, and then when the second did.
    assert total.bytes_per_s == 1000.0 + 0.25 * (3000.0 - 1000.0)


def test_an_average_begins_with_its_first_sample_and_follows_the_next() -> None:
    average = Average()
    assert average.value == 0.0
    average.add(4.0)
    assert average.value == 4.0
    average.add(8.0)
    assert average.value == 5.0
