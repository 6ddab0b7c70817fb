"""Pod templates against each rule of the Pod Security Standards' profile `restricted`, as its text
states them. tests/cluster asks a real API server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from baton_operator.builders import build_pool
from tests.support.kubernetes.documents import ROOT
from tests.support.kubernetes.manifests import (
    RESTRICTED,
    SAMPLES,
    containers,
    sample_pool,
    templates,
)

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}


def breaches(template: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of a pod template that the profile `restricted` forbids."""
    spec, pod = template["spec"], template["spec"].get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for volume in spec.get("volumes", ()):
        for kind in volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {kind}"
    for container in containers(template):
        own = container.get("securityContext", {})
        for rule in _breaches_of(container, pod | own):
            yield f"{container['name']}: {rule}"


def _breaches_of(container: dict[str, Any], context: dict[str, Any]) -> Iterator[str]:
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if context.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "seccompProfile"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities.drop"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"


@pytest.mark.parametrize("name", RESTRICTED)
def test_every_pod_passes_the_profile_restricted(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        assert list(breaches(template)) == []


def test_a_host_path_cache_breaks_only_these_rules_and_only_in_nodes() -> None:
    for name, template in templates(build_pool(sample_pool("host"))).items():
        found = set(breaches(template))
        if "prefill" in name or "decode" in name:
            fetch = {"fetch-model: runAsNonRoot", "fetch-model: runAsUser"}
            assert found == {"volume model: hostPath", *fetch}
        else:
            assert found == set()


@pytest.mark.parametrize(
    ("override", "breach"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "volume x: hostPath"),
        ({"securityContext": {"runAsNonRoot": False}}, "node: runAsNonRoot"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "node: seccompProfile"),
        (
            {"containers": [{"name": "node", "securityContext": {"privileged": True}}]},
            "node: privileged",
        ),
    ],
)
def test_the_check_finds_each_breach_in_a_pod_template(
    override: dict[str, Any], breach: str
) -> None:
    pool = sample_pool("sim", decode={"podTemplate": {"spec": override}})
    [decode] = [
        template for name, template in templates(build_pool(pool)).items() if "decode" in name
    ]
    assert list(breaches(decode)) == [breach]


@pytest.mark.parametrize("name", SAMPLES)
def test_pods_have_a_read_only_root_a_writable_tmp_and_no_service_account_token(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        pod = template["spec"]
        assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
        [scratch] = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
        assert scratch.keys() == {"name", "emptyDir"}
        for container in containers(template):
            if container["name"] == "sidecar":
                continue
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
            if container["command"] == ["baton"]:
                assert {"name": "HOME", "value": "/tmp"} in container["env"]


# The row of docs/security.md for each component.
PODS = {
    "prefill": "nodes",
    "decode": "nodes",
    "router": "routers",
    "kv-index": "Redis servers",
    "kv-data": "Redis servers",
}
SECRETS_ROW = re.compile(r"^\| ([\w ]+) \| ((?:`[a-z.-]+`(?:, )?)+) \|", re.MULTILINE)


def secret_keys(part: Any) -> Iterator[tuple[str, str]]:
    """Yield the Secrets and keys that a pod template gives to its containers."""
    if isinstance(part, list):
        for one in part:
            yield from secret_keys(one)
    if not isinstance(part, dict):
        return
    if reference := part.get("secretKeyRef"):
        yield reference["name"], reference["key"]
    if volume := part.get("secret"):
        yield from ((volume["secretName"], item["key"]) for item in volume["items"])
    for one in part.values():
        yield from secret_keys(one)


def test_the_security_page_lists_the_secret_keys_that_each_pod_gets() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.split("\n## The pools' pods\n")[1].split("\n## ")[0]
    documented = {
        pods: set(re.findall("`(.*?)`", keys)) for pods, keys in SECRETS_ROW.findall(section)
    }
    mounted: dict[str, set[str]] = {}
    for sample in SAMPLES:
        pool = sample_pool(sample)
        for template in templates(build_pool(pool)).values():
            pods = PODS[template["metadata"]["labels"]["baton.dev/component"]]
            own = {key for name, key in secret_keys(template) if name == f"{pool.name}-auth"}
            mounted[pods] = mounted.get(pods, set()) | own
    assert mounted == documented
