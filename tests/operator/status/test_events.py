"""Events for users, each of them once."""

from __future__ import annotations

from typing import Any

from baton_operator.api.pool import Pool, SpecError
from baton_operator.api.status import PoolStatus
from baton_operator.state.observed import Observed, ObservedRoute
from baton_operator.status.events import PoolEvent, events_between
from baton_protocol.store import Role
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, HUB, observed, status_of


class Life:
    """A pool's, step by step."""

    def __init__(self, pool: Pool) -> None:
        self.status: PoolStatus | None = None
        self.pool = pool

    def step(
        self, seen: Observed, pool: Pool | SpecError | None = None
    ) -> tuple[tuple[str, str], ...]:
        return tuple((event.type, event.reason) for event in self.events(seen, pool))

    def events(self, seen: Observed, pool: Pool | SpecError | None = None) -> tuple[PoolEvent, ...]:
        before, self.status = self.status, status_of(seen, pool or self.pool, self.status)
        assert events_between(self.status, self.status) == ()
        return events_between(before, self.status)


def crashing(role: Role = "decode") -> Observed:
    return unready("Crashing", "boom", role)


def unready(problem: str, message: str = "", role: Role = "decode") -> Observed:
    pods = o.role_pods(DEMO, role, ready=False, problem=problem, message=message)
    changes: dict[str, Any] = {role: pods}
    return observed(**changes)


def test_a_pools_life_gives_few_events() -> None:
    life, edited = Life(DEMO), sample_pool("sim", engine={"kind": "sim", "blockSize": 32})
    old = observed().pods
    assert life.step(Observed()) == (("Normal", "Created"),)
    assert life.step(observed(prefill=())) == ()
    assert life.step(observed()) == (("Normal", "Ready"),)
    assert life.step(observed()) == ()
    assert life.step(crashing()) == (("Warning", "NotReady"),)
    assert life.step(crashing("prefill")) == ()
    assert life.step(observed()) == (("Normal", "Ready"),)
    assert life.step(observed(), edited) == (("Normal", "Updating"),)
    rolling = observed(edited, others=old)
    assert life.step(rolling, edited) == ()
    assert life.step(observed(edited), edited) == (("Normal", "RolledOut"),)


def test_events_name_what_they_are_about() -> None:
    life = Life(DEMO)
    [created] = life.events(Observed())
    assert created.message.endswith(": 1 prefill, 1 decode nodes")
    [ready] = life.events(observed())
    assert ready.message == "http://demo-router.serving.svc:8000/v1"
    [crash] = life.events(crashing())
    assert crash.message.startswith("Crashing: DecodeReady: 0 of 1 ready; demo-decode-")


def test_a_pool_that_was_never_ready_tells_each_problem_once() -> None:
    life = Life(DEMO)
    warned = (("Warning", "NotReady"),)
    assert life.step(Observed()) == (("Normal", "Created"),)
    [missing] = life.events(unready("ConfigMissing", 'FailedMount: secret "keys" not found'))
    assert (missing.type, missing.reason) == warned[0]
    assert missing.message.startswith("ConfigMissing: DecodeReady: 0 of 1 ready; demo-decode-")
    assert missing.message.endswith('FailedMount: secret "keys" not found')
    assert life.step(unready("ConfigMissing", 'FailedMount: secret "keys" not found')) == ()
    assert life.step(unready("Crashing", "boom")) == warned
    assert life.step(unready("")) == ()
    assert life.step(observed()) == (("Normal", "Ready"),)


def test_a_pool_with_a_problem_from_its_first_look_tells_it() -> None:
    told = (("Normal", "Created"), ("Warning", "NotReady"))
    assert Life(DEMO).step(unready("Unschedulable", "no GPU")) == told


def test_an_invalid_spec_and_a_refusal_are_warnings_once() -> None:
    life = Life(DEMO)
    assert life.step(Observed(), SpecError("spec.x: wrong")) == (("Warning", "SpecInvalid"),)
    assert life.step(Observed(), SpecError("spec.x: wrong")) == ()
    refused = observed(refusals=(o.refusal("Service", "s", 403, "no"),))
    assert life.step(refused) == (("Warning", "ApplyForbidden"), ("Normal", "Created"))
    assert life.step(refused) == ()


def test_a_fetched_model_is_told_once() -> None:
    life = Life(HUB)
    fetching = observed(HUB, decode=o.role_pods(HUB, "decode", ready=False, fetch="running"))
    assert life.step(fetching) == (("Normal", "Created"),)
    routes: Any = {"routes": (ObservedRoute(kind="Ingress", accepted=True),)}
    told = (("Normal", "ModelFetched"), ("Normal", "Ready"))
    assert life.step(observed(HUB, **routes)) == told
    assert life.step(observed(HUB, **routes)) == ()


def test_what_passes_by_itself_is_no_warning() -> None:
    life, more = Life(DEMO), sample_pool("sim", decode={"replicas": 2})
    life.step(observed())
    assert life.step(observed(), more) == (("Normal", "NotReady"),)
    assert life.step(observed(more), more) == (("Normal", "Ready"),)
    paused = sample_pool("sim", paused=True)
    assert life.step(observed(), paused) == (("Normal", "NotReady"),)
