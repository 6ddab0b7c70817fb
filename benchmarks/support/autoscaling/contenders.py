"""Rivals at their best: the targets and the fixed splits that hindsight would have chosen.

Prompts do not wait for answers: how many requests attain the TTFT target depends on the prefill
nodes alone, and never falls with more of them; the same holds for decode nodes and the ITL target
once the prefill nodes are given. So each role is searched on its own.

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
GOOD = 0.99  # attainment that is enough
EQUAL = 0.001  # attainment that is the same


class Rival(Protocol):
    def __call__(self, targets: Mapping[Role, float], limits: tuple[int, int]) -> Scaler: ...


def in_hindsight(
    course: Course, rival: Rival, limits: tuple[int, int]
) -> tuple[Mapping[Role, float], Outcome]:
    """Per role the target that costs least where its part attains `GOOD`, else the best one."""
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
    """Of all with at most so many nodes per role: the fewest that attain what the most do."""
    goal = course.static({"prefill": most, "decode": most})
    prefill = _fewest(most, lambda n: _split(course, n, most).ttft >= goal.ttft - EQUAL / 2)
    decode = _fewest(most, lambda n: _split(course, prefill, n).both >= goal.both - EQUAL)
    return {"prefill": prefill, "decode": decode}, _split(course, prefill, decode)


def split_of(course: Course, nodes: int, most: int) -> tuple[Counts, Outcome]:
    """Of all with that many nodes in all: the one that attains most."""
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
    """By halving; the most are enough."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
