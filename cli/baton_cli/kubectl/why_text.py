"""A pool's status in sentences: what keeps it from being ready, and what the planner decided.

In: an InferencePool as the API returns it. Out: lines. Conditions are explained by the operator's
own table; one of a newer operator, which the table lacks, has its message alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from baton_cli.errors import CommandError
from baton_cli.terminal.text import visible_line
from baton_operator.api.status import READY, Condition, PoolStatus
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_operator.status.condition_kinds import ConditionReason
from baton_operator.status.conditions import KINDS

NO_REMEDY = "nothing"
REASONS = {(kind.name, reason.name): reason for kind in KINDS for reason in kind.reasons}
PLANNER_REASONS = {reason.value: reason for reason in ScalingReason}


def why_lines(pool: dict[str, Any]) -> list[str]:
    """Raise CommandError if the status cannot be read."""
    try:
        status = msgspec.convert(pool.get("status") or {}, PoolStatus)
    except msgspec.ValidationError as error:
        raise CommandError(
            f"the pool's status cannot be read ({error}); use the plugin of the operator's version"
        ) from error
    return [visible_line(line) for line in _lines(pool["metadata"], status)]


def _lines(metadata: dict[str, Any], status: PoolStatus) -> Iterator[str]:
    name = f"pool {metadata['name']} in namespace {metadata['namespace']}"
    if not status.conditions:
        yield f"{name}: no operator has looked at it yet; check that Baton's operator runs"
        return
    ready = status.condition(READY)
    yield f"{name} {'is ready' if ready and ready.status == 'True' else 'is not ready'}"
    if status.observed_generation < metadata.get("generation", 0):
        yield "  the operator has not seen the newest spec yet"
    counts = (("prefill", status.prefill), ("decode", status.decode), ("router", status.router))
    yield "  ready pods: " + ", ".join(f"{role} {counted.summary}" for role, counted in counts)
    if status.model.name:
        progress = f", {status.model.progress}" if status.model.progress else ""
        yield f"  model: {status.model.name}{progress}"
    # Ready repeats the first of the others.
    parts = [item for item in status.conditions if item.type != READY]
    explained = {item.type: list(_problem(item)) for item in parts}
    for lines in explained.values():
        yield from lines
    fine = [name for name, lines in explained.items() if not lines]
    if fine:
        yield f"  nothing to do: {', '.join(fine)}"
    yield from _planner(status)
    if (operator := status.operator) is not None:
        other = f"; {operator.other} serves the namespace, too" if operator.other else ""
        yield f"  operator: {operator.name} looked at {operator.time}{other}"


def _problem(item: Condition) -> Iterator[str]:
    """The condition, what it means and what to do; nothing if nothing is to do."""
    known: ConditionReason | None = REASONS.get((item.type, item.reason))
    if known is None and item.status == "True":
        return
    if known is not None and known.remedy == NO_REMEDY:
        return
    kind = "waits" if known is not None and known.waits else "problem"
    yield f"  {kind}: {item.type} is {item.status} since {item.last_transition_time}: {item.reason}"
    yield f"    {item.message}"
    if known is not None:
        if known.meaning != item.message:
            yield f"    meaning: {known.meaning}"
        yield f"    what to do: {known.remedy}"


def _planner(status: PoolStatus) -> Iterator[str]:
    planned = status.autoscaling
    if planned is None:
        return
    effect = "" if planned.mode == "auto" else " (advice only: nothing is scaled)"
    yield (
        f"  planner{effect}: {planned.desired_prefill} prefill and {planned.desired_decode} decode"
        f" nodes since {planned.since}: {planned.reason}"
    )
    yield f"    {planned.message}"
    if (reason := PLANNER_REASONS.get(planned.reason)) is not None:
        yield f"    meaning: {reason.meaning}"
        if reason.remedy != NO_REMEDY:
            yield f"    what to do: {reason.remedy}"
