"""What one look at a cluster shows of an installation: for `baton doctor`.

In: a login, a namespace, perhaps a pool. Out: a ClusterReport. It reads, and asks the API server
for the user's own rights; it changes nothing. What this user may not read is None.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec
from kubernetes.aio.client import Configuration

from baton_operator.api.crd import DEFINITIONS, GROUP, VERSION
from baton_operator.api.status import Condition, OperatorStatus, read_operator, read_status
from baton_operator.kube.client import Api, Refused, TooManyRequests, Verb
from baton_operator.kube.kinds import EVENT, POD, POOL
from baton_operator.kube.objects import Body
from baton_operator.names import OPERATOR, POOL_LABEL
from baton_operator.state.pod_problem import Problem, problem_of
from baton_operator.status.condition_kinds import ConditionReason
from baton_operator.status.conditions import KINDS, POD_PROBLEMS

T = TypeVar("T")
# What a user of pools does with kubectl; the chart's ClusterRoles for users allow it.
RIGHTS = (
    *((POOL, verb) for verb in ("get", "list", "create", "patch", "delete")),
    (POD, "list"),
    (EVENT, "list"),
)
REASONS: Mapping[str, ConditionReason] = {
    reason.name: reason for reason in (*POD_PROBLEMS, *(r for kind in KINDS for r in kind.reasons))
}
METRICS_GROUP = "metrics.k8s.io"
_APPS = "/apis/apps/v1"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A CRD in the cluster. `lacks` are fields that this version has and the CRD has not,
    `has_more` the reverse."""

    name: str
    found: bool
    lacks: tuple[str, ...] = ()
    has_more: tuple[str, ...] = ()


class OperatorDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """An installation of the chart. `name` is NAMESPACE/NAME."""

    name: str
    version: str
    ready: int
    wanted: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pool. `problems` are those of its pods, by name."""

    name: str
    conditions: tuple[Condition, ...]
    operator: OperatorStatus | None
    problems: Mapping[str, Problem]


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """`ahead_s` is by how much the API server's clock is ahead of ours, within a second; None if it
    did not say. `denied` are rights that the user lacks in the namespace, as "create
    inferencepools.baton.dev"."""

    version: str
    ahead_s: float | None
    definitions: tuple[Installed, ...] | None
    operators: tuple[OperatorDeployment, ...] | None
    denied: tuple[str, ...]
    metrics_api: bool | None
    pools: tuple[PoolReport, ...] | None


async def inspect(
    configuration: Configuration,
    namespace: str,
    pool: str,
    *,
    timeout_s: float,
    clock: Callable[[], float],
) -> ClusterReport:
    """Pods are read of the named pool only; "" is all pools of the namespace. Each request may take
    `timeout_s`, and as long again if the server is busy. `clock` gives our time of day. Raise
    ApiError if the API server does not answer."""
    api = _PatientApi(configuration, lambda verb, code: None, timeout_s)
    try:
        before = clock()
        version = await api.call("get", "/version")
        ahead_s = _ahead_s(api.date, (before + clock()) / 2)
        definitions, operators, denied, groups, pools = await asyncio.gather(
            _allowed(_definitions(api)),
            _allowed(_operators(api, namespace)),
            _denied(api, namespace),
            _allowed(api.call("get", "/apis")),
            _allowed(_pools(api, namespace, pool)),
        )
    finally:
        await api.close()
    return ClusterReport(
        version=str(version.get("gitVersion", "unknown")),
        ahead_s=ahead_s,
        definitions=definitions,
        operators=operators,
        denied=denied,
        metrics_api=None if groups is None else METRICS_GROUP in _names(groups["groups"]),
        pools=pools,
    )


