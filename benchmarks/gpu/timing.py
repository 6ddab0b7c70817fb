"""Times work on the device, as the parts of `make gpu` do.

In: a function that launches work. Out: seconds per call. On a card calls are recorded in a CUDA
graph, as the engine's decode steps are: a launch from Python takes longer than most kernels. On a
CPU, in a dry run, a call is timed by the clock, which says that the code runs and nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

# A graph's work takes at least this long, so that its launch does not count.
GRAPH_S = 1e-3
MOST_CALLS = 50
REPLAYS = 7

Work = Callable[[], object]


def seconds_per_call(work: Work, device: torch.device) -> float:
    """The median over replays of a graph with several calls. Work that waits for the device cannot
    be recorded; it is timed eagerly, with its launches."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    eager_seconds(work)  # compiles kernels, loads libraries
    once = eager_seconds(work)
    calls = max(1, min(MOST_CALLS, int(GRAPH_S / max(once, 1e-6))))
    replay = recorded(work, calls)
    if replay is None:
        return statistics.median(eager_seconds(work) for _ in range(REPLAYS))
    return statistics.median(eager_seconds(replay) for _ in range(REPLAYS)) / calls


def recorded(work: Work, calls: int) -> Work | None:
    """A function that replays this number of calls; None if the work cannot be recorded."""
    with suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        graph.replay()
        return graph.replay
    torch.cuda.synchronize()
    return None


def eager_seconds(work: Work) -> float:
    """The device's time of one call, between two events."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
