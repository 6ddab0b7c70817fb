"""When a pool's index is to be read next. Pure.

In: the pool, what was observed of it, the last read. Out: for how long an answer is fresh, and the
backoff while the index is silent.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.status import READY, PoolStatus
from baton_operator.state.observed import Observed
from baton_operator.state.store_check import StoreProblem
from baton_protocol.store import ROLES

# Seconds for which an answer is fresh: while nodes drain, while the pool sleeps (a request may
# wait), for a pool with autoscaling, during a fetch, for a pool that is not ready, for others.
DRAINING_S = 2.0
ASLEEP_S = 2.0
LOOK_S = 5.0
FETCHING_S = 5.0
UNSETTLED_S = 15.0
# The first report of a node that has just become ready: its fingerprint is in the status at once.
UNREPORTED_S = 2.0
STEADY_S = 60.0
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 300.0


class LastQuery(msgspec.Struct, frozen=True):
    """When a pool's index was last read, and how many reads in a row failed. `refused`: why the
    operator may not connect to it. `urls`: those of the store. `problem`: of an external store."""

    at: float
    failures: int = 0
    refused: str = ""
    urls: tuple[str, ...] = ()
    problem: StoreProblem | None = None


def pause_s(pool: Pool, observed: Observed, status: PoolStatus | None) -> float | None:
    """Seconds for which an answer is fresh; None while there is no index to read."""
    managed = pool.spec.kv_store.external is None
    index = [pod for pod in observed.pods if pod.component == "kv-index" and pod.ready]
    nodes = [pod for pod in observed.pods if pod.component in ROLES]
    planned = planned_pause_s(pool)
    if (managed and not index) or not (nodes or planned):
        return None
    if observed.drains:
        return (planned or UNSETTLED_S) if observed.held else DRAINING_S
    if planned:
        return planned
    if any(pod.fetch == "running" for pod in nodes):
        return FETCHING_S
    ready = status.condition(READY) if status is not None else None
    settled = ready is not None and ready.status == "True"
    if status is None or not settled:
        return UNSETTLED_S
    if status.fingerprint and status.exact:
        return STEADY_S
    # In a roll-out the nodes of the new revision may load their model for long.
    reports = any(pod.ready and pod.revision == status.revision for pod in nodes)
    return UNREPORTED_S if reports else UNSETTLED_S


def planned_pause_s(pool: Pool) -> float:
    """The interval for a pool with autoscaling; 0 for other pools."""
    if pool.spec.autoscaling is None or not pool.spec.autoscaling.is_planned:
        return 0.0
    return LOOK_S if pool.spec.prefill.replicas + pool.spec.decode.replicas else ASLEEP_S


def next_read_at(pause: float, last: LastQuery | None, longest_s: float = LONGEST_RETRY_S) -> float:
    """The time of the next read: after a failure at most `longest_s` later."""
    if last is None:
        return 0.0
    if not last.failures:
        return last.at + pause
    # The exponent is capped: 2 ** 10 already exceeds the longest delay.
    retry = FIRST_RETRY_S * 2.0 ** min(last.failures - 1, 10)
    return last.at + min(longest_s, retry)
