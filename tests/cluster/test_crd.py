"""The CustomResourceDefinition in a real API server: validation, defaults and printed columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
import pytest
import yaml

from baton_operator.api.crd import COLUMNS, DEFINITIONS, WIDE
from baton_operator.api.resources import quantity_bytes
from baton_operator.api.spec_reader import read_spec
from baton_operator.api.status import Condition, ModelStatus, OperatorStatus, PoolStatus, RoleStatus
from baton_operator.api.times import stamp
from baton_operator.kube.kinds import POOL
from baton_operator.names import API_VERSION, POOL_KIND
from baton_protocol.model_source import parse_source
from tests.cluster.crd_cases import BAD, SIM, Bad, engine, managed, model
from tests.cluster.crd_good import GOOD, Good
from tests.cluster.crd_scaling_cases import BAD_SCALING, autoscaled_spec
from tests.cluster.installed import definition
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.operators import ApiClient, Body, Pool

DATA = Path(__file__).with_name("data")
FULL_NAME = "inferencepools.baton.dev"


@pytest.fixture(scope="module")
def cluster(plane: Kubernetes, api_client: ApiClient) -> Kubernetes:
    api_client.get(POOL.path("default"))  # returns once the definition's storage is ready
    return plane


def resource(spec: Any, name: str = "demo") -> str:
    return json.dumps(body_of(spec, name))


def body_of(spec: Any, name: str) -> Body:
    body: Body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": name}}
    return body if spec is None else body | {"spec": spec}


def create(cluster: Kubernetes, text: str, *args: str) -> dict[str, Any]:
    """Create the resource and return it with its defaults. Raise CommandFailed if it is refused."""
    created: dict[str, Any] = json.loads(
        cluster.kubectl("create", "-f", "-", "-o", "json", *args, stdin=text)
    )
    return created


def dry_run(api_client: ApiClient, case: Bad | Good) -> Body:
    """Create the case's pool as a dry run and return it with its defaults. Raise HTTPError if it is
    refused. It uses HTTP, because a kubectl for each of the many cases is slow."""
    path = f"{POOL.path('default')}?dryRun=All&fieldValidation=Strict"
    return api_client.send("POST", path, body_of(case.spec, case.name))


def accepted(cluster: Kubernetes, specs: list[Any]) -> list[bool]:
    """Whether each spec is accepted, by one command for all."""
    texts = [resource(spec, name=f"p-{number}") for number, spec in enumerate(specs)]
    args = ("create", "-f", "-", "--dry-run=server", "-o", "name")
    with pytest.raises(CommandFailed) as caught:
        cluster.kubectl(*args, stdin="\n---\n".join(texts))
    admitted = {int(each) for each in re.findall(r"/p-(\d+)", caught.value.output)}
    refused = {int(each) for each in re.findall(r'"p-(\d+)" is invalid', caught.value.error)}
    assert admitted ^ refused == set(range(len(specs))), caught.value
    return [number in admitted for number in range(len(specs))]


def contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and contains(whole[key], part[key]) for key in part)
    return bool(whole == part)


@pytest.mark.parametrize("case", [*BAD, *BAD_SCALING], ids=lambda case: case.title)
def test_a_bad_pool_is_refused_with_field_and_remedy(
    cluster: Kubernetes, api_client: ApiClient, case: Bad
) -> None:
    with pytest.raises(HTTPError) as caught:
        dry_run(api_client, case)
    text = caught.value.read().decode()
    status = json.loads(text)
    causes = status.get("details", {}).get("causes", ())
    messages = [f"{cause.get('field', '')}: {cause['message']}" for cause in causes]
    lines = messages or [status["message"]]
    assert [line for line in lines if case.field in line and case.remedy in line], lines
    assert "geheim" not in text


NEGATIVE = (
    ("spec.decode.replicas", SIM | {"decode": {"replicas": -1}}),
    ("spec.prefill.replicas", SIM | {"prefill": {"replicas": -1}}),
    (
        "spec.decode.replicas",
        SIM | {"decode": {"replicas": -1}, "missingRolePolicy": "queue"},
    ),
    ("spec.autoscaling.decode.min", autoscaled_spec(decode={"min": -1, "max": 4})),
    ("spec.autoscaling.prefill.max", autoscaled_spec(prefill={"max": -1})),
)


@pytest.mark.parametrize(("field", "spec"), NEGATIVE)
def test_a_negative_number_is_refused_by_one_line(
    cluster: Kubernetes, api_client: ApiClient, field: str, spec: Any
) -> None:
    with pytest.raises(HTTPError) as caught:
        dry_run(api_client, Bad("negative", spec, field, ""))
    causes = json.loads(caught.value.read())["details"]["causes"]
    assert [cause["field"] for cause in causes] == [field], causes


def test_kubectl_shows_each_refusal_on_its_own_line(cluster: Kubernetes) -> None:
    case = BAD[0]
    with pytest.raises(CommandFailed) as caught:
        create(cluster, resource(case.spec, case.name), "--dry-run=server")
    lines = caught.value.error.splitlines()
    assert [line for line in lines if case.field in line and case.remedy in line], lines


@pytest.mark.parametrize("case", GOOD, ids=[case.title for case in GOOD])
def test_a_good_pool_is_accepted_and_gets_our_defaults(
    cluster: Kubernetes, api_client: ApiClient, case: Good
) -> None:
    stored = dry_run(api_client, case)["spec"]
    assert contains(stored, case.filled or {}), stored
    written = {key: value for key, value in case.spec.items() if value is not None}
    assert read_spec(stored) == read_spec(written)


SOURCES = (
    *("hf://a/b", "hf://a", "hf://a/b@", "hf://a/b@main", "hf://a/b@refs/pr/1", "hf://a/b@x--y"),
    *(
        "hf://a/b@/x",
        "hf://a/b@x/",
        "hf://a/",
        "hf:///b",
        "hf://a/b/c",
        "hf://a/b--c",
        "hf://a/b..c",
    ),
    *("hf://a/.b", "hf://a/_b", "hf://-a/b", "hf://a/b-", "hf://a b/c", "hf://ä/b", "hf://a/b?c"),
    *(f"hf://org/{'m' * 92}", f"hf://org/{'m' * 93}", f"hf://{'m' * 9}@{'r' * 100}", "hf:/a/b"),
    *("pvc://a", "pvc://a/", "pvc://a//", "pvc://a/b", "pvc://a/b/", "pvc://a//b", "pvc://a/b//c"),
    *("pvc://a/./b", "pvc://a/..", "pvc://a/...", "pvc://a/.b", "pvc://a/b c", "pvc://a/ b"),
    *(
        "pvc://a/b\tc",
        "pvc://a/b\nc",
        "pvc://a/ä",
        "pvc://a/b\u00a0c",
        "pvc://a.b-c/d",
        "pvc://-a/b",
    ),
    *(
        "pvc://A/b",
        f"pvc://{'a' * 253}/b",
        f"pvc://{'a' * 254}/b",
        "pvc://",
        "HF://a/b",
        "file://a",
    ),
)


def reads(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def test_the_api_server_accepts_exactly_the_model_sources_that_we_can_parse(
    cluster: Kubernetes,
) -> None:
    taken = dict(
        zip(SOURCES, accepted(cluster, [model(uri=text) for text in SOURCES]), strict=True)
    )
    assert taken == {text: reads(parse_source, text) for text in SOURCES}


QUANTITIES = (
    *("1Gi", "1.5Gi", "1.Gi", ".5Ti", "+1G", "1e9", "1E9", "1E", "1Pi", "99999999999999999m"),
    *("1e8M", "1KiB", "1 Gi", "Gi", "1gi", "1,5Gi", "0x10", "1_000M", "", "."),
)


def test_the_api_server_accepts_exactly_the_quantities_that_we_can_parse(
    cluster: Kubernetes,
) -> None:
    specs = [managed(memory=text) for text in QUANTITIES]
    taken = dict(zip(QUANTITIES, accepted(cluster, specs), strict=True))
    assert taken == {text: reads(quantity_bytes, text) for text in QUANTITIES}


def test_every_field_of_a_pool_can_be_edited(
    cluster: Kubernetes, api_client: ApiClient, namespace: str
) -> None:
    """No field is immutable, because the operator can apply every change."""
    pool = Pool(cluster, api_client, namespace, "demo")
    for spec in (SIM, *(case.spec for case in GOOD if case.name == pool.name)):
        pool.apply(spec)


def test_kubectl_get_prints_the_columns_of_a_pool(cluster: Kubernetes, namespace: str) -> None:
    create(cluster, resource(SIM), "-n", namespace)
    ready = Condition(
        type="Ready",
        status="False",
        reason="NodesMissing",
        message="0 of 1",
        last_transition_time="2026-01-01T00:00:00Z",
        observed_generation=1,
    )
    updated = msgspec.structs.replace(ready, type="Updated", reason="RollingOut")
    status = PoolStatus(
        observed_generation=1,
        conditions=(ready, updated),
        prefill=RoleStatus(summary="0/1", desired=1),
        decode=RoleStatus(summary="1/1", desired=1, ready=1),
        router=RoleStatus(summary="2/3", desired=3, ready=2),
        model=ModelStatus(name="sim"),
        url="https://llm.example.com",
        exact="bitwise",
        operator=OperatorStatus(name="baton-system/baton-operator", time=stamp(datetime.now(UTC))),
    )
    patch = json.dumps({"status": msgspec.to_builtins(status)})
    cluster.kubectl(
        "patch", "bpool/demo", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch
    )
    head, row = cluster.kubectl("get", "bpool", "-n", namespace).splitlines()
    narrow = [name.upper() for name in COLUMNS if name not in WIDE]
    assert head.split() == ["NAME", *narrow, "AGE"]
    wanted = [
        "demo",
        "False",
        "NodesMissing",
        "False",
        "0/1",
        "1/1",
        "sim",
        "https://llm.example.com",
    ]
    assert row.split()[:-1] == wanted
    wide = cluster.kubectl("get", "bpool", "-n", namespace, "-o", "wide").splitlines()
    assert wide[0].split() == ["NAME", *(name.upper() for name in COLUMNS), "AGE"]
    assert wide[1].split()[:-2] == [*wanted[:6], "2/3", "sim", "bitwise", wanted[-1]]
    stored = json.loads(cluster.kubectl("get", "bpool/demo", "-n", namespace, "-o", "json"))
    assert msgspec.convert(stored["status"], PoolStatus) == status


@pytest.mark.parametrize(("written", "stored"), [("on", True), ("off", False), ("true", True)])
def test_batch_invariance_is_written_as_a_switch(
    cluster: Kubernetes, namespace: str, written: str, stored: bool
) -> None:
    text = yaml.safe_dump(body_of(engine(batchInvariant=stored), "demo"))
    text = text.replace(f"batchInvariant: {str(stored).lower()}", f"batchInvariant: {written}")
    created = create(cluster, text, "-n", namespace, "--dry-run=server")
    assert created["spec"]["engine"]["batchInvariant"] is stored


def test_a_status_in_a_created_pool_is_dropped(cluster: Kubernetes, namespace: str) -> None:
    written = json.loads(resource(SIM)) | {"status": {"url": "https://elsewhere.example"}}
    assert "status" not in create(cluster, json.dumps(written), "-n", namespace)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("bpool.spec", "missingRolePolicy"),
        ("bpool.spec.kvStore.managed.memory", "at least 64Mi"),
        ("bpool.status", "observedGeneration"),
        ("bpool.spec.autoscaling.mode", "advise: the roles' `replicas`"),
        (f"{FULL_NAME}.spec.model.uri", "pvc://CLAIM/FOLDER"),
    ],
)
def test_kubectl_explains_every_field(cluster: Kubernetes, path: str, text: str) -> None:
    explained = cluster.kubectl("explain", path)
    assert text in explained
    assert "<no description>" not in explained


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_the_api_server_accepts_each_definition_without_a_warning(
    cluster: Kubernetes, plural: str
) -> None:
    manifest = yaml.safe_dump(DEFINITIONS[plural]())
    args = ("--server-side", "--force-conflicts", "--dry-run=server", "--warnings-as-errors")
    cluster.kubectl("apply", *args, "-f", "-", stdin=manifest)


def test_our_pools_and_the_gateway_api_s_inference_pools_coexist(
    cluster: Kubernetes, namespace: str
) -> None:
    theirs = yaml.safe_load((DATA / "gateway-inferencepool.yaml").read_text())
    with definition(cluster, theirs):
        create(cluster, resource(SIM, name="ours"), "-n", namespace)
        spec = {
            "selector": {"matchLabels": {"app": "llm"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        }
        body = {"apiVersion": "inference.networking.k8s.io/v1", "kind": POOL_KIND, "spec": spec}
        create(cluster, json.dumps(body | {"metadata": {"name": "theirs"}}), "-n", namespace)

        def listed(what: str) -> str:
            return cluster.kubectl("get", what, "-n", namespace, "-o", "name").strip()

        their_name = theirs["metadata"]["name"]
        assert listed(FULL_NAME) == listed("bpool") == "inferencepool.baton.dev/ours"
        assert listed(their_name) == listed("infpool")
        assert listed(their_name) == "inferencepool.inference.networking.k8s.io/theirs"
    assert listed("inferencepools") == "inferencepool.baton.dev/ours"
