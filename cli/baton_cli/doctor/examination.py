"""Chooses the checks for the flags, and runs them side by side, each with a deadline.

In: DoctorOptions. Out: findings, check by check. The slowest check decides how long it
takes; a server that hangs costs its own deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_cli.doctor.side_by_side import Outcome, Work, run_side_by_side
from baton_cli.errors import CommandError, UsageError
from baton_cli.local_pool.store import logged_in
from baton_cli.options.records import UpOptions
from baton_protocol.layout import KVLayout

# All checks together end in 10 s, with Python's start and imports.
DEADLINE_S = 8.0
logger = logging.getLogger(__name__)


def examine(options: DoctorOptions, host: Host) -> list[Finding]:
    """Raise UsageError for a URL that is none."""
    try:
        index, *data = logged_in(options, options.index, *options.data)
    except CommandError as error:
        raise UsageError(str(error)) from error
    works = _works(options, index, data, host)
    findings: list[Finding] = []
    for work, outcome in zip(works, run_side_by_side(works), strict=True):
        findings += outcome.results
        findings += _unended(work, outcome)
    # Each server's clock is seen beside its settings.
    order = {check: place for place, check in enumerate(dict.fromkeys(f.check for f in findings))}
    return sorted(findings, key=lambda finding: order[finding.check])


def _works(options: DoctorOptions, index: str, data: list[str], host: Host) -> list[Work[Finding]]:
    """Each check's module is imported when it runs: a router's image has no package of Kubernetes,
    an operator's none of the engine's."""
    works: list[Work[Finding]] = []

    def add(name: str, run: Callable[[], Iterator[Finding]]) -> None:
        works.append(Work(name, run, DEADLINE_S * host.patience))

    add("machine", partial(_machine, host))
    add("gpu", partial(_gpu, host))
    if options.model:
        add("model", partial(_model, options.model, host))
    if index or data:
        add("store", partial(_store, options.model, index, data, host))
    if data:
        add("bandwidth", partial(_bandwidth, options.model, data, host))
    if options.port or (options.port is None and not options.running):
        port = UpOptions().port if options.port is None else options.port
        add("port", partial(_port, port, host, options.port is not None))
    if options.router:
        add("router", partial(_router, options.router, options.api_key, host))
    if options.kubernetes:
        add("cluster", partial(_cluster, options, host))
    return works


def _unended(work: Work[Finding], outcome: Outcome[Finding]) -> Iterator[Finding]:
    """A check that hung, lacks a package, or has a bug of ours."""
    error = outcome.failure
    if not outcome.ended:
        yield Finding(
            check=work.name,
            severity="error",
            found=f"the check did not end in {work.deadline_s:g} s",
            why="something that it asks does not answer",
            remedy="try again with this check's flags alone",
        )
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("baton"):
        extra = "operator" if work.name == "cluster" else "node"
        yield Finding(
            check=work.name,
            severity="error",
            found=f"not checked: {error.name} is not installed",
            why="the check imports it",
            remedy="install it in the checkout:",
            commands=(f"pip install '.[{extra}]'",),
        )
    elif error is not None:
        logger.error("the check of %s failed", work.name, exc_info=error)
        yield Finding(
            check=work.name,
            severity="error",
            found=f"the check itself failed: {error!r}",
            why="this is a bug of `baton doctor`",
            remedy="report it with the lines on stderr",
        )


def _machine(host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.machine import check_machine

    yield from check_machine(host)


def _gpu(host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.gpu import check_gpu

    yield from check_gpu(host)


def _model(model: str, host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.model_folder import check_model

    yield from check_model(model, host)


def _store(model: str, index: str, data: list[str], host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.bandwidth import value_bytes
    from baton_cli.doctor.redis_servers import check_store

    size = value_bytes(_layout(model))
    yield from check_store(index, data, size, host)


def _bandwidth(model: str, data: list[str], host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.bandwidth import check_bandwidth

    yield from check_bandwidth(data, _layout(model), host)


def _layout(model: str) -> KVLayout | None:
    if not model:
        return None
    from baton_cli.doctor.model_folder import stored_layout

    return stored_layout(model)


def _port(port: int, host: Host, given: bool) -> Iterator[Finding]:
    from baton_cli.doctor.ports import check_port

    yield from check_port(port, host, given=given)


def _router(url: str, key: str, host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.router import check_router

    yield from check_router(url, key, host)


def _cluster(options: DoctorOptions, host: Host) -> Iterator[Finding]:
    from baton_cli.doctor.cluster import check_cluster

    yield from check_cluster(options, host)
