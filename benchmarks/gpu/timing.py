"""Times work on the device, as the parts of `make gpu` do.

In: a function that launches work and does not wait for it. Out: seconds per call. On a card calls
are recorded in a CUDA graph, as the engine's decode steps are: a launch from Python takes longer
than most kernels. On a CPU, in a dry run, a call is timed by the clock, which says that the code
runs and nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# A graph's work takes at least this long, so that its launch does not count.
GRAPH_S = 1e-3
MOST_CALLS = 50
REPLAYS = 7

Work = Callable[[], object]


def seconds_per_call(work: Work, device: torch.device) -> float:
    """The median over replays of a graph with several calls. Data may stay in the card's cache from
    one call to the next."""
    if device.type == "cpu":
        return clock_seconds(work)
    calls = _calls([work])
    return _replayed([work], calls) / calls


def cold_seconds_per_call(work: Work, device: torch.device) -> float:
    """The same, with data that is not in the card's cache: before each call other memory is read,
    whose time is measured alone and subtracted."""
    if device.type == "cpu":
        return clock_seconds(work)
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    other, total = torch.zeros(size // 4, device=device), torch.zeros((), device=device)

    def read() -> None:
        torch.sum(other, dim=0, out=total)

    calls = _calls([read, work])
    return max(_replayed([read, work], calls) - _replayed([read], calls), 0.0) / calls


def eager_median(work: Work, device: torch.device) -> float:
    """The median of calls that are not recorded: of work that waits for the device, or that takes
    so long that its launches do not count."""
    if device.type == "cpu":
        return clock_seconds(work)
    eager_seconds(work)
    return statistics.median(eager_seconds(work) for _ in range(REPLAYS))


def clock_seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def eager_seconds(work: Work) -> float:
    """The device's time of one call, between two events."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _calls(works: Sequence[Work]) -> int:
    """How many calls make a graph long enough. The first call compiles kernels."""
    once = [[eager_seconds(work) for work in works] for _ in range(2)][1]
    return max(1, min(MOST_CALLS, int(GRAPH_S / max(*once, 1e-6))))


def _replayed(works: Sequence[Work], calls: int) -> float:
    """Seconds of a graph in which all work is called in turn, `calls` times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            for work in works:
                work()
    graph.replay()
    return statistics.median(eager_seconds(graph.replay) for _ in range(REPLAYS))
