"""Drives an engine with a constant number of requests: each that ends is replaced by the next.

In: an engine, requests, how many run at once, a clock. Out: when each was sent and got its tokens,
as `baton bench serve` records it. So the times are those of users who wait for no other's turn, at
the load of as many users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from baton_cli.bench.run import STEP_LIMIT
from baton_cli.bench.stream import RequestOutcome
from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import RequestId
from baton_protocol.request import Request


def drive_closed(
    engine: EngineCore, requests: Sequence[Request], at_once: int, clock: Callable[[], float]
) -> tuple[list[RequestOutcome], float]:
    """Return an outcome per request, and the seconds of the whole run."""
    began = clock()
    queue = deque(requests)
    outcomes: dict[RequestId, RequestOutcome] = {}
    times: dict[RequestId, list[float]] = {}
    running: set[RequestId] = set()

    def send() -> None:
        while queue and len(running) < at_once:
            request = queue.popleft()
            engine.submit(request)
            running.add(request.id)
            outcomes[request.id] = RequestOutcome(
                start=clock() - began,
                requested_tokens=request.params.max_tokens or 0,
                prompt_tokens=len(request.prompt_ids),
            )
            times[request.id] = []

    try:
        send()
        for _ in range(STEP_LIMIT):
            if not engine.has_work():
                break
            result = engine.step()
            if result.failed:
                raise result.failed[0].error
            now = clock() - began
            for token in result.tokens:
                times[token.request].append(now)
            running.difference_update(result.finished)
            send()
    finally:  # after an error, no request may keep running in the background
        for request in requests:
            engine.abort(request.id)
    for id, outcome in outcomes.items():
        _fill(outcome, times[id])
    return list(outcomes.values()), clock() - began


def _fill(outcome: RequestOutcome, times: Sequence[float]) -> None:
    outcome.output_tokens = len(times)
    if times:
        outcome.ttft = times[0] - outcome.start
        outcome.latency = times[-1] - outcome.start
        outcome.gaps = [after - before for before, after in pairwise(times)]
