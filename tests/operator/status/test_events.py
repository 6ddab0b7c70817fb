"""Events for users: each change gives one event."""

from __future__ import annotations

from typing import Any

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus
from baton_operator.state.observed import Observed, ObservedRoute
from baton_operator.status.events import PoolEvent, events_between
from baton_protocol.store import Role
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, HUB, observed, status_of


class History:
    """The statuses of one pool, step by step."""

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


def test_the_life_of_a_pool_gives_few_events() -> None:
    history, edited = History(DEMO), sample_pool("sim", engine={"kind": "sim", "blockSize": 32})
    old = observed().pods
    assert history.step(Observed()) == (("Normal", "Created"),)
    assert history.step(observed(prefill=())) == ()
    assert history.step(observed()) == (("Normal", "Ready"),)
    assert history.step(observed()) == ()
    assert history.step(crashing()) == (("Warning", "NotReady"),)
    assert history.step(crashing("prefill")) == ()
    assert history.step(observed()) == (("Normal", "Ready"),)
    assert history.step(observed(), edited) == (("Normal", "Updating"),)
    rolling = observed(edited, others=old)
    assert history.step(rolling, edited) == ()
    assert history.step(observed(edited), edited) == (("Normal", "RolledOut"),)


def test_the_message_of_an_event_has_the_details() -> None:
    history = History(DEMO)
    [created] = history.events(Observed())
    assert created.message.endswith(": 1 prefill, 1 decode nodes")
    [ready] = history.events(observed())
    assert ready.message == "http://demo-router.serving.svc:8000/v1"
    [crash] = history.events(crashing())
    assert crash.message.startswith("Crashing: DecodeReady: 0 of 1 ready; demo-decode-")


def test_a_pool_that_was_never_ready_reports_each_problem_once() -> None:
    history = History(DEMO)
    warned = (("Warning", "NotReady"),)
    assert history.step(Observed()) == (("Normal", "Created"),)
    [missing] = history.events(unready("ConfigMissing", 'FailedMount: secret "keys" not found'))
    assert (missing.type, missing.reason) == warned[0]
    assert missing.message.startswith("ConfigMissing: DecodeReady: 0 of 1 ready; demo-decode-")
    assert missing.message.endswith('FailedMount: secret "keys" not found')
    assert history.step(unready("ConfigMissing", 'FailedMount: secret "keys" not found')) == ()
    assert history.step(unready("Crashing", "boom")) == warned
    assert history.step(unready("")) == ()
    assert history.step(observed()) == (("Normal", "Ready"),)


def test_a_problem_in_the_first_status_is_an_event() -> None:
    expected = (("Normal", "Created"), ("Warning", "NotReady"))
    assert History(DEMO).step(unready("Unschedulable", "no GPU")) == expected


def test_an_invalid_spec_and_a_refusal_are_warnings_once() -> None:
    history = History(DEMO)
    assert history.step(Observed(), SpecError("spec.x: wrong")) == (("Warning", "SpecInvalid"),)
    assert history.step(Observed(), SpecError("spec.x: wrong")) == ()
    refused = observed(refusals=(o.refusal("Service", "s", 403, "no"),))
    assert history.step(refused) == (("Warning", "ApplyForbidden"), ("Normal", "Created"))
    assert history.step(refused) == ()


def test_a_fetched_model_is_reported_once() -> None:
    history = History(HUB)
    fetching = observed(HUB, decode=o.role_pods(HUB, "decode", ready=False, fetch="running"))
    assert history.step(fetching) == (("Normal", "Created"),)
    routes: Any = {"routes": (ObservedRoute(kind="Ingress", accepted=True),)}
    expected = (("Normal", "ModelFetched"), ("Normal", "Ready"))
    assert history.step(observed(HUB, **routes)) == expected
    assert history.step(observed(HUB, **routes)) == ()


def test_a_state_that_passes_by_itself_is_no_warning() -> None:
    history, more = History(DEMO), sample_pool("sim", decode={"replicas": 2})
    history.step(observed())
    assert history.step(observed(), more) == (("Normal", "NotReady"),)
    assert history.step(observed(more), more) == (("Normal", "Ready"),)
    paused = sample_pool("sim", paused=True)
    assert history.step(observed(), paused) == (("Normal", "NotReady"),)
