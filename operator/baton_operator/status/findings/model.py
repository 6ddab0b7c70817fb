"""Condition ModelReady, and the model in the status: its name and the progress of its download."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from baton_operator.api.status import ModelStatus
from baton_operator.api.times import is_fresh, stamp
from baton_operator.state.observed import ObservedPod
from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View
from baton_protocol.model_source import HubModel
from baton_protocol.store import ROLES, FetchReport

# A download's progress changes all the time, and each change costs a write of the status.
PROGRESS_EVERY_S = 5.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def model_finding(view: View) -> Finding:
    """The model of the nodes that are needed. In a roll-out new ones are not while old ones
    serve."""
    pods = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    if not _is_fetched(view, pods):
        return Finding(c.NOTHING_TO_FETCH)
    if view.suffices(*ROLES) and view.ready(*ROLES):
        return Finding(c.FETCHED)
    if view.is_at_zero:
        return Finding(c.ASLEEP)
    failing = [pod for pod in pods if pod.problem == c.MODEL_FETCH_FAILING.name]
    if failing:
        return Finding(c.MODEL_FETCH_FAILING, f"{failing[0].name}: {failing[0].message}")
    if _fetching_pods(view):
        return Finding(c.FETCHING, view.model.progress)
    return Finding(c.FETCHED if any(pod.fetch == "done" for pod in pods) else c.FETCH_NOT_BEGUN)


def _is_fetched(view: View, pods: list[ObservedPod]) -> bool:
    if view.pool is not None:
        return isinstance(view.pool.spec.model.source, HubModel)
    last = view.last_condition(c.MODEL_READY.name)
    held = last is not None and last.reason != c.NOTHING_TO_FETCH.name
    return held or any(pod.fetch for pod in pods)


def _fetching_pods(view: View) -> list[ObservedPod]:
    """Pods of the current revision whose init container runs the fetch."""
    pods = view.pods(*ROLES)
    return [pod for pod in pods if pod.fetch == "running" and view.is_current(pod)]


def model_status(view: View) -> ModelStatus:
    progress, since = _progress(view)
    return ModelStatus(name=_name(view), progress=progress, progress_time=since)


def _name(view: View) -> str:
    """The spec's model name. While the spec is not applied, the nodes' name, else the last one."""
    if view.pool is not None and not view.pool.spec.paused:
        return view.pool.spec.model_name
    models = sorted({report.model for report in view.reports()})
    last = view.before.model.name
    return models[0] if models and last not in models else last


def _progress(view: View) -> tuple[str, str | UnsetType]:
    names = {pod.name for pod in _fetching_pods(view)}
    none: tuple[str, str | UnsetType] = ("", UNSET)
    # Older versions of the operator wrote "" for no time.
    last = view.before.model.progress, view.before.model.progress_time or UNSET
    if not names:
        return none
    if view.observed.fetches is None or is_fresh(last[1] or "", view.now, PROGRESS_EVERY_S):
        return last
    reports = [report for report in view.observed.fetches if report.node in names]
    if not reports:
        return none
    text = progress_words(min(reports, key=_share))
    return last if text == last[0] else (text, stamp(view.now))


def _share(report: FetchReport) -> float:
    """The fetched share; 0 while the total size is unknown."""
    return report.done_bytes / report.total_bytes if report.total_bytes else 0.0


def progress_words(report: FetchReport) -> str:
    """For example "3.1 of 16.4 GiB (19 %)". Never 100 % before the last byte."""
    size, unit = next((pair for pair in _UNITS if report.total_bytes >= pair[0]), _UNITS[-1])
    done = f"{report.done_bytes / size:.1f}"
    if not report.total_bytes and not report.done_bytes:
        return "the hub has not answered yet"
    if not report.total_bytes:
        return f"{report.done_bytes / _UNITS[1][0]:.1f} MiB so far"
    percent = report.done_bytes * 100 // report.total_bytes
    return f"{done} of {report.total_bytes / size:.1f} {unit} ({percent} %)"
