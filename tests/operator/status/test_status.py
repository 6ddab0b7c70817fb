"""The whole status: its summary, the values that it keeps, and when it changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus, read_status
from baton_operator.builders.nodes import revision_of
from baton_operator.state.observed import Observed, ObservedRoute
from baton_protocol.ids import Fingerprint
from baton_protocol.store import NodeReport
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import (
    DEMO,
    condition_of,
    observed,
    replaced,
    status_of,
    verdict,
)

CRASH: dict[str, Any] = {"ready": False, "problem": "Crashing", "message": "container node ended"}
UNREADY: dict[str, Any] = {"ready": False}


def test_a_pool_that_is_as_specified_is_ready_and_serves() -> None:
    status = status_of(observed())
    assert {item.type: item.status for item in status.conditions} == {
        "Ready": "True",
        "Valid": "True",
        "Applied": "True",
        "StoreReady": "True",
        "ModelReady": "True",
        "PrefillReady": "True",
        "DecodeReady": "True",
        "RouterReady": "True",
        "Updated": "True",
        "RolloutBlocked": "False",
        "Scaled": "True",
        "Serving": "True",
        "SpecEffective": "True",
        "SoleOperator": "True",
    }
    assert verdict(status, "Ready") == ("True", "AllReady")


def test_the_same_observation_gives_the_same_status_later() -> None:
    seen = observed(nodes=o.reports())
    status = status_of(seen)
    assert status_of(seen, before=status, after_s=3600) == status
    assert status_of(observed(), before=status, after_s=3600) == status


def test_a_status_is_unchanged_after_a_round_trip_through_the_api() -> None:
    status = status_of(observed(nodes=o.reports()))
    assert read_status({"status": msgspec.to_builtins(status)}) == status


@pytest.mark.parametrize("body", [{}, {"status": None}, {"status": {"conditions": "rubbish"}}])
def test_a_missing_or_damaged_status_is_read_as_none(body: Any) -> None:
    assert read_status(body) is None


def test_a_transition_time_changes_only_with_the_status() -> None:
    first = status_of(observed(decode=o.role_pods(DEMO, "decode", **UNREADY)))
    crash = status_of(observed(decode=o.role_pods(DEMO, "decode", **CRASH)), DEMO, first, after_s=5)
    well = status_of(observed(), DEMO, crash, after_s=9, generation=2)
    times = [
        condition_of(status, "DecodeReady").last_transition_time for status in (first, crash, well)
    ]
    assert times == ["2026-05-04T12:00:00Z", "2026-05-04T12:00:00Z", "2026-05-04T12:00:09Z"]
    assert condition_of(crash, "DecodeReady").reason == "Crashing"
    assert condition_of(well, "Valid").last_transition_time == "2026-05-04T12:00:00Z"
    assert condition_of(well, "Valid").observed_generation == well.observed_generation == 2


def test_ready_shows_a_problem_before_parts_that_only_start() -> None:
    status = status_of(
        observed(
            prefill=o.role_pods(DEMO, "prefill", **UNREADY),
            decode=o.role_pods(DEMO, "decode", **CRASH),
            others=(),
        )
    )
    assert verdict(status, "StoreReady") == ("False", "Starting")
    assert verdict(status, "PrefillReady") == ("False", "Starting")
    assert verdict(status, "Ready") == ("False", "Crashing")
    assert condition_of(status, "Ready").message.startswith(
        "DecodeReady: 0 of 1 ready; demo-decode-"
    )


def test_ready_shows_the_first_part_that_starts_if_there_is_no_problem() -> None:
    status = status_of(Observed())
    assert verdict(status, "Ready") == ("False", "Starting")
    assert condition_of(status, "Ready").message.startswith("StoreReady: ")


def test_the_nodes_of_each_role_are_counted() -> None:
    pool, old = sample_pool("torch"), [o.pod("decode", n, o.OLD) for n in range(2)]
    current = o.role_pods(pool, "decode")
    ending = msgspec.structs.replace(old[1], terminating=True)
    weak = msgspec.structs.replace(current[0], ready=False)
    seen = observed(pool, decode=(weak, *current[1:], old[0], ending))
    status = status_of(seen, pool)
    decode = status.decode
    assert (decode.summary, decode.desired, decode.ready) == ("4/4", 4, 4)
    assert (decode.updated, decode.draining) == (3, 1)
    assert status.prefill.summary == "2/2"
    assert (status.router.summary, status.router.updated) == ("1/1", 1)


ROUTES: list[tuple[str, dict[str, Any], str, str]] = [
    ("none", {}, "", "http://demo-router.serving.svc:8000/v1"),
    ("another port", {"service": {"port": 80}}, "", "http://demo-router.serving.svc:80/v1"),
    ("an ingress", {"ingress": {"host": "llm.example.com"}}, "", "http://llm.example.com/v1"),
    (
        "an ingress with TLS",
        {"ingress": {"host": "llm.example.com", "tlsSecretName": "tls"}},
        "",
        "https://llm.example.com/v1",
    ),
    (
        "a route",
        {"httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": ["*.a.example", "b.example"]}},
        "",
        "http://b.example/v1",
    ),
    (
        "a load balancer",
        {"service": {"type": "LoadBalancer", "port": 80}},
        "192.0.2.7",
        "http://192.0.2.7:80/v1",
    ),
    (
        "a load balancer of IPv6",
        {"service": {"type": "LoadBalancer"}},
        "2001:db8::7",
        "http://[2001:db8::7]:8000/v1",
    ),
]


@pytest.mark.parametrize(
    ("router", "address", "url"), [row[1:] for row in ROUTES], ids=[row[0] for row in ROUTES]
)
def test_the_url_is_the_external_address_or_else_the_endpoint(
    router: dict[str, Any], address: str, url: str
) -> None:
    pool = sample_pool("sim", router=router)
    status = status_of(observed(pool, address=address), pool)
    port = router.get("service", {}).get("port", 8000)
    assert status.endpoint == f"http://demo-router.serving.svc:{port}/v1"
    assert status.url == url


def test_a_fingerprint_is_unknown_until_a_node_of_the_revision_reports_it() -> None:
    old_nodes = o.reports(revision=o.OLD, fingerprint=Fingerprint("0" * 32))
    unknown = status_of(observed(nodes=old_nodes))
    assert (unknown.fingerprint, unknown.revision) == ("", revision_of(DEMO).name)
    known = status_of(observed(nodes=o.reports()), before=unknown)
    assert known.fingerprint == "f" * 32
    for nodes in (None, (), old_nodes):
        assert status_of(observed(nodes=nodes), before=known).fingerprint == "f" * 32


def test_a_new_revision_starts_without_a_fingerprint() -> None:
    known = status_of(observed(nodes=o.reports()))
    edited = sample_pool("sim", engine={"kind": "sim", "blockSize": 32})
    status = status_of(observed(), edited, known)
    assert (status.fingerprint, status.revision) == ("", revision_of(edited).name)


def test_a_pool_is_bitwise_exact_while_every_ready_node_of_any_revision_is() -> None:
    def after(nodes: tuple[NodeReport, ...] | None, before: PoolStatus | None = None) -> PoolStatus:
        return status_of(observed(nodes=nodes), before=before)

    bitwise, numeric = o.reports(exact="bitwise"), o.reports(exact="numeric")
    old = o.reports(revision=o.OLD, fingerprint=Fingerprint("0" * 32), exact="numeric")
    gone = o.reports(revision=o.OLD, state="draining", exact="numeric")
    assert [after(nodes).exact for nodes in (None, (), gone)] == [None, None, None]
    status = after(bitwise)
    assert status.written()["exact"] == "bitwise"
    assert after(None, before=status).exact == "bitwise"
    assert after((bitwise[0], numeric[1]), before=status).exact == "numeric"
    assert after((*bitwise, *old), before=status).exact == "numeric"
    assert after((*bitwise, *gone), before=after((*bitwise, *old))).exact == "bitwise"
    assert "exact" not in after((), before=status).written()


def test_the_model_s_name_comes_from_the_spec_or_else_from_the_nodes() -> None:
    reported = observed(nodes=o.reports(model="tiny"))
    first = status_of(reported)
    assert first.model.name == "sim"
    error = SpecError("spec.model: wrong")
    assert status_of(reported, error, first).model.name == "tiny"
    assert status_of(observed(), error, first).model.name == "sim"


def test_a_pool_without_its_secret_has_no_revision() -> None:
    refused = Observed(refusals=(o.refusal("Secret", "demo-auth", 403, "RBAC"),))
    status = status_of(refused)
    assert status.revision == ""
    assert verdict(status, "Applied") == ("False", "ApplyForbidden")


def test_an_external_index_that_became_silent_is_reported_as_such() -> None:
    pool = sample_pool("external")
    answers = status_of(observed(pool, nodes=()), pool)
    assert status_of(observed(pool), pool, answers) == answers
    silent = status_of(observed(pool, silent=True), pool, answers)
    assert verdict(silent, "StoreReady") == ("Unknown", "ExternalSilent")
    # A new operator keeps the condition until it has read the index itself.
    assert verdict(status_of(observed(pool), pool, silent), "StoreReady")[1] == "ExternalSilent"
    again = status_of(observed(pool, nodes=()), pool, silent)
    assert verdict(again, "StoreReady") == ("True", "ExternalAnswers")


def test_an_invalid_spec_is_reported_and_the_existing_parts_keep_their_conditions() -> None:
    good = status_of(observed(nodes=o.reports()))
    status = status_of(observed(), SpecError("spec.model: wrong"), good, generation=2)
    assert verdict(status, "Valid") == ("False", "SpecInvalid")
    assert condition_of(status, "Valid").message == "spec.model: wrong"
    assert verdict(status, "Applied") == ("Unknown", "NothingApplied")
    assert verdict(status, "Ready") == ("False", "SpecInvalid")
    for kind in ("StoreReady", "ModelReady", "PrefillReady", "DecodeReady", "Serving", "Updated"):
        assert condition_of(status, kind).status == "True", kind
    kept = ("prefill", "decode", "router", "model", "endpoint", "url", "revision", "fingerprint")
    assert [getattr(status, name) for name in kept] == [getattr(good, name) for name in kept]


def test_every_condition_has_a_message() -> None:
    for seen in (observed(), observed(prefill=(), decode=()), Observed()):
        assert all(item.message for item in status_of(seen).conditions)


def test_a_pool_that_never_had_a_valid_spec_has_no_conditions_of_its_parts() -> None:
    status = status_of(Observed(), SpecError("spec.model: missing"))
    assert [item.type for item in status.conditions] == [
        "Ready",
        "Valid",
        "Applied",
        "SoleOperator",
    ]
    assert (status.revision, status.url) == ("", "")


def test_a_paused_pool_is_still_observed_and_its_readiness_is_unknown() -> None:
    good = status_of(observed())
    paused = sample_pool("sim", paused=True, engine={"kind": "sim", "blockSize": 32})
    status = status_of(observed(), paused, good)
    assert verdict(status, "Applied") == ("Unknown", "Paused")
    assert verdict(status, "Ready") == ("Unknown", "Paused")
    assert verdict(status, "Serving") == ("True", "Answering")
    assert status.revision == good.revision
    crash = observed(decode=o.role_pods(DEMO, "decode", **CRASH))
    assert verdict(status_of(crash, paused, good), "Ready") == ("False", "Crashing")


def test_a_pool_that_was_paused_from_the_start_has_no_revision() -> None:
    status = status_of(Observed(), sample_pool("sim", paused=True))
    assert status.revision == ""
    assert verdict(status, "Ready") == ("False", "Paused")


def test_the_condition_route_ready_exists_only_with_a_route() -> None:
    seen = observed(routes=(ObservedRoute(kind="Ingress", accepted=True),))
    assert status_of(seen).condition("RouteReady") is None
    routed = sample_pool("sim", router={"ingress": {"host": "llm.example.com"}})
    assert verdict(status_of(seen, routed), "RouteReady") == ("True", "RouteAccepted")


def test_a_long_message_of_the_api_server_is_cut() -> None:
    seen = observed(refusals=(o.refusal("Deployment", "d", 422, "no " * 9000),))
    assert len(condition_of(status_of(seen), "Applied").message) == 1000


def test_fields_of_a_newer_operator_are_ignored() -> None:
    body = msgspec.to_builtins(status_of(observed())) | {"shards": 3}
    assert read_status({"status": body}) == status_of(observed())
    assert replaced(PoolStatus(), url="x") != PoolStatus()
