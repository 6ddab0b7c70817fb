"""CircuitBreaker, with a fake clock."""

from __future__ import annotations

from baton_kvstore.data.circuit_breaker import CircuitBreaker
from tests.support.clock import Clock


def test_a_closed_circuit_needs_no_probe() -> None:
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
    circuit.succeed(clock.now)
    assert circuit.reason == ""


def test_the_pause_doubles_up_to_its_limit_and_is_reset_by_success() -> None:
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
    circuit.succeed(clock.now)
    circuit.fail("again", clock.now)
    assert circuit.wait_s() == 0.5


def test_a_failure_that_began_before_a_success_is_ignored() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 2.0, clock)
    clock.advance(1.0)
    circuit.succeed(clock.now)
    assert not circuit.fail("late", clock.now - 0.5)
    assert circuit.reason == ""
    assert circuit.fail("now", clock.now)
    assert circuit.reason == "now"


def test_a_success_that_began_before_a_failure_is_ignored() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 2.0, clock)
    began = clock.now
    clock.advance(1.0)
    circuit.fail("gone", clock.now)
    circuit.succeed(began)
    assert circuit.reason == "gone"


def test_a_circuit_on_trial_keeps_doubling_its_pause_until_an_operation_succeeds() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 4.0, clock)
    pauses = []
    for turn in range(5):
        circuit.fail("full", clock.now)
        assert not circuit.on_trial
        pauses.append(circuit.wait_s())
        clock.advance(10.0)
        circuit.succeed(clock.now, trial=True)
        assert (circuit.reason, circuit.on_trial) == ("", True)
        if turn == 3:
            assert circuit.prove()
            assert not circuit.prove()
        clock.advance(1.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 0.5]


def test_a_success_without_a_trial_ends_no_trial() -> None:
    clock = Clock()
    circuit = CircuitBreaker(0.5, 4.0, clock)
    assert not circuit.prove()
    circuit.fail("gone", clock.now)
    circuit.succeed(clock.now)
    assert not circuit.prove()
