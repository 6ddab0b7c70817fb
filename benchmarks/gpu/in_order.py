"""The measurements of a part, one after the other: what fails, or finds no time, costs only itself.

In: names, the seconds that each may take on a card, and what to do. Out: findings. Goals are
findings whose share is 1.0 or more if they are reached.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Findings

GOAL = "goal: "
# A task hangs if it takes HANGS times what it needs, and HANGS_S seconds more.
HANGS, HANGS_S = 3, 20


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement or check. `seconds` is what it needs on a card, start of engines included.
    A `group` has tasks of its own: if the process dies of one of these, the next process begins the
    group once more, for the rest of them."""

    name: str
    seconds: float
    act: Callable[[], None]
    group: bool = False


def run_in_order(findings: Findings, tasks: Sequence[Task]) -> None:
    """Run each task that no earlier process of this part has begun and for which there is time. On
    a card, a task that hangs or raises ends the process, because an error of the device stays with
    it; the next process goes on behind the task. A failed comparison does not."""
    for task in tasks:
        if not findings.dry and findings.seconds_left < task.seconds:
            left = f"{findings.seconds_left:.0f} s are left, it takes {task.seconds:.0f}"
            findings.noted(task.name, f"not measured: {left}")
        elif findings.first_try(task.name) or (
            task.group and findings.first_try(f"{task.name}, again")
        ):
            began = time.monotonic()
            _run(findings, task)
            free_memory()
            print(f"{task.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _run(findings: Findings, task: Task) -> None:
    raised = False
    if not findings.dry and not task.group:
        faulthandler.dump_traceback_later(task.seconds * HANGS + HANGS_S, exit=True)
    with findings.attempt(task.name):
        try:
            task.act()
        except Exception as error:
            traceback.print_exc()  # the findings have one line of it
            raised = not isinstance(error, AssertionError)
            raise
    if not task.group:
        faulthandler.cancel_dump_traceback_later()
    if raised and findings.device.type == "cuda":
        sys.exit(f"{task.name} failed: go on in another process")


def free_memory() -> None:
    """Give memory of engines that nobody refers to back to the device: the next engine asks the
    device, not torch, how much is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reach(findings: Findings, name: str, value: float, unit: str, goal: float) -> None:
    """A figure that should be `goal` at least."""
    findings.measured(name, value, unit, share=value / goal, of=f"{GOAL}at least {goal:g} {unit}")


def stay_below(findings: Findings, name: str, value: float, unit: str, goal: float) -> None:
    """A figure that should be `goal` at most."""
    share = goal / value if value > 0 else 1.0
    findings.measured(name, value, unit, share=share, of=f"{GOAL}at most {goal:g} {unit}")
