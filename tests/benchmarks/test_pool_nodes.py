"""The simulated nodes against a simulation of single steps and against queueing theory."""

from __future__ import annotations

import random
from collections import deque

import pytest

from baton_operator.autoscaling.planner.inputs import Capability
from benchmarks.support.autoscaling.pool_nodes import Answer, DecodeNode, PrefillNode, SimRequest

TRUTH = Capability(
    prefill_tokens=1000.0,
    step_base_s=0.01,
    step_per_seq_s=0.0005,
    step_per_kv_token_s=1e-6,
    kv_capacity=12_000,
)


def in_steps(requests: list[SimRequest], truth: Capability) -> list[float]:
    """Return when each request ends on one decode node, simulated step by step."""
    now_s, ends = 0.0, dict.fromkeys(range(len(requests)), 0.0)
    coming, waiting = deque(range(len(requests))), deque[int]()
    left: dict[int, int] = {}
    assert truth.kv_capacity is not None
    while coming or waiting or left:
        if not waiting and not left:
            now_s = max(now_s, requests[coming[0]].at_s)
        while coming and requests[coming[0]].at_s <= now_s:
            waiting.append(coming.popleft())
        reserved = sum(requests[one].prompt + requests[one].output for one in left)
        while waiting and (
            not left
            or reserved + requests[waiting[0]].prompt + requests[waiting[0]].output
            <= truth.kv_capacity
        ):
            one = waiting.popleft()
            left[one] = requests[one].output - 1
            reserved += requests[one].prompt + requests[one].output
        held = sum(requests[one].prompt + requests[one].output - todo for one, todo in left.items())
        now_s += (
            truth.step_base_s + len(left) * truth.step_per_seq_s + held * truth.step_per_kv_token_s
        )
        for one in list(left):
            left[one] -= 1
            if not left[one]:
                ends[one] = now_s
                del left[one]
    return list(ends.values())


def in_events(requests: list[SimRequest], truth: Capability) -> list[float]:
    """Return when each request ends on one DecodeNode, simulated from event to event."""
    node = DecodeNode("decode", 0.0, truth)
    answers = [Answer(request) for request in requests]
    coming = deque(answers)
    while coming or not node.empty:
        end_s = node.next_end_s() if node.batch else float("inf")
        if coming and coming[0].request.at_s <= end_s:
            node.advance(coming[0].request.at_s)
            node.take(coming.popleft())
        else:
            node.advance(end_s)
            for answer in node.ended():
                answer.end_s = end_s
        node.admit()
    return [answer.end_s for answer in answers if answer.end_s is not None]


@pytest.mark.parametrize("seed", range(5))
def test_a_decode_node_ends_each_request_when_the_simulation_of_steps_does(seed: int) -> None:
    rng = random.Random(seed)
    now_s, requests = 0.0, []
    for _ in range(80):
        now_s += rng.expovariate(1.0)
        requests.append(SimRequest(now_s, rng.randrange(100, 2000), 0, rng.randrange(50, 400)))

    exact, solved = in_steps(requests, TRUTH), in_events(requests, TRUTH)

    longest_step_s = 0.01 + 80 * 0.0005 + 12_000 * 1e-6
    off = [abs(a - b) for a, b in zip(exact, solved, strict=True)]
    assert sum(off) / len(off) < longest_step_s
    assert max(off) < 5 * longest_step_s  # a request may join the batch some steps later


def test_a_single_batch_takes_the_sum_of_its_steps() -> None:
    requests = [SimRequest(0.0, 1000, 0, 101)] * 4
    steps = sum(0.01 + 4 * 0.0005 + (4 * 1001 + 4 * n) * 1e-6 for n in range(100))
    assert in_events(requests, TRUTH) == pytest.approx([steps] * 4, rel=1e-2)


def test_a_request_that_does_not_fit_the_cache_waits_for_the_first_to_end() -> None:
    first, second = in_events([SimRequest(0.0, 9000, 0, 100), SimRequest(0.0, 9000, 0, 100)], TRUTH)
    assert second == pytest.approx(2 * first, rel=1e-6)


def test_a_request_larger_than_the_cache_runs_alone() -> None:
    assert len(in_events([SimRequest(0.0, 20_000, 0, 10), SimRequest(0.0, 100, 0, 10)], TRUTH)) == 2


def test_prompts_wait_as_long_as_the_m_d_1_formula_predicts() -> None:
    work_s, share = 0.5, 0.8
    rng, node, now_s, waited_s = random.Random(3), PrefillNode("prefill", 0.0, TRUTH), 0.0, 0.0
    count = 200_000
    for _ in range(count):
        now_s += rng.expovariate(share / work_s)
        waited_s += node.take(int(work_s * TRUTH.prefill_tokens), now_s) - work_s - now_s
    assert waited_s / count == pytest.approx(share * work_s / (2 * (1 - share)), rel=0.05)


def test_the_busy_time_of_a_prefill_node_is_its_compute_time() -> None:
    node = PrefillNode("prefill", 0.0, TRUTH)
    node.take(2000, 0.0)
    assert [node.busy_s(at_s) for at_s in (0.5, 2.0, 9.0)] == [0.5, 2.0, 2.0]
    node.take(1000, 10.0)
    assert [node.busy_s(at_s) for at_s in (10.5, 20.0)] == [2.5, 3.0]
