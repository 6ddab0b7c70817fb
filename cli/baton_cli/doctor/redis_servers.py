"""The Redis servers of a store: whether each answers, has the right settings, and is its own.

In: the URLs, and the size of a stored value. Out: findings. What a server needs is declared in
`baton_kvstore.connection.server_settings`; nodes apply or log the same at their start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from baton_cli.doctor.clock import clock_finding
from baton_cli.doctor.finding import Finding, Severity, of_error
from baton_cli.doctor.host import Host
from baton_cli.doctor.side_by_side import Outcome, Work, run_side_by_side
from baton_cli.options.sizes import about_size
from baton_kvstore.connection.endpoint import Endpoint, parse_endpoint
from baton_kvstore.connection.remedies import client_command, remedy_of, start_command
from baton_kvstore.connection.server_report import ServerReport, read_report
from baton_kvstore.connection.server_settings import INDEX_MEMORY, StoreRole, WantedSetting
from baton_kvstore.errors import StoreError, StoreMisconfigured
from baton_kvstore.settings import StoreSettings, check_distinct
from baton_protocol.link import is_loopback

CHECK = "store"
SERVER_S = 2.0  # that one server may take, as at the start of `baton up`
LATE_S = 1.0  # beyond it, for a name lookup
# A request asks the index a few times before its first token.
SLOW_S = 0.01
FULL = 0.95
UNUSABLE: dict[StoreRole, str] = {
    "index": "without it nodes exchange no KV, routers find no nodes, and streams do not outlive "
    "their router",
    "data": "chunks that it would hold are computed again",
}
# Severity of a setting that is not as it should be. Of the index, an evicted key is a lost marker,
# node or resumable stream.
SETTING: dict[tuple[StoreRole, str], Severity] = {("index", "maxmemory-policy"): "error"}
# What a data server may use of its machine if it has no limit.
DATA_SHARE = 2
GIB = 1 << 30


def check_store(
    index_url: str, data_urls: Sequence[str], value_bytes: int, host: Host
) -> Iterator[Finding]:
    """`index_url` "" and empty `data_urls` are not checked."""
    roles: list[tuple[StoreRole, str]] = [("index", index_url)] if index_url else []
    roles += [("data", url) for url in data_urls]
    deadline_s = (SERVER_S + LATE_S) * host.patience
    works = [
        Work(role, partial(_look, role, url, value_bytes, host), deadline_s) for role, url in roles
    ]
    outcomes = run_side_by_side(works)
    run_ids = [outcome.results[0].run_id if outcome.results else "" for outcome in outcomes]
    conflict = _conflict(index_url, data_urls, run_ids) if index_url and data_urls else None
    for (role, url), outcome in zip(roles, outcomes, strict=True):
        # Of a server with two roles, each would want other settings.
        if conflict is None or not outcome.results:
            yield from _findings(role, url, outcome)
    if conflict is not None:
        yield conflict


def _conflict(index_url: str, data_urls: Sequence[str], run_ids: Sequence[str]) -> Finding | None:
    """What is wrong with the URLs together."""
    try:
        StoreSettings(index_url=index_url, data_urls=tuple(data_urls)).check()
        check_distinct(index_url, data_urls, run_ids)
    except StoreMisconfigured as error:
        return of_error(CHECK, error, why="`baton up` and nodes do not start with these URLs")
    return None


def _look(role: StoreRole, url: str, value_bytes: int, host: Host) -> Iterator[ServerReport]:
    yield read_report(
        *(url, role),
        timeout_s=SERVER_S * host.patience,
        value_bytes=value_bytes,
        clock=host.clock,
    )


def _findings(role: StoreRole, url: str, outcome: Outcome[ServerReport]) -> Iterator[Finding]:
    if outcome.results:
        yield from _judge(role, outcome.results[0])
    elif isinstance(outcome.failure, StoreMisconfigured):
        yield of_error(CHECK, outcome.failure, why=UNUSABLE[role], remedy="correct the URL")
    elif isinstance(outcome.failure, StoreError):
        yield _unusable(role, parse_endpoint(url), outcome.failure)
    elif outcome.failure is not None:
        raise outcome.failure
    else:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"{role}: {parse_endpoint(url).label} did not answer in {SERVER_S:g} s",
            why=UNUSABLE[role],
            remedy="see whether its name can be looked up, and whether the server is frozen",
        )


def _unusable(role: StoreRole, endpoint: Endpoint, error: StoreError) -> Finding:
    remedy, command = remedy_of(error, endpoint, role), start_command(endpoint, role)
    starts = remedy.endswith(command)
    return Finding(
        check=CHECK,
        severity="error",
        found=f"{role}: {error}",
        why=UNUSABLE[role],
        remedy=remedy.removesuffix(command).strip(),
        commands=(command,) if starts else (),
    )


def _judge(role: StoreRole, report: ServerReport) -> Iterator[Finding]:
    label, usage = report.endpoint.label, report.usage
    limit = about_size(usage.limit_bytes) if usage.limit_bytes else "no limit"
    yield Finding(
        check=CHECK,
        severity="ok",
        found=f"{role}: {label} is Redis {report.version}, uses {about_size(usage.used_bytes)} of "
        f"{limit}, and answers in {report.round_trip_s * 1e3:.2f} ms",
    )
    bounded = False
    for wanted in report.wanted:
        bounded = bounded or wanted.name == "maxmemory"
        yield _setting(role, report, wanted)
    if role == "index":
        yield from _index_memory(report, bounded)
    if report.round_trip_s > SLOW_S:
        yield Finding(
            check=CHECK,
            severity="note",
            found=f"{role}: {label} takes {report.round_trip_s * 1e3:.0f} ms to answer",
            why="a request asks the index a few times before its first token"
            if role == "index"
            else "fetching KV is then often slower than computing it",
            remedy="start the server nearer, and see what else its machine does",
        )
    if report.endpoint.kind == "tcp" and not is_loopback(report.endpoint.host):
        yield Finding(
            check=CHECK,
            severity="note",
            found=f"{role}: {label} is used without TLS",
            why="KV and prompts can be read on the way",
            remedy="use rediss://, or a network that nobody else can listen on",
        )
    yield clock_finding("clock", f"{role} server {label}", report.ahead_s)


def _setting(role: StoreRole, report: ServerReport, wanted: WantedSetting) -> Finding:
    line = wanted.line
    if wanted.name == "maxmemory":
        line = f"CONFIG SET maxmemory {_fitting_bytes(report)}"
    hidden = wanted.now is None
    severity = SETTING.get((role, wanted.name), "warning")
    return Finding(
        check=CHECK,
        severity="note" if hidden else severity,
        found=f"{role}: {report.endpoint.label} has {wanted.name} {wanted.was}",
        why=wanted.why,
        remedy="allow the user CONFIG, or set it yourself:" if hidden else "set it:",
        commands=(client_command(report.endpoint, line),),
    )


def _fitting_bytes(report: ServerReport) -> int:
    """A half of the machine's memory in whole GiB, and at least twice what is in use now."""
    half = report.machine_bytes // DATA_SHARE // GIB * GIB
    return max(half, 2 * report.usage.used_bytes, GIB)


def _index_memory(report: ServerReport, reported: bool) -> Iterator[Finding]:
    usage, label = report.usage, report.endpoint.label
    if not usage.limit_bytes and not reported:
        size = max(INDEX_MEMORY, 2 * usage.used_bytes)
        yield Finding(
            check=CHECK,
            severity="warning",
            found=f"index: {label} has maxmemory '0'",
            why="it may grow until its machine has no memory left, and the kernel kills it",
            remedy="bound it:",
            commands=(client_command(report.endpoint, f"CONFIG SET maxmemory {size}"),),
        )
    if usage.limit_bytes and usage.used_bytes > FULL * usage.limit_bytes:
        size = 2 * usage.limit_bytes
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"index: {label} uses {about_size(usage.used_bytes)} of "
            f"{about_size(usage.limit_bytes)}",
            why="it refuses writes when it is full, and nodes then exchange no KV",
            remedy="give it more:",
            commands=(client_command(report.endpoint, f"CONFIG SET maxmemory {size}"),),
        )
