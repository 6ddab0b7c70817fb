"""Drains a cluster's nodes over the router's HTTP API, as a user does, and observes the effects:
retried placements, and the answers of streams that were running."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.clients.http import Json, exchange, text_of
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.cases import PATH, Case, Sizes, make_cases
from tests.support.faults.rows import KINDS, Kind
from tests.support.pools.processes import Cluster

DECODING_IDS = 4  # a stream with this many ids is decoding
PATIENCE_S = 240.0
_RETRIES = re.compile(r'^baton_router_retries_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)


def post_action(pool: Cluster, node: str, action: str, **body: Any) -> Json:
    """Send `action` (drain or resume) for a node; return the router's response, which must be
    200."""
    response = exchange(pool.url, f"/nodes/{node}/{action}", body)
    assert response.status == 200, response.body
    return response.body


def node_entry(pool: Cluster, name: str) -> Json:
    """The node's entry in /pool."""
    node: Json = next(node for node in pool.pool()["nodes"] if node["id"] == name)
    return node


def is_drained(pool: Cluster, name: str) -> bool:
    """Whether a node is draining and has no requests left."""
    node = node_entry(pool, name)
    kinds = ("requests", "running", "waiting", "parked")
    return node["state"] == "draining" and not any(node["load"][kind] for kind in kinds)


class Retries:
    """Counts the router's retries by cause since this object was made."""

    def __init__(self, pool: Cluster) -> None:
        self._pool = pool
        self._before = self._now()

    def of(self, cause: str) -> int:
        return self._now().get(cause, 0) - self._before.get(cause, 0)

    def _now(self) -> dict[str, int]:
        page = text_of(self._pool.url, "/metrics")
        return {cause: int(float(count)) for cause, count in _RETRIES.findall(page)}


class RunningRequests:
    """One concurrent request of each kind. The constructor returns when all streams decode."""

    def __init__(
        self,
        pool: Cluster,
        undisturbed: Cluster,
        seed: str,
        sizes: Sizes,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self.pool = pool
        self.cases = make_cases(undisturbed.url, "greedy", "mid-stream", seed, sizes, kinds)
        self._threads = ThreadPoolExecutor(len(self.cases))
        self._decoding = {
            case.kind: threading.Event() for case in self.cases if case.body["stream"]
        }
        self.retries = Retries(pool)
        self._answers = [self._threads.submit(self._ask, case) for case in self.cases]
        for kind, decoding in self._decoding.items():
            assert decoding.wait(PATIENCE_S), f"the {kind} request does not decode"
        placements = self.pool.witness.placements
        self.pool.wait(
            lambda: all(placements(case.prompt) for case in self.cases), "place them all"
        )

    def answers(self) -> list[tuple[Case, StreamedAnswer]]:
        """Wait for the end of all requests, and return their answers."""
        answers = [each.result(PATIENCE_S) for each in self._answers]
        self._threads.shutdown()
        return list(zip(self.cases, answers, strict=True))

    def check(self) -> None:
        """Raise AssertionError unless every answer equals the undisturbed one."""
        for case, answer in self.answers():
            case.check(answer)

    @property
    def running(self) -> int:
        return sum(not answer.done() for answer in self._answers)

    def moved(self) -> list[Case]:
        return [case for case in self.cases if self.attempts(case) > 1]

    def decode_nodes(self, case: Case) -> list[str]:
        """The nodes that got the case's decode jobs, in order."""
        placements = self.pool.witness.placements(case.prompt)
        return [each.node for each in placements if each.role == "decode"]

    def attempts(self, case: Case) -> int:
        return self.pool.witness.placements(case.prompt)[-1].attempt

    def _ask(self, case: Case) -> StreamedAnswer:
        def on_event(answer: StreamedAnswer) -> bool:
            seen = answer.result.choices.get(0)
            if seen is not None and len(seen.ids) >= DECODING_IDS:
                self._decoding[case.kind].set()
            return True

        return ask(self.pool.url, PATH, case.body, on_event)
