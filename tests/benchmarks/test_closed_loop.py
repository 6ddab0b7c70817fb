"""Runs of the closed loop: they are repeatable, every node is paid for, and more nodes never
attain less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_operator.autoscaling.planner.inputs import Capability, PoolObservation
from benchmarks.support.autoscaling.closed_loop import Course, Targets
from benchmarks.support.autoscaling.contenders import EQUAL, best_split, split_of
from benchmarks.support.autoscaling.load_profiles import CHAT, HOUR_S, Load
from benchmarks.support.autoscaling.pool_observer import Sight
from benchmarks.support.autoscaling.reference_autoscalers import Counts, Hpa

TRUTH = Capability(
    prefill_tokens=8000.0,
    step_base_s=0.014,
    step_per_seq_s=0.0001,
    step_per_kv_token_s=1.1e-7,
    kv_capacity=300_000,
    start_s=90.0,
)
LOAD = Load(
    "short",
    "",
    900.0,
    9.0,
    lambda now_s: 3.0 if now_s < 300.0 else 9.0,
    (CHAT, CHAT),
    lambda now_s: 0.0,
    {"prefill": 1, "decode": 2},
)


def course(seed: int = 1, sight: Sight | None = None, load: Load = LOAD) -> Course:
    return Course(
        load=load,
        seed=seed,
        requests=load.requests(seed),
        truth=TRUTH,
        targets=Targets(),
        sight=sight or Sight(),
    )


def hpa() -> Hpa:
    return Hpa({"prefill": 1.0, "decode": 30.0}, (1, 12))


class Alternating:
    """An autoscaler that adds and removes one decode node in turn."""

    def __init__(self) -> None:
        self._ticks = 0

    def decide(self, situation: PoolObservation) -> Counts:
        self._ticks += 1
        return {"prefill": 1, "decode": 2 + self._ticks % 2}


def test_runs_with_the_same_seed_are_equal() -> None:
    first = course().run(hpa())
    assert first == course().run(hpa())
    assert first != course(seed=2).run(hpa())


def test_a_fixed_split_costs_its_nodes_for_the_length_of_the_load_only() -> None:
    outcome = course().static({"prefill": 1, "decode": 1})
    assert outcome.itl < 0.5
    assert outcome.gpu_hours == pytest.approx(2 * LOAD.length_s / HOUR_S)
    assert (outcome.actions, outcome.reversals, outcome.most_nodes) == (0, 0, 2)


def test_more_nodes_never_attain_less() -> None:
    one = course()
    by_prefill = [one.static({"prefill": n, "decode": 6}) for n in (1, 2, 3, 5)]
    by_decode = [one.static({"prefill": 4, "decode": n}) for n in (2, 3, 4, 6)]
    assert [outcome.ttft for outcome in by_prefill] == sorted(each.ttft for each in by_prefill)
    assert [outcome.itl for outcome in by_decode] == sorted(each.itl for each in by_decode)
    assert by_prefill[0].both < 0.9 < by_prefill[-1].both
    assert all(each.both <= min(each.ttft, each.itl) for each in (*by_prefill, *by_decode))


def test_actions_and_reversals_of_an_autoscaler_are_counted() -> None:
    outcome = course().run(Alternating())
    assert outcome.actions == LOAD.length_s // 15
    assert outcome.reversals == outcome.actions - 1


def test_an_autoscaler_without_observations_keeps_the_initial_nodes() -> None:
    outcome = course(sight=Sight(dropped=1.0)).run(hpa())
    assert outcome.actions == 0
    assert outcome.gpu_hours == pytest.approx(3 * LOAD.length_s / HOUR_S)


def test_without_nodes_no_request_attains_its_targets() -> None:
    outcome = course(load=replace(LOAD, length_s=60.0)).static({"prefill": 0, "decode": 0})
    assert (outcome.both, outcome.gpu_hours) == (0.0, 0.0)
    assert outcome.worst_ttft_s > HOUR_S


def test_the_best_split_attains_as_much_as_the_largest_and_one_node_less_does_not() -> None:
    one = course(load=replace(LOAD, length_s=600.0))
    counts, outcome = best_split(one, 8)
    most = one.static({"prefill": 8, "decode": 8})
    assert outcome.both >= most.both - EQUAL
    prefill, decode = counts["prefill"], counts["decode"]
    for fewer in ((prefill - 1, decode), (prefill, decode - 1)):
        less = one.static({"prefill": fewer[0], "decode": fewer[1]})
        assert less.both < most.both - EQUAL / 2


def test_the_split_of_a_number_of_nodes_attains_the_most() -> None:
    one = course(load=replace(LOAD, length_s=450.0))
    counts, outcome = split_of(one, 5, 4)
    every = [one.static({"prefill": n, "decode": 5 - n}).both for n in (1, 2, 3, 4)]
    assert sum(counts.values()) == 5
    assert outcome.both == max(every)
