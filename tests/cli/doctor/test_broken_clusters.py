"""A table of broken clusters: doctor finds each from what the API server answers, its advice
repairs it.

The API server is a stand-in that serves a sound cluster, of which each row changes one part.
tests/cluster asks a real one.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton_cli.commands.version import DISTRIBUTION, installed_version
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_operator.api.crd import DEFINITIONS, GROUP
from baton_operator.api.times import stamp
from baton_operator.kube.kinds import POD, POOL
from tests.cli.doctor.setups import PATIENCE, Flags, Setup, check_repaired, find

pytestmark = pytest.mark.integration

HOUR_S = 3600
NAMESPACE = "models"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DEPLOYMENTS = "/apis/apps/v1/deployments"
POOL_CRD = f"{CRDS}/{POOL.plural}.{GROUP}"
THE_POOL, PODS = POOL.path(NAMESPACE, "qwen"), POD.path(NAMESPACE)
INSTALL = "helm upgrade --install baton"
READY = {"type": "Ready", "status": "True", "reason": "AllReady", "message": "all is well"}
READY |= {"lastTransitionTime": "2026-01-01T00:00:00Z"}
PULLING = {
    "metadata": {"name": "qwen-decode-0"},
    "spec": {"containers": [{"name": "node"}]},
    "status": {
        "containerStatuses": [
            {
                "name": "node",
                "image": "registry.example/none:1",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }
        ]
    },
}
Json = dict[str, Any]


def sound_cluster() -> dict[str, Json]:
    """The answers by path."""
    version = installed_version(DISTRIBUTION)
    now = stamp(datetime.now(UTC))
    operator = {
        "metadata": {
            "namespace": "baton-system",
            "name": "baton-operator",
            "labels": {"app.kubernetes.io/version": version},
        },
        "spec": {"replicas": 1},
        "status": {"readyReplicas": 1},
    }
    pool = {
        "metadata": {"name": "qwen"},
        "spec": {},
        "status": {
            "conditions": [READY],
            "operator": {"name": "baton-system/baton-operator", "time": now},
        },
    }
    return {
        "/version": {"gitVersion": "v1.34.0"},
        "/apis": {"groups": [{"name": "metrics.k8s.io"}]},
        **{f"{CRDS}/{plural}.{GROUP}": made() for plural, made in DEFINITIONS.items()},
        DEPLOYMENTS: {"items": [operator]},
        THE_POOL: pool,
        POOL.path(NAMESPACE): {"items": [pool]},
        PODS: {"items": []},
    }


@dataclass
class Cluster:
    """The stand-in. `denied` are verbs of pools that the user lacks; `silent`: it answers nothing;
    `ahead_s`: its clock."""

    answers: dict[str, Json] = field(default_factory=sound_cluster)
    denied: set[str] = field(default_factory=set)
    silent: bool = False
    ahead_s: int = 0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if self.silent:
            await asyncio.sleep(HOUR_S)
        headers = {"Date": formatdate(time.time() + self.ahead_s, usegmt=True)}
        if request.method == "POST":
            assert request.path == REVIEWS  # the only one: a check changes nothing
            asked = json.loads(await request.read())["spec"]["resourceAttributes"]
            allowed = asked["resource"] != POOL.plural or asked["verb"] not in self.denied
            return web.json_response({"status": {"allowed": allowed}}, headers=headers)
        assert request.method == "GET"
        found = self.answers.get(request.path)
        if found is None:
            missing = {"kind": "Status", "reason": "NotFound", "message": "not found"}
            return web.json_response(missing, status=404, headers=headers)
        return web.json_response(found, headers=headers)

    def repair(self) -> None:
        self.answers, self.denied = sound_cluster(), set()
        self.silent, self.ahead_s = False, 0


@dataclass(frozen=True)
class Row:
    """`breaks` changes a sound cluster."""

    breaks: Callable[[Cluster], None]
    found: str
    remedy: str
    check: str = "cluster"
    flags: Mapping[str, str] = field(default_factory=dict)


def remove(path: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.answers.__delitem__(path)


def change(path: str, **fields: Any) -> Callable[[Cluster], None]:
    """Replace fields at the top of an answer."""
    return lambda cluster: cluster.answers[path].update(copy.deepcopy(fields))


def _age_the_crd(cluster: Cluster) -> None:
    [version] = cluster.answers[POOL_CRD]["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["autoscaling"]


def _stop_the_operator(cluster: Cluster) -> None:
    cluster.answers[DEPLOYMENTS]["items"][0]["status"] = {}


def _let_the_operator_forget(cluster: Cluster) -> None:
    old = stamp(datetime.fromtimestamp(time.time() - HOUR_S, UTC))
    cluster.answers[THE_POOL]["status"]["operator"]["time"] = old


def _make_the_pool_unready(cluster: Cluster) -> None:
    no = {"status": "False", "reason": "SpecInvalid", "message": "spec.engine.kind: 'x'"}
    cluster.answers[THE_POOL]["status"]["conditions"] = [READY | no]


ROWS = {
    "an_api_server_that_is_silent": Row(
        lambda cluster: setattr(cluster, "silent", True),
        "the API server does not answer",
        "kubectl version",
    ),
    "an_api_server_that_refuses": Row(
        remove("/version"), "the API server does not answer", "check the kubeconfig"
    ),
    "no_crd": Row(remove(POOL_CRD), f"the CRD {POOL.plural}.{GROUP} is not installed", INSTALL),
    "an_old_crd": Row(_age_the_crd, "it lacks spec.autoscaling, spec.autoscaling.", INSTALL),
    "no_rights": Row(
        lambda cluster: cluster.denied.update(("create", "patch")),
        f"you may not create {POOL.plural}.{GROUP}, patch {POOL.plural}.{GROUP}",
        "create rolebinding",
    ),
    "no_operator": Row(change(DEPLOYMENTS, items=[]), "no operator is installed", INSTALL),
    "an_operator_that_is_down": Row(
        _stop_the_operator,
        "no pod of operator baton-system/baton-operator is ready",
        "kubectl --namespace baton-system logs deployment/baton-operator",
    ),
    "an_operator_that_looks_elsewhere": Row(
        _let_the_operator_forget, "pool qwen: no operator has looked at it", "this namespace"
    ),
    "no_such_pool": Row(
        remove(THE_POOL), "there is no pool qwen in namespace models", "kubectl get bpool"
    ),
    "a_pool_with_a_wrong_spec": Row(
        _make_the_pool_unready, "Ready is False: SpecInvalid: spec.engine.kind", "edit the pool"
    ),
    "an_image_that_cannot_be_pulled": Row(
        change(PODS, items=[PULLING]),
        "pod qwen-decode-0: ImagePullFailing: registry.example/none:1: no such image",
        "check the image's name",
    ),
    "a_clock_that_is_an_hour_ahead": Row(
        lambda cluster: setattr(cluster, "ahead_s", HOUR_S),
        "the clock of the API server is 36",
        "time service",
        check="clock",
    ),
}


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Cluster, str]]:
    async with served(Cluster()) as running:
        yield running


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[tuple[Cluster, str]]:
    """The cluster and its API server's URL."""
    runner = web.ServerRunner(web.Server(cluster.answer), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield cluster, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def kubeconfig(folder: Path, server: str, patience: float = PATIENCE) -> Host:
    names = {"cluster": "it", "user": "me"}
    config = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": names}],
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "word"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    return Host(environ={"KUBECONFIG": str(folder / "kubeconfig")}, patience=patience)


FLAGS: Flags = {"kubernetes": True, "namespace": NAMESPACE, "pool": "qwen"}


@pytest.mark.parametrize("name", ROWS)
async def test_doctor_finds_a_broken_cluster_and_its_advice_repairs_it(
    name: str, cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    there, url = cluster
    row = ROWS[name]
    row.breaks(there)
    setup = Setup(
        check=row.check,
        flags=FLAGS,
        found=row.found,
        remedy=row.remedy,
        follow=lambda finding: there.repair(),
        host=kubeconfig(tmp_path, url, 1.0 if there.silent else PATIENCE),
    )
    finding = await asyncio.to_thread(find, setup)
    setup.follow(finding)
    await asyncio.to_thread(check_repaired, setup, None)


async def test_doctor_finds_a_kubeconfig_that_is_missing(
    cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    def follow(finding: Finding) -> Host:
        return kubeconfig(tmp_path, cluster[1])

    setup = Setup(
        check="cluster",
        flags=FLAGS,
        found="no login for a Kubernetes API server",
        remedy="set KUBECONFIG",
        follow=follow,
        host=Host(environ={"KUBECONFIG": str(tmp_path / "none")}),
    )
    finding = await asyncio.to_thread(find, setup)
    await asyncio.to_thread(check_repaired, setup, setup.follow(finding))


async def check_sound(url: str, folder: Path) -> None:
    """The doctor finds nothing wrong with the cluster of this API server."""
    setup = Setup(
        check="cluster",
        flags=FLAGS,
        found="",
        remedy="",
        follow=lambda finding: None,
        host=kubeconfig(folder, url),
    )
    await asyncio.to_thread(check_repaired, setup, None)


async def test_doctor_asks_a_busy_api_server_again(tmp_path: Path) -> None:
    busy = {"kind": "Status", "message": "storage is (re)initializing"}
    asked: list[str] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path == THE_POOL:
            asked.append(request.path)
            if len(asked) < 3:
                return web.json_response(busy, status=429, headers={"Retry-After": "0"})
        return await sound.answer(request)

    sound, there = Cluster(), Cluster()
    there.answer = answer  # type: ignore[method-assign]
    async with served(there) as (_, url):
        await check_sound(url, tmp_path)
    assert len(asked) == 3


async def test_what_a_user_may_not_read_is_a_note(
    cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    there, _ = cluster
    forbidden = {"kind": "Status", "reason": "Forbidden", "message": "you may not"}

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path.startswith((CRDS, "/apis/apps")):
            return web.json_response(forbidden, status=403)
        return await sound.answer(request)

    sound = Cluster()
    there.answer = answer  # type: ignore[method-assign]
    async with served(there) as (_, url):
        await check_sound(url, tmp_path)
