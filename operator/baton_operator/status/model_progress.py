"""How the model gets to the nodes, in words: whose status and conditions speak of it.

In: pods and fetch reports. Out: `model_status`. A download moves all the time, and each word of it
costs a write: its progress is said anew every 5 s at most.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from baton_operator.api.status import ModelStatus
from baton_operator.state.observed import ObservedPod
from baton_operator.status.view import View
from baton_operator.timestamps import is_fresh, stamp
from baton_protocol.store import ROLES, FetchReport

SAY_EVERY_S = 5.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def fetching_pods(view: View) -> list[ObservedPod]:
    """Those of the current revision whose init container is at it."""
    pods = view.pods(*ROLES)
    return [pod for pod in pods if pod.fetch == "running" and view.is_current(pod)]


def model_status(view: View) -> ModelStatus:
    progress, since = _progress(view)
    return ModelStatus(name=_name(view), progress=progress, progress_time=since)


def _name(view: View) -> str:
    """What the spec says; while nothing is made from it what the nodes say, else what was said
    last."""
    if view.pool is not None and not view.pool.spec.paused:
        return view.pool.spec.model_name
    said = sorted({report.model for report in view.reports()})
    held = view.before.model.name
    return said[0] if said and held not in said else held


def _progress(view: View) -> tuple[str, str | UnsetType]:
    names = {pod.name for pod in fetching_pods(view)}
    none: tuple[str, str | UnsetType] = ("", UNSET)
    # An operator of an older version wrote "" for no time.
    held = view.before.model.progress, view.before.model.progress_time or UNSET
    if not names:
        return none
    if view.observed.fetches is None or is_fresh(held[1] or "", view.now, SAY_EVERY_S):
        return held
    reports = [report for report in view.observed.fetches if report.node in names]
    if not reports:
        return none
    words = progress_words(min(reports, key=_share))
    return held if words == held[0] else (words, stamp(view.now))


def _share(report: FetchReport) -> float:
    """0 while nobody knows how much it is."""
    return report.done_bytes / report.total_bytes if report.total_bytes else 0.0


def progress_words(report: FetchReport) -> str:
    """3.1 of 16.4 GiB (19 %). Never 100 % before the last byte."""
    size, unit = next((pair for pair in _UNITS if report.total_bytes >= pair[0]), _UNITS[-1])
    done = f"{report.done_bytes / size:.1f}"
    if not report.total_bytes:
        return f"{report.done_bytes / _UNITS[1][0]:.1f} MiB so far"
    percent = report.done_bytes * 100 // report.total_bytes
    return f"{done} of {report.total_bytes / size:.1f} {unit} ({percent} %)"
