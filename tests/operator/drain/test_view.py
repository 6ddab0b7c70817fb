"""How long the requests of an old node may continue, and the inputs that decide it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Pool
from baton_operator.api.spec import RolloutSpec
from baton_operator.builders.nodes import revision_of
from baton_operator.drain.marks import LeaveTerms
from baton_operator.drain.view import DeploymentNodes, DrainView, leave_for, view_of
from baton_operator.kube.kinds import ChildKey
from baton_operator.names import DRAIN_S
from baton_operator.state.cache import PoolKey
from baton_operator.state.child import CachedChild
from baton_protocol.ids import Fingerprint
from baton_protocol.store import NodeReport
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, NOW

NEW = revision_of(DEMO).name
SAME, OTHER = Fingerprint("5" * 32), Fingerprint("0" * 32)
OLD_POD, OLD_PEER = o.pod("decode", 0, o.OLD), o.pod("decode", 1, o.OLD)
KEY = PoolKey("serving", "demo")


def report(pod_number: int, fingerprint: Fingerprint) -> NodeReport:
    """Return the report of an old decode node."""
    name = o.pod("decode", pod_number, o.OLD).name
    found = o.report(DEMO, "decode", pod_number, fingerprint=fingerprint, revision=o.OLD)
    return msgspec.structs.replace(found, node=name)


def new_reports(fingerprint: Fingerprint) -> tuple[NodeReport, ...]:
    return o.reports(DEMO, fingerprint=fingerprint)


def look(*reports: NodeReport, pool: Pool = DEMO, answered: bool = True) -> DrainView:
    seen = o.observed(nodes=reports if answered else None)
    return view_of(KEY, pool, NEW, {}, seen, NOW, 0.0)


def nodes(*pods: Any, wanted: int = 0, replaced_by: str = NEW) -> DeploymentNodes:
    key = ChildKey("apps/v1", "Deployment", "serving", "demo-decode-old")
    child = CachedChild(
        key=key, uid="u", version=1, owner="o", component="decode", revision=o.OLD, digest=""
    )
    return DeploymentNodes(
        role="decode",
        child=child,
        current=len(pods),
        wanted=wanted,
        pods=pods,
        replaced_by=replaced_by,
    )


def leaves(*reports: NodeReport, pool: Pool = DEMO, answered: bool = True) -> LeaveTerms:
    """Return the terms on which the last old decode node leaves."""
    seen = look(*reports, pool=pool, answered=answered)
    return leave_for(seen, nodes(OLD_POD), OLD_POD, {OLD_POD.name})


def with_rollout(seconds: int) -> Pool:
    rollout = RolloutSpec(max_drain_seconds=seconds)
    return msgspec.structs.replace(DEMO, spec=msgspec.structs.replace(DEMO.spec, rollout=rollout))


def test_requests_that_a_new_node_can_take_over_have_the_deadline_of_a_scale_down() -> None:
    assert leaves(report(0, SAME), *new_reports(SAME)) == LeaveTerms(DRAIN_S, NEW)


@pytest.mark.parametrize(
    "reports",
    [(report(0, OTHER), *new_reports(SAME)), new_reports(SAME), (report(0, SAME),)],
    ids=["another fingerprint", "no report of the old node", "no report of a new node"],
)
def test_requests_that_no_node_can_take_over_have_the_longest_request_time(
    reports: tuple[NodeReport, ...],
) -> None:
    assert leaves(*reports) == LeaveTerms(600, NEW)
    assert leaves(*reports, pool=with_rollout(900)) == LeaveTerms(900, NEW)


def test_without_an_answer_of_the_index_the_fingerprints_count_as_different() -> None:
    assert leaves(answered=False) == LeaveTerms(600, NEW)


def test_an_old_node_that_stays_can_take_over_the_requests() -> None:
    seen = look(report(0, OTHER), report(1, OTHER), *new_reports(SAME))
    both = nodes(OLD_POD, OLD_PEER, wanted=1)
    assert leave_for(seen, both, OLD_POD, {OLD_POD.name}) == LeaveTerms(DRAIN_S, NEW)
    going = {OLD_POD.name, OLD_PEER.name}
    assert leave_for(seen, both, OLD_POD, going) == LeaveTerms(600, NEW)


def test_the_spec_limits_the_drains_of_a_roll_out() -> None:
    assert leaves(report(0, SAME), *new_reports(SAME), pool=with_rollout(5)) == LeaveTerms(5, NEW)


def test_a_surplus_old_node_has_no_replacement() -> None:
    seen = look(report(0, SAME), *new_reports(SAME))
    assert leave_for(seen, nodes(OLD_POD, replaced_by=""), OLD_POD, ()) == LeaveTerms()


def test_ready_new_nodes_without_a_report_are_listed() -> None:
    assert look(*new_reports(SAME)).unreported == ()
    [prefill] = o.role_pods(DEMO, "prefill")
    assert look(new_reports(SAME)[1]).unreported == (prefill.name,)


def test_marks_of_scale_downs_and_of_roll_outs_do_not_count_for_each_other() -> None:
    one = msgspec.structs.replace(OLD_POD, drain_since="2026-05-04T11:00:00Z")
    replaced = msgspec.structs.replace(one, replaced_by="0a1b")
    assert not nodes(one).is_marked(one)
    assert nodes(one).is_marked(replaced)
    assert nodes(one, replaced_by="").is_marked(one)
    assert not nodes(one, replaced_by="").is_marked(replaced)
    assert not nodes(one).is_marked(OLD_POD)
