"""What was measured says something else than the model: a target that is missed although the model
sees enough nodes, a store that cannot be read any faster.

In: a course, the look, the nodes. Out: the course, and a miss to remember: how much load a node had
then. A miss counts only once all nodes have served for the whole window it was measured in, and
only for the role that is busy: more nodes help nobody who does not wait for one.
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
    look: PlannerView,
    fleet: RoleCounts,
    decode: RoleCounts,
    policy: Policy,
    at_s: float,
) -> tuple[Course, TargetMiss | None]:
    if look.demand is None or course.need is None or not course.need.reachable:
        return course, None
    text = _missed(course, look.demand, fleet, decode, policy)
    if text is None:
        return course, None
    miss = TargetMiss(at_s=at_s, role=course.role, load=load_of(course, look) / len(fleet.ready))
    if course.value > course.now:
        return course, miss
    return course.to(course.now + 1, Reason.TARGET_MISSED, text), miss


def load_of(course: Course, look: PlannerView) -> float:
    """The tokens per second that are the role's load."""
    if look.view is None:
        return 0.0
    rate = look.view.prompt if course.role == "prefill" else look.view.output
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


def reading_bound(course: Course, look: PlannerView, policy: Policy) -> Course:
    """Prompts wait for their KV from the store, and more prefill nodes would wait with them."""
    if look.demand is None or look.capability is None or course.role != "prefill":
        return course
    read, most = look.demand.store_read_bytes, look.capability.store_read_limit
    if read is None or not most or read < (1.0 - policy.headroom) * most:
        return course
    bound = f"reads from the store are the bottleneck: {read / 1e9:.2f} of {most / 1e9:.2f} GB/s"
    return course.to(min(course.value, course.now), Reason.STORE_LIMITED, bound)
