"""The autoscaler over several looks: which inputs it uses, when it acts, and how it restarts."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import AutoscalingStatus, PoolStatus
from baton_operator.autoscaling.autoscaler import Autoscaler, current_replicas
from baton_operator.builders.nodes import revision_of
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.decision_log import DecisionLog
from baton_operator.state.index_reader import IndexAnswer
from baton_operator.state.index_timing import LOOK_S
from baton_operator.state.observed import Observed, Planned
from baton_operator.status.derive import derive_status
from baton_protocol.store import NodeLoad, Role, RouterReport
from tests.support.kubernetes.manifests import sample, sample_pool
from tests.support.planner.observations import NOW, OLD, observed, report, workload

KEY = PoolKey("serving", "demo")
BOUNDS = {"prefill": {"max": 4}, "decode": {"max": 4}}
AUTO: dict[str, Any] = {"mode": "auto", **BOUNDS}
HEAVY = 25_000.0  # prompt tokens per second; a node computes 10,000


class Operator:
    """An operator that looks every LOOK_S; `start` replaces it by a new one in the same cluster."""

    def __init__(self, **spec: Any) -> None:
        self.pool = sample_pool("sim", **({"autoscaling": AUTO} | spec))
        self.seconds = 1000.0
        self.uncached = 0.0
        self.status = PoolStatus()
        self.cache = Cache(lambda _: None, lambda: self.seconds)
        self.decisions = DecisionLog()
        self.start()

    def start(self) -> None:
        self.autoscaler = Autoscaler(
            KEY,
            self.cache,
            Metrics(),
            lambda: self.seconds,
            lambda: NOW + timedelta(seconds=self.seconds),
            self.decisions,
        )

    def observed(self) -> Observed:
        return observed(self.counted)

    @property
    def counted(self) -> Pool:
        """The pool with the number of pods of the last decision."""
        decision = self.status.autoscaling
        if decision is None or decision.mode != "auto":
            return self.pool
        spec = self.pool.spec
        prefill = msgspec.structs.replace(spec.prefill, replicas=decision.desired_prefill)
        decode = msgspec.structs.replace(spec.decode, replicas=decision.desired_decode)
        counted = msgspec.structs.replace(spec, prefill=prefill, decode=decode)
        return msgspec.structs.replace(self.pool, spec=counted)

    def answer(self, held: int = 0, idle_s: float = 0.0, fetched: float = 0.0) -> IndexAnswer:
        """Return the index's answer; each node has read `fetched` bytes per second from the
        store."""
        total = int(self.uncached)
        router = RouterReport(
            router="a",
            uptime_s=self.seconds,
            requests_total=1 + total // 1000,
            prompt_tokens_total=total,
            uncached_tokens_total=total,
            held=held,
            idle_s=idle_s,
        )
        counts: dict[Role, int] = {
            "prefill": self.counted.spec.prefill.replicas,
            "decode": self.counted.spec.decode.replicas,
        }
        load = NodeLoad(fetched_bytes_total=int(fetched * self.seconds))
        nodes = tuple(
            msgspec.structs.replace(report(self.pool, role, number), load=load)
            for role, count in counts.items()
            for number in range(count)
        )
        return IndexAnswer(nodes=nodes, fetches=(), routers=(router,))

    def look(self, answer: IndexAnswer | None, **changes: Any) -> tuple[Pool, Planned | None]:
        """Run one look, and derive the status from its result."""
        self.cache.see_pool(
            sample("sim")
            | {
                "metadata": sample("sim")["metadata"] | {"uid": "u", "resourceVersion": "1"},
                "status": self.status.written(),
            },
            listed=True,
        )
        seen, revision = (
            msgspec.structs.replace(self.observed(), **changes),
            revision_of(self.pool).name,
        )
        pool, planned = self.autoscaler.follow(self.pool, revision, seen, answer)
        decided = msgspec.structs.replace(seen, planned=planned)
        now = NOW + timedelta(seconds=self.seconds)
        self.status = derive_status(pool, revision, 1, decided, self.status, now, self.seconds)
        return pool, planned

    def looks(self, count: int, rate: float = 0.0, **answer: Any) -> tuple[int, int]:
        """Return the counts after `count` looks while clients send `rate` prompt tokens/s."""
        for _ in range(count):
            self.seconds += LOOK_S
            self.uncached += rate * LOOK_S
            pool, _ = self.look(self.answer(**answer))
        return pool.spec.prefill.replicas, pool.spec.decode.replicas

    def silence(self, count: int) -> tuple[int, int]:
        """Return the counts after `count` looks without an answer of the index."""
        for _ in range(count):
            self.seconds += LOOK_S
            pool, _ = self.look(None)
        return pool.spec.prefill.replicas, pool.spec.decode.replicas

    @property
    def decision(self) -> AutoscalingStatus:
        assert self.status.autoscaling is not None
        return self.status.autoscaling


def test_prompts_add_prefill_nodes_in_auto_mode() -> None:
    operator = Operator()
    assert operator.looks(2) == (1, 1)
    assert operator.looks(16, HEAVY) == (4, 1)
    assert (operator.decision.mode, operator.decision.desired_prefill) == ("auto", 4)


def test_prompts_add_no_prefill_nodes_near_the_read_limit_of_the_store() -> None:
    operator = Operator(autoscaling=AUTO | {"storeReadPerSecond": "10G"})
    assert operator.looks(2, fetched=4.5e9) == (1, 1)
    assert operator.looks(16, HEAVY, fetched=4.5e9) == (1, 1)
    assert operator.decision.reason == "StoreLimited"
    assert "9.00 of 10.00 GB/s" in operator.decision.message
    assert operator.looks(16, HEAVY, fetched=1e9)[0] > 1


def test_advise_mode_does_not_change_the_pool() -> None:
    operator = Operator(autoscaling=AUTO | {"mode": "advise"})
    assert operator.looks(8, HEAVY) == (1, 1)
    assert operator.decision.mode == "advise"
    assert operator.decision.desired_prefill > 1


@pytest.mark.parametrize("scaling", [None, {"mode": "external"}])
def test_without_a_planner_there_is_no_decision(scaling: Any) -> None:
    operator = Operator(autoscaling=scaling)
    pool, planned = operator.look(operator.answer())
    assert (pool, planned) == (operator.pool, None)
    assert operator.status.autoscaling is None


def test_a_silent_index_keeps_the_counts_and_is_reported() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    assert operator.silence(20) == (4, 1)
    assert operator.decision.reason == "DemandStale"
    pattern = "load report is [0-9]+ s old, over the limit of 30 s"
    assert re.search(pattern, operator.decision.message)


def test_silent_routers_keep_the_counts_and_are_reported() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    for _ in range(20):
        operator.seconds += LOOK_S
        operator.look(msgspec.structs.replace(operator.answer(), routers=()))
    assert (operator.decision.reason, operator.decision.desired_prefill) == ("DemandStale", 4)


def test_without_any_report_the_counts_stay_and_demand_is_unknown() -> None:
    operator = Operator(prefill={"replicas": 3})
    assert operator.silence(30) == (3, 1)
    assert operator.decision.reason == "DemandUnknown"


def test_a_new_operator_continues_from_the_status() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    operator.start()
    assert operator.silence(1) == (4, 1)
    assert operator.looks(40) == (4, 1)  # it has not observed a whole window yet
    assert operator.looks(60)[0] < 4


def test_less_load_removes_one_node_after_the_other() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    seen = [operator.looks(1)[0] for _ in range(120)]
    assert seen[-1] == 1
    assert [count for at, count in enumerate(seen) if seen[at - 1] != count or not at] == [
        4,
        3,
        2,
        1,
    ]


def test_a_decision_stays_until_the_next_look_is_due() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    before = operator.look(None)
    operator.seconds += LOOK_S / 2
    assert operator.look(None) == before


def test_a_role_in_external_mode_keeps_the_count_of_the_spec() -> None:
    scaling = AUTO | {"decode": {"mode": "external"}}
    operator = Operator(autoscaling=scaling, decode={"replicas": 7})
    assert operator.looks(16, HEAVY) == (4, 7)
    operator.pool = sample_pool("sim", autoscaling=scaling, decode={"replicas": 2})
    pool, _ = operator.look(None)
    assert pool.spec.decode.replicas == 2


def test_a_paused_pool_keeps_the_counts_of_the_last_decision() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    operator.pool = sample_pool("sim", autoscaling=AUTO, paused=True)
    pool, planned = operator.look(operator.answer())
    assert planned is None
    assert pool.spec.prefill.replicas == 4
    assert operator.decision.desired_prefill == 4


def test_an_idle_pool_sleeps_and_a_held_request_wakes_it() -> None:
    operator = Operator(autoscaling=AUTO | {"scaleToZeroAfterSeconds": 60})
    operator.looks(4, 1000.0)
    assert operator.looks(3, idle_s=50.0) == (1, 1)
    assert operator.looks(1, idle_s=61.0) == (0, 0)
    assert operator.decision.reason == "Idle"
    assert operator.looks(1, idle_s=66.0) == (0, 0)
    assert operator.decision.reason == "Asleep"
    assert operator.silence(20) == (0, 0)
    assert operator.looks(1, held=1) == (1, 1)
    assert operator.decision.reason == "Woken"


@pytest.mark.parametrize(
    "routers",
    [
        {"holds": False},  # routers that started before the pool was allowed to sleep
        {"current": False},
        {"pods": 2, "updated": 1},
        {"ready": 0},
    ],
)
def test_a_pool_stays_awake_until_all_its_routers_hold_requests(routers: dict[str, Any]) -> None:
    operator = Operator(autoscaling=AUTO | {"scaleToZeroAfterSeconds": 60})
    operator.looks(4, 1000.0)
    workloads = tuple(
        msgspec.structs.replace(observed_workload, **routers)
        if observed_workload.component == "router"
        else observed_workload
        for observed_workload in operator.observed().workloads
    )
    for _ in range(5):
        operator.seconds += LOOK_S
        pool, _ = operator.look(operator.answer(idle_s=61.0), workloads=workloads)
        assert pool.spec.decode.replicas == 1
    assert operator.looks(1, idle_s=66.0) == (0, 0)


def test_advise_mode_reports_an_idle_pool_although_no_router_holds_requests() -> None:
    advise = {"mode": "advise", "scaleToZeroAfterSeconds": 60}
    operator = Operator(autoscaling=AUTO | advise)
    operator.looks(4, 1000.0)
    assert operator.looks(1, idle_s=61.0) == (1, 1)
    assert operator.decision.reason == "Idle"


def test_a_new_operator_wakes_a_pool_at_its_first_look() -> None:
    operator = Operator(autoscaling=AUTO | {"scaleToZeroAfterSeconds": 60})
    operator.looks(4, 1000.0)
    operator.looks(1, idle_s=61.0)
    operator.start()
    assert operator.looks(1, held=1) == (1, 1)


def test_in_a_roll_out_no_role_shrinks() -> None:
    operator = Operator(autoscaling=AUTO | {"scaleDown": {"stabilizationSeconds": 0}})
    operator.looks(16, HEAVY)
    old = (workload("demo-prefill-old", "prefill", 1, OLD),)
    for _ in range(30):
        operator.seconds += LOOK_S
        operator.look(operator.answer(), workloads=(*operator.observed().workloads, *old))
    assert (operator.decision.reason, operator.decision.desired_prefill) == ("RollOutRunning", 4)
    assert operator.looks(5)[0] < 4


def test_contradictory_bounds_are_an_invalid_spec() -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    operator = Operator(prefill=gpu, decode=gpu, gpuBudget=1)
    with pytest.raises(SpecError, match="gpuBudget 1"):
        operator.look(None)


def test_each_change_is_noted_for_the_index_with_its_time_and_reason() -> None:
    operator = Operator()
    operator.looks(2)
    before = len(operator.decisions.unwritten)
    operator.looks(16, HEAVY)
    noted = operator.decisions.unwritten
    assert 1 <= before < len(noted) < 18  # fewer than looks
    assert (noted[0].prefill, noted[0].decode) == (1, 1)
    assert (noted[-1].prefill, noted[-1].decode) == (4, 1)
    assert noted[-1].reason
    assert noted[-1].message
    times = [decision.at_ms for decision in noted]
    assert times == sorted(times)
    assert times[0] >= 1e3 * NOW.timestamp()


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    operator = Operator()
    operator.looks(30)
    first = [record.message for record in caplog.records]
    assert len(first) == len({message.split(":")[1] for message in first})
    assert all(message.startswith("pool serving/demo: ") for message in first)


TIME = "2026-05-04T10:00:00Z"


def last_decision(mode: Any, prefill: int, decode: int) -> AutoscalingStatus:
    return AutoscalingStatus(
        mode=mode,
        desired_prefill=prefill,
        desired_decode=decode,
        reason="Steady",
        message="",
        since=TIME,
        time=TIME,
    )


WORKLOADS = (
    workload("a", "prefill", 2, "x"),
    workload("b", "prefill", 1, "y"),
    workload("c", "decode", 5, "x"),
    workload("d", "router", 9),
)
CASES: list[tuple[dict[str, Any], AutoscalingStatus | None, tuple[Any, ...], tuple[int, int]]] = [
    (AUTO, None, (), (3, 3)),
    (AUTO, None, WORKLOADS, (3, 5)),
    (AUTO, last_decision("auto", 0, 0), WORKLOADS, (0, 0)),
    (AUTO, last_decision("advise", 4, 4), WORKLOADS, (3, 5)),
    (AUTO | {"mode": "advise"}, last_decision("auto", 4, 4), WORKLOADS, (3, 3)),
    (AUTO | {"prefill": {"mode": "external"}}, last_decision("auto", 1, 2), WORKLOADS, (3, 2)),
]


@pytest.mark.parametrize(("scaling", "status", "workloads", "counts"), CASES)
def test_the_current_replicas_are_those_of_the_last_decision_or_of_the_workloads(
    scaling: dict[str, Any],
    status: AutoscalingStatus | None,
    workloads: tuple[Any, ...],
    counts: tuple[int, int],
) -> None:
    three = {"replicas": 3}
    pool = sample_pool("sim", autoscaling=scaling, prefill=three, decode=three)
    assert pool.spec.autoscaling is not None
    current = current_replicas(pool, pool.spec.autoscaling, status, workloads)
    assert (current["prefill"], current["decode"]) == counts


def test_new_counts_do_not_change_the_revision() -> None:
    operator = Operator()
    before = revision_of(operator.pool).name
    operator.looks(16, HEAVY)
    pool, _ = operator.look(None)
    assert revision_of(pool).name == before