class _PatientApi(Api):
    """Repeats a call that the server is too busy for, as it is for a resource that was installed a
    second ago."""

    async def call(
        self,
        verb: Verb,
        path: str,
        body: Body | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Body:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return await super().call(verb, path, body, query)
            except TooManyRequests as error:
                if time.monotonic() + error.retry_after_s > until:
                    raise
                await asyncio.sleep(error.retry_after_s)


async def _allowed(reading: Awaitable[T]) -> T | None:
    """None if the user may not read it."""
    try:
        return await reading
    except Refused as error:
        if error.code == 403:
            return None
        raise


def _ahead_s(date: str, ours: float) -> float | None:
    """Of a Date header, which has whole seconds."""
    try:
        return parsedate_to_datetime(date).timestamp() + 0.5 - ours
    except (TypeError, ValueError):
        return None


def _names(items: list[Body]) -> set[str]:
    return {item["name"] for item in items}


async def _definitions(api: Api) -> tuple[Installed, ...]:
    return tuple([await _definition(api, plural, made) for plural, made in DEFINITIONS.items()])


async def _definition(api: Api, plural: str, made: Callable[[], Body]) -> Installed:
    name = f"{plural}.{GROUP}"
    try:
        there = await api.call("get", f"{_CRDS}/{name}")
    except Refused as error:
        if error.code != 404:
            raise
        return Installed(name=name, found=False)
    ours, theirs = set(_fields(made())), set(_fields(there))
    return Installed(
        name=name,
        found=True,
        lacks=tuple(sorted(ours - theirs)),
        has_more=tuple(sorted(theirs - ours)),
    )


def _fields(definition: Body) -> Iterator[str]:
    """The paths of all fields of our version."""
    for version in definition["spec"]["versions"]:
        if version["name"] == VERSION:
            yield from _paths(version["schema"]["openAPIV3Schema"], "")


def _paths(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, inner in (schema.get("properties") or {}).items():
        here = f"{path}.{name}".removeprefix(".")
        yield here
        yield from _paths(inner, here)
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from _paths(schema[below], f"{path}[]")


async def _operators(api: Api, namespace: str) -> tuple[OperatorDeployment, ...]:
    """In all namespaces, or in the pool's if the user may not read others."""
    query = {"labelSelector": f"app.kubernetes.io/name={OPERATOR}"}
    try:
        listed = await api.call("list", f"{_APPS}/deployments", query=query)
    except Refused as error:
        if error.code != 403:
            raise
        path = f"{_APPS}/namespaces/{namespace}/deployments"
        listed = await api.call("list", path, query=query)
    return tuple(
        OperatorDeployment(
            name=f"{item['metadata']['namespace']}/{item['metadata']['name']}",
            version=item["metadata"].get("labels", {}).get("app.kubernetes.io/version", ""),
            ready=(item.get("status") or {}).get("readyReplicas") or 0,
            wanted=item["spec"].get("replicas", 1),
        )
        for item in listed["items"] or ()
    )


async def _denied(api: Api, namespace: str) -> tuple[str, ...]:
    async def allows(group: str, plural: str, verb: str) -> bool:
        attributes = {"namespace": namespace, "group": group, "resource": plural, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await api.call("create", _REVIEWS, review)
        return bool(answer["status"]["allowed"])

    wanted = [(kind.group, kind.plural, verb) for kind, verb in RIGHTS]
    answers = await asyncio.gather(*(allows(*right) for right in wanted))
    return tuple(
        f"{verb} {plural}.{group}".removesuffix(".")
        for (group, plural, verb), allowed in zip(wanted, answers, strict=True)
        if not allowed
    )


async def _pools(api: Api, namespace: str, name: str) -> tuple[PoolReport, ...]:
    """Empty if there is none, or if the CRD is not installed."""
    try:
        if not name:
            listed = await api.call("list", POOL.path(namespace))
            return tuple(_pool(body, ()) for body in listed["items"] or ())
        body = await api.call("get", POOL.path(namespace, name))
    except Refused as error:
        if error.code == 404:
            return ()
        raise
    query = {"labelSelector": f"{POOL_LABEL}={name}"}
    pods = await _allowed(api.call("list", POD.path(namespace), query=query))
    return (_pool(body, (pods or {}).get("items") or ()),)


def _pool(body: Body, pods: list[Body] | tuple[()]) -> PoolReport:
    status = read_status(body)
    found = {pod["metadata"]["name"]: problem_of(pod) for pod in pods}
    return PoolReport(
        name=body["metadata"]["name"],
        conditions=status.conditions if status is not None else (),
        operator=read_operator(body),
        problems={name: problem for name, problem in found.items() if problem is not None},
    )
