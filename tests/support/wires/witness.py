"""Records the frames on a cluster's wires: which node got which attempt of a request, and when.

In: frames from the wires. Out: the placements of a request, found by its prompt. It also holds the
first frame that matches a trap, until the trap's action is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton_protocol.ids import RequestId
from baton_protocol.link import Hello, PrefillJob, RunJob
from tests.support.wires.wire import Passing

Role = Literal["prefill", "decode"]


class Placed(NamedTuple):
    at: float
    attempt: int
    role: Role  # the job's, not the node's: a prefill node may run whole requests
    node: str
    tokens: int = 0  # that choice 0 has already


@dataclass(frozen=True)
class Trap:
    """Triggered by the first frame for which `fits` is true. `act` is called while this frame waits
    or, with `after`, once it has been forwarded."""

    fits: Callable[[Passing], bool]
    act: Callable[[], None]
    after: bool = False


class Witness:
    """The recorder. The wires' thread calls `saw`; any thread may call the other methods."""

    def __init__(self) -> None:
        self._requests: dict[tuple[int, ...], RequestId] = {}
        self._placed: dict[RequestId, list[Placed]] = {}
        self._seeds: dict[RequestId, int | None] = {}
        self._traps: list[Trap] = []
        self._hellos: list[tuple[float, str]] = []

    def set_trap(self, trap: Trap) -> None:
        self._traps.append(trap)

    def forget(self) -> None:
        """Remove all traps and records."""
        self._traps.clear()
        self._requests.clear()
        self._placed.clear()
        self._seeds.clear()
        self._hellos.clear()

    def saw(self, passing: Passing) -> Callable[[], None] | None:
        frame = passing.frame
        if isinstance(frame, PrefillJob | RunJob):
            self._record(passing.node, frame)
        elif isinstance(frame, Hello):
            self._hellos.append((time.monotonic(), passing.node))
        for trap in list(self._traps):
            if trap.fits(passing):
                self._traps.remove(trap)
                if trap.after:
                    return trap.act
                trap.act()
        return None

    def request(self, prompt: Sequence[int]) -> RequestId | None:
        """The id of the request with this prompt, None before it was sent to a node."""
        return self._requests.get(tuple(prompt))

    def placements(self, prompt: Sequence[int]) -> list[Placed]:
        """All jobs of the request with this prompt, in the order in which they were sent."""
        request = self.request(prompt)
        return [] if request is None else list(self._placed[request])

    def seed(self, prompt: Sequence[int]) -> int | None:
        """The seed of the request with this prompt: the router's if the client gave none."""
        request = self.request(prompt)
        assert request is not None, "this prompt was not sent to a node"
        return self._seeds[request]

    def of(self, request: RequestId) -> list[Placed]:
        return list(self._placed.get(request, ()))

    def where(self, prompt: Sequence[int], role: Role) -> str:
        """The node to which this role's job of the request was last sent."""
        nodes = [placed.node for placed in self.placements(prompt) if placed.role == role]
        assert nodes, f"no {role} job of the request was seen: {self.placements(prompt)}"
        return nodes[-1]

    def linked_again(self, node: str, since: float) -> float | None:
        """The time of the node's first hello after `since`, None if there was none."""
        return next((at for at, name in self._hellos if name == node and at > since), None)

    def _record(self, node: str, job: PrefillJob | RunJob) -> None:
        request = job.request
        role: Role = "prefill" if isinstance(job, PrefillJob) else "decode"
        self._placed.setdefault(request.id, []).append(
            Placed(time.monotonic(), request.attempt, role, node, len(request.outputs[0]))
        )
        self._requests[request.prompt_ids] = request.id
        self._seeds[request.id] = request.params.seed
