"""How long an old node's requests may continue, and which inputs that needs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Pool, RolloutSpec
from baton_operator.builders.nodes import revision_of
from baton_operator.drain.drainer import DeploymentNodes, DrainView, leave_for, look_at
from baton_operator.drain.marks import LeaveTerms
from baton_operator.kube.kinds import ChildKey
from baton_operator.names import DRAIN_S
from baton_operator.state.cache import CachedChild, PoolKey
from baton_protocol.ids import Fingerprint
from baton_protocol.store import NodeReport
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, NOW

NEW = revision_of(DEMO).name
SAME, OTHER = Fingerprint("5" * 32), Fingerprint("0" * 32)
OLD_POD, OLD_PEER = o.pod("decode", 0, o.OLD), o.pod("decode", 1, o.OLD)
KEY = PoolKey("serving", "demo")


def report(pod_number: int, fingerprint: Fingerprint) -> NodeReport:
    """An old decode node's."""
    name = o.pod("decode", pod_number, o.OLD).name
    found = o.report(DEMO, "decode", pod_number, fingerprint=fingerprint, revision=o.OLD)
    return msgspec.structs.replace(found, node=name)


def fresh(fingerprint: Fingerprint) -> tuple[NodeReport, ...]:
    return o.reports(DEMO, fingerprint=fingerprint)


def look(*reports: NodeReport, pool: Pool = DEMO, asked: bool = True) -> DrainView:
    seen = o.observed(nodes=reports if asked else None)
    return look_at(KEY, pool, NEW, {}, seen, NOW, 0.0)


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


def leaves(*reports: NodeReport, pool: Pool = DEMO, asked: bool = True) -> LeaveTerms:
    """The last old decode node does."""
    seen = look(*reports, pool=pool, asked=asked)
    return leave_for(seen, nodes(OLD_POD), OLD_POD, {OLD_POD.name})


def with_rollout(seconds: int) -> Pool:
    rollout = RolloutSpec(max_drain_seconds=seconds)
    return msgspec.structs.replace(DEMO, spec=msgspec.structs.replace(DEMO.spec, rollout=rollout))


def test_where_a_new_node_can_take_them_over_it_is_as_in_a_scale_down() -> None:
    assert leaves(report(0, SAME), *fresh(SAME)) == LeaveTerms(DRAIN_S, NEW)


@pytest.mark.parametrize(
    "told",
    [(report(0, OTHER), *fresh(SAME)), fresh(SAME), (report(0, SAME),)],
    ids=["another fingerprint", "its own is not known", "no new one is known"],
)
def test_where_none_can_it_is_as_long_as_a_request_may_take(told: tuple[NodeReport, ...]) -> None:
    assert leaves(*told) == LeaveTerms(600, NEW)
    assert leaves(*told, pool=with_rollout(900)) == LeaveTerms(900, NEW)


def test_without_an_answer_it_is_not_taken_for_the_same() -> None:
    assert leaves(asked=False) == LeaveTerms(600, NEW)


def test_an_old_node_that_stays_can_take_them_over() -> None:
    seen = look(report(0, OTHER), report(1, OTHER), *fresh(SAME))
    both = nodes(OLD_POD, OLD_PEER, wanted=1)
    assert leave_for(seen, both, OLD_POD, {OLD_POD.name}) == LeaveTerms(DRAIN_S, NEW)
    going = {OLD_POD.name, OLD_PEER.name}
    assert leave_for(seen, both, OLD_POD, going) == LeaveTerms(600, NEW)


def test_no_drain_of_a_roll_out_is_longer_than_the_spec_says() -> None:
    assert leaves(report(0, SAME), *fresh(SAME), pool=with_rollout(5)) == LeaveTerms(5, NEW)


def test_one_that_is_too_many_is_replaced_by_none() -> None:
    seen = look(report(0, SAME), *fresh(SAME))
    assert leave_for(seen, nodes(OLD_POD, replaced_by=""), OLD_POD, ()) == LeaveTerms()


def test_ready_new_nodes_of_which_nothing_is_heard_are_named() -> None:
    assert look(*fresh(SAME)).unheard == ()
    [prefill] = o.role_pods(DEMO, "prefill")
    assert look(fresh(SAME)[1]).unheard == (prefill.name,)


def test_a_mark_for_a_scale_down_is_none_for_a_roll_out_and_the_other_way_round() -> None:
    one = msgspec.structs.replace(OLD_POD, drain_since="2026-05-04T11:00:00Z")
    replaced = msgspec.structs.replace(one, replaced_by="0a1b")
    assert not nodes(one).is_marked(one)
    assert nodes(one).is_marked(replaced)
    assert nodes(one, replaced_by="").is_marked(one)
    assert not nodes(one, replaced_by="").is_marked(replaced)
    assert not nodes(one).is_marked(OLD_POD)
