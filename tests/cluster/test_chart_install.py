"""The chart on a real API server: install, upgrade, rollback and removal; pools are kept.

The cluster has no nodes. In tests with `helm --wait` the operator has no replicas, which needs
--skip-schema-validation because the values' schema refuses it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.installed import established, remove_definitions
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.kubernetes.chart import (
    CHART,
    CRD,
    MONITORING,
    SCALERS,
    SPREAD,
    manifests,
    one_of,
    set_words,
)
from tests.support.kubernetes.documents import POOLS, excerpts
from tests.support.needs import needs

CONTROLLER_WAIT_S = 180


class ChartSite:
    """A namespace with the chart's release and one pool."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self.kubernetes = kubernetes
        self.namespace = kubernetes.new_namespace()

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.kubernetes.kubectl("-n", self.namespace, *args, stdin=stdin)

    def helm(self, *args: str) -> str:
        return self.kubernetes.helm(*args, f"--namespace={self.namespace}")

    def install(self, *flags: str, chart: Path = CHART) -> str:
        """Install or upgrade the chart; return Helm's output."""
        printed = self.helm("upgrade", "baton", str(chart), "--install", *flags)
        established(self.kubernetes, f"crd/{CRD}")
        return printed

    def uninstall(self) -> str:
        return self.helm("uninstall", "baton", "--wait")

    def make_pool(self, **spec: object) -> str:
        """Create or update the pool; return its uid."""
        pool = {
            "apiVersion": "baton.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "kept"},
            "spec": {"engine": {"kind": "sim"}, **spec},
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(pool))
        return self.uid_of_pool()

    def has_newer_field(self) -> bool:
        """Whether the CRD has the field that `changed_chart` adds."""
        try:
            self.make_pool(newer="x")
        except CommandFailed as error:
            if "unknown field" in error.error and "spec.newer" in error.error:
                return False
            raise
        return True

    def uid_of_pool(self) -> str:
        """The pool's uid; it differs too once the pool is being deleted."""
        uid = "-o=jsonpath={.metadata.uid} {.metadata.deletionTimestamp}"
        return self.kubectl("get", "bpool/kept", uid)


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for what a controller or the API server does with a delay."""
    deadline = time.monotonic() + CONTROLLER_WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def site(fresh_control_plane: Kubernetes) -> Iterator[ChartSite]:
    """A site without anything of the chart, before and after the test."""
    needs("own_cluster")
    one = ChartSite(fresh_control_plane)
    yield one
    if one.helm("list", "--short"):
        one.uninstall()
    remove_definitions(fresh_control_plane, f"crd/{CRD}", f"crd/{SCALERS}")
    fresh_control_plane.delete_namespace(one.namespace)


@pytest.fixture
def changed_chart(tmp_path: Path) -> Path:
    """The chart's next version, whose CRD has one more field."""
    folder = tmp_path / "baton"
    shutil.copytree(CHART, folder)
    [path] = [one for one in (folder / "templates").iterdir() if CRD in one.read_text()]
    new = r"\1newer:\n\1  type: string\n\1paused:\n"
    text, count = re.subn(r"^( +)paused:\n", new, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    about = folder / "Chart.yaml"
    about.write_text(about.read_text().replace("\nversion: ", "\nversion: 9"))
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (
            "--set=operator.replicas=3",
            "--set-json=images.pullSecrets=[\"login\"]",
            "--set=operator.priorityClassName=system-cluster-critical",
            *set_words({
                "operator.topologySpreadConstraints": [SPREAD],
                "operator.serviceAccountAnnotations": {"cloud.example/role": "a"},
                "networkPolicy.monitoring": [MONITORING],
            }),
        ),
        ("--set-json=watchNamespaces=[\"default\",\"kube-public\"]",),
        ("--set=samplePool.enabled=true", "--set=metrics.annotations.a=b"),
    ],
    ids=["default", "replicas", "namespaces", "sample"],
)  # fmt: skip
def test_the_api_server_accepts_every_manifest_unchanged(
    site: ChartSite, flags: tuple[str, ...]
) -> None:
    site.install()
    objects = manifests(site.kubernetes, *flags, namespace=site.namespace)
    # With --validate=strict, unknown and duplicate fields are errors too.
    strict = ("--dry-run=server", "--validate=strict", "--server-side", "--force-conflicts")
    printed = site.kubernetes.kubectl(
        "apply", *strict, "-f", "-", stdin=yaml.safe_dump_all(objects)
    )
    assert printed.count("serverside-applied (server dry run)") == len(objects)


