"""A Kubernetes cluster: its API server, our CRDs, the operator, this user's rights, pools.

In: DoctorOptions. Out: findings, from what `baton_operator.inspection` reads. Meanings and remedies
of conditions and of pods' problems are those that the operator writes into a pool's status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

from baton_cli.commands.version import DISTRIBUTION, installed_version
from baton_cli.doctor.clock import clock_finding
from baton_cli.doctor.finding import Finding, Severity, of_error
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_operator.api.status import Condition
from baton_operator.api.times import is_fresh
from baton_operator.inspection import (
    REASONS,
    ClusterReport,
    Installed,
    OperatorDeployment,
    PoolReport,
    inspect,
)
from baton_operator.kube.client import ApiError
from baton_operator.kube.connection import ConnectionFailed, load

CHECK = "cluster"
ANSWER_S = 2.5
# The operator renews its mark on each pool every minute.
SEEN_S = 180.0
FIELDS_SHOWN = 3
INSTALL = "helm upgrade --install baton charts/baton --namespace baton-system --create-namespace"


def check_cluster(options: DoctorOptions, host: Host) -> Iterator[Finding]:
    try:
        report = asyncio.run(_look(options, host))
    except ConnectionFailed as error:
        yield of_error(CHECK, error, why="the cluster cannot be asked")
        return
    except ApiError as error:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"the API server does not answer: {error}",
            why="the cluster cannot be asked",
            remedy="check the kubeconfig's server and login, and the network to it:",
            commands=("kubectl version", "kubectl config get-contexts"),
        )
        return
    yield Finding(
        check=CHECK, severity="ok", found=f"the API server answers: Kubernetes {report.version}"
    )
    if report.ahead_s is not None:
        yield clock_finding("clock", "the API server", report.ahead_s)
    yield from _definitions(report)
    yield from _operators(report)
    yield from _rights(report, options)
    if report.metrics_api is False:
        yield Finding(
            check=CHECK,
            severity="note",
            found="the cluster has no metrics API",
            why="`kubectl top` shows nothing; autoscaling does not need it",
            remedy="install metrics-server, if you want it",
        )
    # The operator's clock is more likely the API server's than ours.
    now = datetime.fromtimestamp(host.clock() + (report.ahead_s or 0.0), UTC)
    yield from _pools(report, options, now)


async def _look(options: DoctorOptions, host: Host) -> ClusterReport:
    configuration = await load(host.environ, options.context)
    return await inspect(
        *(configuration, options.namespace, options.pool),
        timeout_s=ANSWER_S * host.patience,
        clock=host.clock,
    )


def _unread(what: str) -> Finding:
    return Finding(
        check=CHECK,
        severity="note",
        found=f"{what}: you may not read them",
        why="they are not checked",
        remedy="ask somebody with more rights to run this",
    )


def _definitions(report: ClusterReport) -> Iterator[Finding]:
    if report.definitions is None:
        yield _unread("CustomResourceDefinitions")
    for definition in report.definitions or ():
        yield _definition(definition)


def _definition(there: Installed) -> Finding:
    if not there.found:
        return Finding(
            check=CHECK,
            severity="error",
            found=f"the CRD {there.name} is not installed",
            why="the API server knows no pools",
            remedy="install the chart:",
            commands=(INSTALL,),
        )
    if there.lacks:
        return Finding(
            check=CHECK,
            severity="error",
            found=f"the CRD {there.name} is older than this version: it lacks {_some(there.lacks)}",
            why="the API server drops these fields of a pool without a word",
            remedy="upgrade the chart, which brings the CRDs:",
            commands=(INSTALL,),
        )
    newer = f"; it is newer: it has {_some(there.has_more)}, too" if there.has_more else ""
    return Finding(
        check=CHECK,
        severity="note" if newer else "ok",
        found=f"the CRD {there.name} has all fields of this version{newer}",
        why="this command does not know all fields" if newer else "",
        remedy="use the cluster's version of this command" if newer else "",
    )


def _some(fields: tuple[str, ...]) -> str:
    more = f" and {len(fields) - FIELDS_SHOWN} more" if len(fields) > FIELDS_SHOWN else ""
    return ", ".join(fields[:FIELDS_SHOWN]) + more


def _operators(report: ClusterReport) -> Iterator[Finding]:
    if report.operators is None:
        yield _unread("Deployments of operators")
    elif not report.operators:
        yield Finding(
            check=CHECK,
            severity="error",
            found="no operator is installed",
            why="nobody makes the pods of pools",
            remedy="install the chart:",
            commands=(INSTALL,),
        )
    for operator in report.operators or ():
        yield _operator(operator)


def _operator(operator: OperatorDeployment) -> Finding:
    namespace, name = operator.name.split("/")
    if not operator.ready:
        return Finding(
            check=CHECK,
            severity="error",
            found=f"no pod of operator {operator.name} is ready, of {operator.wanted}",
            why="pools keep serving, and nothing scales, drains or is replaced",
            remedy="see why:",
            commands=(
                f"kubectl --namespace {namespace} describe pods "
                "--selector app.kubernetes.io/name=baton-operator",
                f"kubectl --namespace {namespace} logs deployment/{name}",
            ),
        )
    ours = installed_version(DISTRIBUTION)
    same = operator.version in ("", ours)
    version = operator.version or "of an unknown version"
    return Finding(
        check=CHECK,
        severity="ok" if same else "note",
        found=f"operator {operator.name} {version} runs" + ("" if same else f"; this is {ours}"),
        why="" if same else "fields and messages may differ",
        remedy="" if same else "use the same version of both",
    )


def _rights(report: ClusterReport, options: DoctorOptions) -> Iterator[Finding]:
    if not report.denied:
        yield Finding(check=CHECK, severity="ok", found="you may create, read and change pools")
        return
    yield Finding(
        check=CHECK,
        severity="warning",
        found=f"in namespace {options.namespace} you may not {', '.join(report.denied)}",
        why="kubectl refuses it",
        remedy="an admin of the namespace binds the role edit, which includes pools, to USER:",
        commands=(
            f"kubectl --namespace {options.namespace} create rolebinding baton-pools "
            "--clusterrole edit --user USER",
        ),
    )


def _pools(report: ClusterReport, options: DoctorOptions, now: datetime) -> Iterator[Finding]:
    if report.pools is None:
        return  # `denied` says so
    if options.pool and not report.pools:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"there is no pool {options.pool} in namespace {options.namespace}",
            why="there is nothing to serve with",
            remedy="correct --pool or --namespace:",
            commands=("kubectl get bpool --all-namespaces",),
        )
    for pool in report.pools:
        yield from _pool(pool, now)


def _pool(pool: PoolReport, now: datetime) -> Iterator[Finding]:
    seen = pool.operator.time if pool.operator is not None else ""
    if not seen or not is_fresh(seen, now, SEEN_S):
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"pool {pool.name}: no operator has looked at it since {seen or 'it was made'}",
            why="nothing that changes in its spec takes effect",
            remedy="start the operator, and see whether it serves this namespace:",
            commands=(INSTALL,),
        )
    for condition in pool.conditions:
        yield from _condition(pool.name, condition)
    for name, problem in pool.problems.items():
        known = REASONS.get(problem.reason)
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"pod {name}: {problem.reason}: {problem.message}",
            why=known.meaning if known is not None else "it does not become ready",
            remedy=known.remedy if known is not None else "see kubectl describe pod",
        )


def _condition(pool: str, condition: Condition) -> Iterator[Finding]:
    known = REASONS.get(condition.reason)
    if condition.status == "True" or known is None or known.status == "True":
        if condition.type == "Ready":
            yield Finding(check=CHECK, severity="ok", found=f"pool {pool} is ready")
        return
    severity: Severity = "error" if condition.type == "Ready" else "warning"
    if known.waits or condition.status == "Unknown":
        severity = "note"
    yield Finding(
        check=CHECK,
        severity=severity,
        found=f"pool {pool}: {condition.type} is {condition.status}: {condition.reason}: "
        f"{condition.message}",
        why=known.meaning,
        remedy=known.remedy,
    )
