"""The simulated pool: no request is lost, and every node is paid for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton_operator.autoscaling.planner.inputs import Capability, Phase
from baton_protocol.store import ROLES, Role
from benchmarks.support.autoscaling.pool_model import START_SPREAD, Pool
from benchmarks.support.autoscaling.pool_nodes import SimRequest

TRUTH = Capability(
    prefill_tokens=2000.0,
    step_base_s=0.02,
    step_per_seq_s=0.0005,
    step_per_kv_token_s=1e-6,
    kv_capacity=20_000,
    start_s=60.0,
)
FOREVER_S = 1e5


def random_requests(count: int, rate: float, seed: int = 1) -> list[SimRequest]:
    rng = random.Random(seed)
    now_s, requests = 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        prompt = rng.randrange(100, 3000)
        requests.append(SimRequest(now_s, prompt, rng.randrange(1, prompt), rng.randrange(2, 400)))
    return requests


def pool(requests: Sequence[SimRequest], prefill: int, decode: int) -> Pool:
    return Pool(TRUTH, random.Random(1), requests, {"prefill": prefill, "decode": decode})


@pytest.mark.parametrize("seed", range(8))
def test_each_request_ends_once_for_any_sequence_of_node_counts(seed: int) -> None:
    rng, requests = random.Random(seed), random_requests(400, 2.0, seed)
    model = pool(requests, 1, 1)
    for tick in range(40):
        model.run_until(10.0 * tick)
        model.scale({"prefill": rng.randrange(4), "decode": rng.randrange(4)})
    model.scale({"prefill": 1, "decode": 1})
    model.run_until(FOREVER_S)
    assert [answer.request for answer in model.answers] == requests
    assert [answer.ends for answer in model.answers] == [1] * len(requests)
    assert len(model.finished) == len(requests)
    assert model.live == 0
    assert not model.held


def test_exactly_the_requested_tokens_are_generated() -> None:
    requests = random_requests(300, 1.0)
    model = pool(requests, 2, 2)
    model.run_until(FOREVER_S)
    assert model.generated() == pytest.approx(sum(request.output for request in requests), rel=1e-6)
    assert [(node.kv, node.reserved, node.promised) for node in model.decode] == [(0.0, 0, 0)] * 2


def test_every_request_arrives_starts_and_ends_in_this_order() -> None:
    model = pool(random_requests(300, 2.0), 1, 2)
    model.run_until(FOREVER_S)
    for answer in model.answers:
        assert answer.first_s is not None
        assert answer.end_s is not None
        assert answer.request.at_s < answer.first_s < answer.end_s


def test_a_fixed_pool_costs_its_nodes_for_the_whole_time() -> None:
    model = pool(random_requests(10, 1.0), 2, 3)
    model.run_until(1000.0)
    assert {role: model.gpu_s(role, 1000.0) for role in ROLES} == {"prefill": 2000, "decode": 3000}


def test_a_new_node_costs_from_its_creation_and_serves_after_its_start() -> None:
    model = pool([], 1, 1)
    model.run_until(100.0)
    model.scale({"prefill": 1, "decode": 2})
    model.run_until(100.0 + TRUTH.start_s * (1 - START_SPREAD) - 1.0)
    assert [node.phase for node in model.decode] == [Phase.READY, Phase.STARTING]
    model.run_until(100.0 + TRUTH.start_s * (1 + START_SPREAD))
    assert [node.phase for node in model.decode] == [Phase.READY, Phase.READY]
    assert model.gpu_s("decode", 500.0) == 500.0 + 400.0


def test_starting_nodes_are_removed_first_and_at_once() -> None:
    model = pool([], 1, 1)
    model.scale({"prefill": 3, "decode": 1})
    model.run_until(10.0)
    model.scale({"prefill": 1, "decode": 1})
    model.run_until(500.0)
    assert [node.name for node in model.prefill] == ["prefill-0"]
    assert model.gpu_s("prefill", 500.0) == 500.0 + 2 * 10.0


def test_a_draining_node_finishes_its_requests_takes_no_new_ones_and_costs_until_then() -> None:
    long, late = SimRequest(0.0, 100, 100, 1001), SimRequest(2.0, 100, 100, 11)
    model = pool([long, SimRequest(0.5, 100, 100, 1001), late], 1, 2)
    model.run_until(1.0)
    busy = {node.name: node for node in model.decode}
    model.scale({"prefill": 1, "decode": 1})
    [draining] = [node for node in busy.values() if node.phase is Phase.DRAINING]
    model.run_until(3.0)
    assert [len(node.batch) for node in model.decode if node is draining] == [1]
    model.run_until(FOREVER_S)
    assert draining.gone_s is not None
    assert draining.gone_s in {answer.end_s for answer in model.answers}
    assert draining.gpu_s(FOREVER_S) == draining.gone_s
    assert [answer.ends for answer in model.answers] == [1, 1, 1]


def test_a_node_without_requests_is_removed_at_once() -> None:
    model = pool([], 2, 1)
    model.run_until(50.0)
    model.scale({"prefill": 1, "decode": 1})
    assert model.gpu_s("prefill", 100.0) == 100.0 + 50.0


def test_requests_at_zero_nodes_are_held_and_answered_after_a_start() -> None:
    model = pool([SimRequest(5.0, 100, 100, 10)], 0, 0)
    model.run_until(20.0)
    assert len(model.held) == 1
    model.scale({"prefill": 1, "decode": 1})
    model.run_until(300.0)
    [answer] = model.answers
    assert answer.ends == 1
    assert answer.ttft_s is not None
    assert answer.ttft_s > 15.0 + TRUTH.start_s * (1 - START_SPREAD)


@pytest.mark.parametrize("role", ROLES)
def test_more_nodes_of_a_role_never_make_its_latency_worse(role: Role) -> None:
    def mean_s(nodes: int) -> float:
        counts: dict[Role, int] = {"prefill": 3, "decode": 3}
        counts[role] = nodes
        model = Pool(TRUTH, random.Random(1), random_requests(500, 2.0), counts)
        model.run_until(FOREVER_S)
        times = [one.ttft_s if role == "prefill" else one.itl_s for one in model.answers]
        return sum(time_s for time_s in times if time_s is not None) / len(times)

    latencies = [mean_s(nodes) for nodes in (1, 2, 3, 5, 8)]
    assert latencies == sorted(latencies, reverse=True)
    assert latencies[0] > 1.2 * latencies[-1]
