"""Circuit and rate meter, by a clock that stands still."""

from __future__ import annotations

from baton_kvstore.circuit import Circuit
from baton_kvstore.rate import RateMeter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_closed_circuit_wants_no_probe() -> None:
    circuit = Circuit(0.1, 2.0, Clock())
    assert circuit.reason == ""
    assert circuit.wait_s() is None
    assert not circuit.claim_probe()


def test_after_a_failure_one_thread_probes_when_the_pause_is_over() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 2.0, clock)
    circuit.fail("gone", clock.now)
    assert circuit.reason == "gone"
    assert circuit.wait_s() == 0.5
    assert not circuit.claim_probe()
    clock.now += 0.5
    assert circuit.wait_s() == 0.0
    assert circuit.claim_probe()
    assert not circuit.claim_probe()
    assert circuit.wait_s() is None
    circuit.succeed()
    assert circuit.reason == ""


def test_the_pause_doubles_up_to_its_limit_and_starts_anew_after_success() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 2.0, clock)
    pauses = []
    for _ in range(5):
        circuit.fail("gone", clock.now)
        pause = circuit.wait_s()
        assert pause is not None
        pauses.append(pause)
        clock.now += pause
    assert pauses == [0.5, 1.0, 2.0, 2.0, 2.0]
    circuit.succeed()
    circuit.fail("again", clock.now)
    assert circuit.wait_s() == 0.5


def test_a_failure_that_began_before_a_success_opens_nothing() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 2.0, clock)
    clock.now += 1.0
    circuit.succeed()
    assert not circuit.fail("late", clock.now - 0.5)
    assert circuit.reason == ""
    assert circuit.fail("now", clock.now)
    assert circuit.reason == "now"


def test_a_rate_is_bytes_over_the_time_something_ran() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    assert meter.bytes_per_s == 0.0
    meter.begin()
    clock.now += 2.0
    meter.end(1000)
    assert meter.bytes_per_s == 500.0
    clock.now += 1000.0  # idle
    meter.begin()
    clock.now += 2.0
    meter.end(1000)
    assert meter.bytes_per_s == 500.0


def test_parallel_transfers_count_together() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin()
    meter.begin()
    clock.now += 1.0
    meter.end(1000)
    meter.end(0)
    assert meter.bytes_per_s == 1000.0


def test_a_new_rate_moves_the_average_and_a_failure_does_not() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for size in (1000, 2000, 0):
        meter.begin()
        clock.now += 1.0
        meter.end(size)
    assert meter.bytes_per_s == 1250.0


def test_a_link_that_is_never_idle_is_measured_too() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin()
    for _ in range(3):
        meter.begin()
        clock.now += 1.0
        meter.end(700)
    assert meter.bytes_per_s == 700.0