def test_pod_security_restricted_admits_the_operator_s_pod(
    site: ChartSite,
) -> None:
    namespace = site.kubernetes.new_namespace(
        **{"pod-security.kubernetes.io/enforce": "restricted"}
    )
    objects = manifests(site.kubernetes, namespace=namespace)
    account = json.dumps(one_of(objects, "ServiceAccount"))
    site.kubernetes.kubectl("apply", "-f", "-", stdin=account)
    template = one_of(objects, "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] |= {"name": "operator", "namespace": namespace}
    site.kubernetes.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    # The image or the platform sets the user id. With runAsNonRoot the kubelet refuses root.
    assert pod["spec"]["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
    context = pod["spec"]["containers"][0]["securityContext"]
    assert context.pop("readOnlyRootFilesystem") is True  # `restricted` does not require it
    # The namespace does enforce the level.
    context["allowPrivilegeEscalation"] = True
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        site.kubernetes.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_an_upgrade_adds_the_crd_s_new_fields_and_a_rollback_removes_them(
    site: ChartSite, changed_chart: Path
) -> None:
    site.install()
    uid = site.make_pool()
    assert not site.has_newer_field()

    site.install(chart=changed_chart)
    wait_until(lambda: site.has_newer_field())
    assert site.uid_of_pool() == uid

    site.helm("rollback", "baton", "1")
    wait_until(lambda: not site.has_newer_field())
    assert site.make_pool() == uid


def test_a_release_scales_from_one_operator_to_two_and_back(site: ChartSite) -> None:
    def strategy() -> tuple[str, ...]:
        path = "-o=jsonpath={.spec.replicas} {.spec.strategy.type} {.spec.strategy.rollingUpdate}"
        return tuple(site.kubectl("get", "deployment/baton-operator", path).split())

    site.install("--set=operator.replicas=1")
    assert strategy() == ("1", "Recreate")
    site.install("--set=operator.replicas=2")
    assert strategy() == ("2", "RollingUpdate", '{"maxSurge":1,"maxUnavailable":0}')
    site.install("--set=operator.replicas=1")
    assert strategy() == ("1", "Recreate")


def test_uninstalling_keeps_the_crd_and_the_pools_which_can_then_be_deleted(
    site: ChartSite,
) -> None:
    site.install()
    uid = site.make_pool()
    assert f"[CustomResourceDefinition] {CRD}" in site.uninstall()
    assert site.uid_of_pool() == uid
    # Waits for the deletion. A finalizer would block it forever, as no operator is left.
    site.kubectl("delete", "bpool/kept", "--timeout=120s")


def test_after_uninstalling_only_the_crds_are_left(site: ChartSite) -> None:
    def everything() -> set[str]:
        kinds = "deployments,replicasets,services,serviceaccounts,secrets,configmaps,leases"
        kinds += ",poddisruptionbudgets,networkpolicies"
        rights = "roles,rolebindings,clusterroles,clusterrolebindings,crd"
        names = "{.kind}/{.metadata.name} {.metadata.namespace}{'\\n'}"
        args = ("--all-namespaces", f"-o=jsonpath={{range .items[*]}}{names}{{end}}")
        objects = site.kubernetes.kubectl("get", f"{kinds},{rights}", *args).splitlines()
        elsewhere = {one for one in objects if not one.endswith((" ", f" {site.namespace}"))}
        return set(objects) - elsewhere

    before = everything()
    site.install("--set=operator.replicas=2")
    made = {one.split()[0] for one in everything() - before}
    assert {
        *("Deployment/baton-operator", "RoleBinding/baton-operator-lease"),
        *("PodDisruptionBudget/baton-operator", "NetworkPolicy/baton-operator"),
    } < made
    site.uninstall()
    kept = {f"CustomResourceDefinition/{one} " for one in (CRD, SCALERS)}
    wait_until(lambda: everything() - before == kept)


def test_the_chart_can_be_installed_again_over_kept_crds_and_pools(
    site: ChartSite,
) -> None:
    site.install()
    uid = site.make_pool()
    site.uninstall()
    site.install()
    assert site.uid_of_pool() == uid


def test_with_a_foreign_crd_the_chart_installs_only_without_its_own(site: ChartSite) -> None:
    [crd] = [
        manifest for manifest in manifests(site.kubernetes) if manifest["metadata"]["name"] == CRD
    ]
    site.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
    with pytest.raises(CommandFailed, match="invalid ownership metadata"):
        site.install()
    site.install("--set=crds.install=false")


def test_the_sample_pool_is_created_once_and_then_left_to_the_user(site: ChartSite) -> None:
    def replicas() -> str:
        path = "-o=jsonpath={.spec.decode.replicas}"
        return site.kubectl("get", "bpool/sample", path)

    sample = "--set=samplePool.enabled=true"
    no_pods = ("--set=operator.replicas=0", "--skip-schema-validation")
    notes = site.install("--wait", *no_pods, sample)
    assert "--for=condition=Ready bpool/sample" in notes
    assert replicas() == "1"
    site.kubectl(
        *("patch", "bpool/sample", "--type=merge"),
        '-p={"spec": {"decode": {"replicas": 2}}}',
    )
    site.install(sample, "--set=samplePool.spec.decode.replicas=3")
    assert replicas() == "2"
    site.install()
    site.uninstall()
    assert replicas() == "2"


def test_a_later_upgrade_can_create_the_sample_pool(site: ChartSite) -> None:
    assert "create a pool that needs neither" in site.install()
    site.install("--set=samplePool.enabled=true", "--set=samplePool.name=late")
    assert "late" in site.kubectl("get", "bpool")


def test_editors_of_a_namespace_may_edit_its_pools_and_viewers_may_read_them(
    site: ChartSite,
) -> None:
    site.install()
    for role, user in (("view", "viewer"), ("edit", "editor")):
        args = ("create", "rolebinding", role, f"--clusterrole={role}", f"--user={user}")
        site.kubectl(*args)

    def may(user: str, verb: str) -> bool:
        try:
            answer = site.kubectl("auth", "can-i", verb, "bpool", f"--as={user}")
        except CommandFailed as error:  # the exit code means no too
            answer = error.output
        return {"yes": True, "no": False}[answer.strip()]

    wait_until(lambda: may("editor", "delete"))
    assert {verb for verb in ("get", "create", "patch") if may("editor", verb)} == {
        *("get", "create", "patch")
    }
    assert {verb for verb in ("get", "create", "patch") if may("viewer", verb)} == {"get"}


def test_the_pools_in_the_documents_are_accepted(site: ChartSite) -> None:
    site.install()
    manifests_of_files = [path.read_text() for path in POOLS]
    resource = {"apiVersion": "baton.dev/v1alpha1", "kind": "InferencePool"}
    manifests_of_excerpts = [
        yaml.safe_dump({**resource, "metadata": {"name": f"excerpt-{number}"}, "spec": spec})
        for number, spec in enumerate(excerpts())
    ]
    assert len(manifests_of_files) >= 2
    assert len(manifests_of_excerpts) >= 4
    printed = site.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin="---\n".join([*manifests_of_files, *manifests_of_excerpts]),
    )
    assert printed.count("created (server dry run)") == len(manifests_of_files) + len(
        manifests_of_excerpts
    )
