"""Corrects the model's result by measurements: one more node if a target is missed although the
model sees enough nodes, and no more prefill nodes if reads from the store are the bottleneck.

In: a course, the planner's view, the nodes. Out: the course, and a TargetMiss with the load per
node to remember. A miss counts only after all nodes have served for the whole window in which it
was measured, and only for a busy role: more nodes do not help requests that do not wait for a node.
"""

from __future__ import annotations

from baton_operator.autoscaling.planner.demand.need import Course, PlannerView
from baton_operator.autoscaling.planner.memory import TargetMiss
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Demand, Policy, Reason

BUSY = 0.5  # a prefill node must compute this share of its time; otherwise more nodes cannot help
SHARED = 2.0  # requests in a decode node's batch; a single request gains nothing from more nodes


def corrected(
    course: Course,
    view: PlannerView,
    fleet: RoleCounts,
    decode: RoleCounts,
    policy: Policy,
    at_s: float,
) -> tuple[Course, TargetMiss | None]:
    if view.demand is None or course.need is None or not course.need.reachable:
        return course, None
    text = _missed(course, view.demand, fleet, decode, policy)
    if text is None:
        return course, None
    miss = TargetMiss(at_s=at_s, role=course.role, load=load_of(course, view) / len(fleet.ready))
    if course.value > course.now:
        return course, miss
    return course.to(course.now + 1, Reason.TARGET_MISSED, text), miss


def load_of(course: Course, view: PlannerView) -> float:
    """The tokens per second that are the role's load."""
    if view.outlook is None:
        return 0.0
    rate = view.outlook.prompt if course.role == "prefill" else view.outlook.output
    return rate or 0.0


def _missed(
    course: Course, demand: Demand, fleet: RoleCounts, decode: RoleCounts, policy: Policy
) -> str | None:
    settled = all(node.since_s >= demand.window_s for node in fleet.ready)
    if fleet.coming or not fleet.ready or not settled:
        return None
    if course.role == "prefill":
        slow = demand.ttft_s is not None and demand.ttft_s > policy.ttft_s
        if slow and not _waits(decode) and _busy(fleet):
            return f"TTFT {demand.ttft_s:.2f} s exceeds {policy.ttft_s:g} s and the nodes are busy"
        return None
    running = fleet.total(lambda node: node.running)
    shared = running is not None and running >= SHARED * len(fleet.ready)
    if shared and demand.itl_s is not None and demand.itl_s > policy.itl_s:
        return f"ITL {1e3 * demand.itl_s:.0f} ms exceeds {1e3 * policy.itl_s:.0f} ms"
    if demand.ttft_s is not None and demand.ttft_s > policy.ttft_s and _waits(fleet):
        return f"TTFT {demand.ttft_s:.2f} s exceeds {policy.ttft_s:g} s and requests wait for KV"
    return None


def _busy(fleet: RoleCounts) -> bool:
    busy = fleet.total(lambda node: node.busy)
    return busy is not None and busy >= BUSY * len(fleet.ready)


def _waits(decode: RoleCounts) -> bool:
    """Whether at least one request per node waits for room."""
    waiting = decode.total(lambda node: node.waiting)
    return waiting is not None and bool(decode.ready) and waiting >= len(decode.ready)


def reading_bound(course: Course, view: PlannerView, policy: Policy) -> Course:
    """Do not grow prefill while reads from the store are at their limit: more nodes would only wait
    for the same reads."""
    if view.demand is None or view.capability is None or course.role != "prefill":
        return course
    read, most = view.demand.store_read_bytes, view.capability.store_read_limit
    if read is None or not most or read < (1.0 - policy.headroom) * most:
        return course
    bound = f"reads from the store are the bottleneck: {read / 1e9:.2f} of {most / 1e9:.2f} GB/s"
    return course.to(min(course.value, course.now), Reason.STORE_LIMITED, bound)
