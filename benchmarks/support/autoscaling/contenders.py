"""Tunes the rivals in hindsight: their best targets, and the best fixed splits of nodes.

The number of requests that attain the TTFT target depends on the prefill nodes alone, because
prompts do not wait for answers, and it never falls with more of these nodes. Given the prefill
nodes, the same holds for decode nodes and the ITL target. Each role is therefore searched
separately.

In: a course. Out: the choice, and its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from baton_protocol.store import Role
from benchmarks.support.autoscaling.closed_loop import Course, Outcome
from benchmarks.support.autoscaling.reference_autoscalers import Counts, Scaler

# Requests per node. The batch that just holds 50 ms between tokens is about 70 chat requests; the
# usual pair is the one of the grid that did best on the day curve.
USUAL: Mapping[Role, float] = {"prefill": 1.0, "decode": 30.0}
GRID: tuple[tuple[float, float], ...] = ((0.75, 20.0), (1.0, 30.0), (1.5, 40.0), (2.0, 50.0))
GOOD = 0.99  # sufficient attainment
EQUAL = 0.001  # attainments within this difference count as equal


class Rival(Protocol):
    def __call__(self, targets: Mapping[Role, float], limits: tuple[int, int]) -> Scaler: ...


def in_hindsight(
    course: Course, rival: Rival, limits: tuple[int, int]
) -> tuple[Mapping[Role, float], Outcome]:
    """Choose for each role the cheapest target whose attainment reaches `GOOD`; if none does, the
    one with the highest attainment."""
    found = []
    for prefill, decode in GRID:
        targets: Mapping[Role, float] = {"prefill": prefill, "decode": decode}
        found.append((targets, course.run(rival(targets, limits))))

    def best(role: Role, part: Callable[[Outcome], float]) -> float:
        enough = [pair for pair in found if part(pair[1]) >= GOOD]
        if enough:
            return min(enough, key=lambda pair: pair[1].by_role[role])[0][role]
        return max(found, key=lambda pair: part(pair[1]))[0][role]

    chosen: Mapping[Role, float] = {
        "prefill": best("prefill", lambda one: one.ttft),
        "decode": best("decode", lambda one: one.itl),
    }
    known = [outcome for targets, outcome in found if targets == chosen]
    return chosen, known[0] if known else course.run(rival(chosen, limits))


def best_split(course: Course, most: int) -> tuple[Counts, Outcome]:
    """The smallest split that attains as much as `most` nodes of each role."""
    goal = course.static({"prefill": most, "decode": most})
    prefill = _fewest(most, lambda n: _split(course, n, most).ttft >= goal.ttft - EQUAL / 2)
    decode = _fewest(most, lambda n: _split(course, prefill, n).both >= goal.both - EQUAL)
    return {"prefill": prefill, "decode": decode}, _split(course, prefill, decode)


def split_of(course: Course, nodes: int, most: int) -> tuple[Counts, Outcome]:
    """The split of `nodes` nodes, at most `most` per role, with the highest attainment."""
    least = max(1, nodes - most)
    found = {
        prefill: _split(course, prefill, nodes - prefill)
        for prefill in range(least, min(most, nodes - 1) + 1)
    }
    best = max(found, key=lambda prefill: found[prefill].both)
    return {"prefill": best, "decode": nodes - best}, found[best]


def _split(course: Course, prefill: int, decode: int) -> Outcome:
    return course.static({"prefill": prefill, "decode": decode})


def _fewest(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest sufficient count, by binary search; `most` must be sufficient."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
