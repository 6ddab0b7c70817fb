"""Reading a pool's spec, and the errors for invalid ones.

tests/cluster/test_crd.py covers what the API server refuses before the operator sees it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import read_pool
from baton_operator.api.resources import gpus_of, gpus_of_pod, quantity_bytes
from baton_operator.api.router import RouterSpec
from baton_operator.api.spec_reader import SpecError, read_spec
from baton_operator.api.store import ManagedStore
from tests.support.kubernetes.manifests import CREDENTIALS, INSTALLATION, sample, sample_pool

SIM: dict[str, Any] = {"engine": {"kind": "sim"}}


def external(index: Any = "redis://index", *data: Any) -> dict[str, Any]:
    return SIM | {"kvStore": {"external": {"indexUrl": index, "dataUrls": list(data)}}}


def managed(**fields: Any) -> dict[str, Any]:
    return SIM | {"kvStore": {"managed": fields}}


def model(**fields: Any) -> dict[str, Any]:
    return {"model": fields}


def test_a_pool_of_simulated_nodes_needs_only_the_engine_kind() -> None:
    spec = read_spec(SIM)
    assert (spec.prefill.replicas, spec.decode.replicas, spec.handoff) == (1, 1, "auto")
    assert spec.missing_role_policy == "aggregate"
    assert spec == read_spec(msgspec.to_builtins(spec))


UNKNOWN: list[dict[str, Any]] = [
    SIM | {"later": {"field": 1}},
    SIM | {"decode": {"later": 2}},
    SIM | {"router": {"httpRoute": {"parentRefs": [{"name": "a", "later": "b"}]}}},
    managed(later=[1]),
]


@pytest.mark.parametrize("spec", UNKNOWN)
def test_a_field_of_a_newer_definition_is_ignored(spec: dict[str, Any]) -> None:
    assert read_spec(spec) == read_spec(_without_later(spec))


def _without_later(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_later(one) for key, one in value.items() if key != "later"}
    return [_without_later(one) for one in value] if isinstance(value, list) else value


REFUSED: list[tuple[str, Any, str]] = [
    ("no spec", None, "spec: None is invalid: expected `object`"),
    ("no model", {}, "spec.model: names no model; write path or uri, or engine.kind: sim"),
    (
        "two models",
        model(path="/m", uri="hf://a/b"),
        "spec.model.uri: must not be set together with path; write one",
    ),
    (
        "a bucket",
        model(uri="s3://b/m"),
        "spec.model.uri: model source 's3://b/m' is unknown: write",
    ),
    ("a wrong kind", {"engine": {"kind": "vllm"}}, "spec.engine.kind: 'vllm' is invalid"),
    ("the valid kinds", {"engine": {"kind": "vllm"}}, "; write torch or sim"),
    ("a wrong sharing", SIM | {"kvStore": {"sharing": "user"}}, "; write pool or tenant"),
    (
        "API keys without a key name",
        SIM | {"router": {"apiKeysSecret": {"name": "tenants"}}},
        "spec.router.apiKeysSecret.key: missing",
    ),
    (
        "a list for a number",
        SIM | {"prefill": {"resources": {"limits": {"cpu": [1]}}}},
        "spec.prefill.resources.limits[...]: {'cpu': [1]} is invalid: expected",
    ),
    ("text for a number", SIM | {"prefill": {"replicas": "two"}}, "spec.prefill.replicas: 'two'"),
    ("true for a number", SIM | {"prefill": {"replicas": True}}, "spec.prefill.replicas: True"),
    (
        "a negative number",
        SIM | {"decode": {"replicas": -1}},
        "spec.decode.replicas: -1 is invalid",
    ),
    (
        "a block size of 0",
        {"engine": {"kind": "sim", "blockSize": 0}},
        "spec.engine.blockSize: 0 is",
    ),
    ("a wrong hand-off", SIM | {"handoff": "maybe"}, "spec.handoff: 'maybe' is invalid"),
    ("a wrong policy", SIM | {"missingRolePolicy": "wait"}, "; write aggregate or queue or fail"),
    (
        "a wrong unit in a limit",
        SIM | {"prefill": {"resources": {"limits": {"memory": "1GiB"}}}},
        "spec.prefill.resources.limits.memory: '1GiB' is not a quantity; write",
    ),
    ("a wrong unit in a size", managed(memory="1GiB"), "spec.kvStore.managed.memory: '1GiB' is no"),
    (
        "no data instance",
        managed(dataInstances=0),
        "spec.kvStore.managed.dataInstances: 0 is invalid",
    ),
    ("no data URL", external("redis://i"), "spec.kvStore.external.dataUrls: [] is invalid"),
    ("no URL", external("index:6379", "redis://d"), "spec.kvStore.external.indexUrl: Redis URL"),
    (
        "one server for index and data",
        external("redis://i", "redis://i:6379/0"),
        "external.dataUrls: index and",
    ),
    ("two databases of one server", external("redis://i/1", "redis://i/2"), "write another server"),
    (
        "a number as URL",
        external("redis://i", "redis://d", 3),
        "external.dataUrls[1]: 3 is invalid",
    ),
    ("a socket", external("unix:///run/r", "redis://d"), "external.indexUrl: not the URL of a"),
    (
        "options in a URL",
        external("rediss://i?ssl_cert_reqs=none", "redis://d"),
        "write redis://HOST",
    ),
    (
        "two URLs in one item",
        external("redis://i", "redis://a,redis://b"),
        "external.dataUrls[0]: not the",
    ),
    (
        "no index URL",
        SIM | {"kvStore": {"external": {"dataUrls": ["redis://d"]}}},
        "spec.kvStore.external.indexUrl: missing",
    ),
]


@pytest.mark.parametrize(
    ("spec", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_the_error_for_an_invalid_spec_names_the_field_and_its_value(
    spec: Any, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        external("redis://:geheim@i", "redis://d"),
        external("redis://i", "redis://user:geheim@d"),
        SIM | {"kvStore": {"external": ["redis://:geheim@i"]}},
        SIM | {"kvStore": {"external": "redis://:geheim@i"}},
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(spec: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.kvStore\.external") as caught:
        read_spec(spec)
    assert "geheim" not in str(caught.value)


def test_an_external_store_refers_to_secrets_for_its_login_and_ca() -> None:
    written = external("redis://i", "rediss://d")
    written["kvStore"]["external"] |= {"secretRef": {"name": "l"}, "caSecretRef": {"name": "ca"}}
    store = read_spec(written).kv_store.external
    assert store is not None
    assert store.secret_ref is not None
    assert store.ca_secret_ref is not None
    assert (store.secret_ref.name, store.ca_secret_ref.name) == ("l", "ca")


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1Gi", 1 << 30),
        ("1.5Gi", 3 << 29),
        ("256M", 256 * 10**6),
        (1 << 27, 1 << 27),
        ("1Ei", 1 << 60),
        ("2E", 2 * 10**18),
        ("12e6", 12 * 10**6),
        ("1500m", 2),
    ],
)
def test_memory_accepts_kubernetes_quantities(written: int | str, size: int) -> None:
    assert quantity_bytes(written) == ManagedStore(memory=written).memory_bytes == size


@pytest.mark.parametrize("name", ["Demo", "1st", "a.b", "a" * 41, "-a", "a-"])
def test_a_pool_name_that_is_no_valid_service_name_is_refused(name: str) -> None:
    resource = sample("sim")
    resource["metadata"]["name"] = name
    with pytest.raises(SpecError, match=r"metadata\.name: '"):
        read_pool(resource, INSTALLATION, CREDENTIALS)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ((), 600),
        (("--keepalive=5",), 600),
        (("--request-timeout=90",), 90),
        (("--request-timeout=90", "--request-timeout=0.5"), 1),
        (("--request-timeout=soon",), 600),
        (("--request-timeout=inf",), 600),
    ],
)
def test_the_longest_request_is_the_request_timeout_of_the_routers(
    flags: tuple[str, ...], seconds: int
) -> None:
    assert RouterSpec(extra_args=flags).request_s == seconds


def test_gpus_are_counted_from_the_limits_of_all_containers() -> None:
    assert gpus_of({"cpu": 4, "memory": "1Gi", "nvidia.com/mig-1g.5gb": "2", "amd.com/gpu": 1}) == 3
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    assert gpus_of_pod({"containers": [limits, {}, limits]}) == 2
    assert gpus_of_pod({}) == 0


def template(part: str, **spec: Any) -> dict[str, Any]:
    override = {"podTemplate": {"spec": spec}}
    if part == "kvStore.managed":
        return {"kvStore": {"managed": override}}
    return {part: override}


SLIPS: tuple[tuple[str, str, str, str], ...] = (
    ("decode", "containers", "nodes", "write node, or give"),
    ("prefill", "containers", "decode", "write node, or give"),
    ("router", "containers", "node", "write router, or give"),
    ("kvStore.managed", "containers", "kv-index", "write redis, or give"),
    ("decode", "initContainers", "fetch", "there is none to change; give"),
    ("router", "initContainers", "fetch-model", "there is none to change; give"),
)


@pytest.mark.parametrize(("part", "kind", "name", "remedy"), SLIPS)
def test_a_misnamed_container_is_refused_with_the_names_that_exist(
    part: str, kind: str, name: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as raised:
        sample_pool("sim", **template(part, **{kind: [{"name": name, "env": []}]}))
    text = str(raised.value)
    assert text.startswith(f"spec.{part}.podTemplate.spec.{kind}: {name!r} ")
    assert remedy in text


@pytest.mark.parametrize(("part", "kind", "name", "remedy"), SLIPS)
def test_a_container_of_the_user_s_own_may_have_any_name(
    part: str, kind: str, name: str, remedy: str
) -> None:
    own = {"name": name, "image": "registry.example/sidecar"}
    sample_pool("sim", **template(part, **{kind: [own]}))
