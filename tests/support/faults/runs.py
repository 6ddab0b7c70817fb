"""Executes one row of the fault table on a cluster, and checks the answers.

In: a row, a healthy cluster, an undisturbed pool for comparison. Out: nothing, or an AssertionError
with the problem. The fault is triggered by a frame on a wire, a marker in the index or an event at
the client, never by a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from baton_kvstore.keys import marker_key
from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.ids import Fingerprint
from baton_protocol.link import (
    Deltas,
    FirstTokens,
    PrefillDone,
    PrefillJob,
    RunJob,
    ToNode,
    ToRouter,
)
from tests.support.clients.http import exchange
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.cases import PATH, SIZES, Case, Sizes, make_cases
from tests.support.faults.rows import KINDS, Kind, Row
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster, Node
from tests.support.stores.store_faults import which
from tests.support.wires.witness import Role, Trap

POLL_S = 0.002
SHORT_S = 1.0  # how long the short faults last
QUICK_S = 0.5  # half of the router's link_patience
LIMIT_S = 240.0
TRIES = 10  # to meet the row's moment
# A larger gap between two polls means that the machine itself may break links.
MAX_POLL_GAP_S = 0.2
UNTIL_MOVED = ("freeze", "freeze engine", "cut", "hold", "drain")


class MomentMissed(Exception):
    """The moment had passed before the fault; possible only for moments in the store."""


class FaultRun:
    """One execution of a row."""

    def __init__(self, cluster: Cluster, row: Row, cases: list[Case]) -> None:
        self._cluster = cluster
        self._row = row
        self._cases = cases
        self._target = cases[0]
        self._began = time.monotonic()
        self._longest_poll_s = 0.0
        self._injected_at = 0.0
        self._mended_at = 0.0
        self._problem: Exception | None = None
        self._drains: list[threading.Thread] = []
        self.hit_nodes: set[str] = set()  # names of nodes

    def run(self) -> None:
        """Send the requests, inject the fault, and check every answer. Raise MomentMissed or
        AssertionError."""
        self._cluster.witness.forget()
        self._set_trap()
        with ThreadPoolExecutor(len(self._cases)) as threads:
            answers = [threads.submit(self._ask, case) for case in self._cases]
            try:
                self._await_answers(answers)
            finally:
                self._mend()
        for case, answer in zip(self._cases, answers, strict=True):
            case.check(answer.result())
        if self._problem is not None:
            raise self._problem
        if not self._injected_at:
            raise MomentMissed(str(self._row))
        self._check_placements()

    # --- the moment -------------------------------------------------------------------------------

    def _set_trap(self) -> None:
        traps: dict[str, tuple[Callable[[ToNode | ToRouter], bool], bool]] = {
            "job sent": (self._is_job(PrefillJob), True),
            "parked": (self._is_job(RunJob), True),
            "first computed": (self._is_first(PrefillDone), False),
            "first sent": (self._is_first(FirstTokens), False),
            "mid-stream": (self._reaches(self._target.middle), True),
            "one left": (self._reaches(self._target.tokens - 1), True),
            "last lost": (self._reaches(self._target.tokens), False),
        }
        if self._row.when == "first seen" and self._target.kind == "whole":
            traps["first seen"] = (self._is_first(PrefillDone), True)
        if self._row.when in traps:
            fits, after = traps[self._row.when]
            trap = Trap(lambda seen: fits(seen.frame), self._inject, after)
            self._cluster.witness.set_trap(trap)

    def _is_job(self, kind: type[PrefillJob | RunJob]) -> Callable[[ToNode | ToRouter], bool]:
        prompt = tuple(self._target.prompt)
        return lambda frame: isinstance(frame, kind) and frame.request.prompt_ids == prompt

    def _is_first(
        self, kind: type[PrefillDone | FirstTokens]
    ) -> Callable[[ToNode | ToRouter], bool]:
        return lambda frame: isinstance(frame, kind) and frame.request == self._id()

    def _reaches(self, tokens: int) -> Callable[[ToNode | ToRouter], bool]:
        """A predicate for frames with the `tokens`-th id of choice 0."""

        def fits(frame: ToNode | ToRouter) -> bool:
            return isinstance(frame, Deltas) and any(
                delta.request == self._id()
                and delta.choice == 0
                and delta.offset + len(delta.ids) >= tokens
                for delta in frame.items
            )

        return fits

    def _id(self) -> str | None:
        return self._cluster.witness.request(self._target.prompt)

    def _ask(self, case: Case) -> StreamedAnswer:
        def on_event(answer: StreamedAnswer) -> bool:
            seen = answer.result.choices.get(0)
            if self._row.when == "first seen" and case is self._target and seen and seen.ids:
                self._inject()
            return True

        return ask(self._cluster.url, PATH, case.body, on_event, LIMIT_S)

    def _await_answers(self, answers: list[Future[StreamedAnswer]]) -> None:
        """Poll until all answers have arrived. Inject a fault whose moment is in the index, and end
        the fault in time."""
        deadline = time.monotonic() + LIMIT_S
        keys = self._marker_keys() if self._row.when == "half published" else []
        polled_at = time.monotonic()
        while not all(answer.done() for answer in answers):
            assert time.monotonic() < deadline, (
                f"{self._row}: requests still run after {LIMIT_S:g} s"
            )
            if keys and not self._injected_at:
                keys = self._watch_markers(keys)
            if self._injected_at and not self._mended_at and self._should_end(answers[0].done()):
                self._mend()
                polled_at = time.monotonic()
            time.sleep(POLL_S)
            polled_at, before = time.monotonic(), polled_at
            self._longest_poll_s = max(self._longest_poll_s, polled_at - before)

    def _marker_keys(self) -> list[bytes]:
        node = self._cluster.pool()["nodes"][0]
        fingerprint, layout = Fingerprint(node["fingerprint"]), node["layout"]
        blocks = extend_hashes(root_hash(fingerprint), self._target.prompt, layout["block_size"])
        return [
            marker_key(fingerprint, name) for name in chunk_hashes(blocks, layout["chunk_blocks"])
        ]

    def _watch_markers(self, keys: list[bytes]) -> list[bytes]:
        """Strike if some but not all markers exist. Return the keys to watch, none if all exist."""
        assert self._cluster.store is not None
        with self._cluster.store.client("index") as client:
            count = int(client.exists(*keys))
        if 0 < count < len(keys):
            self._inject()
        return keys if count < len(keys) else []

    # --- the fault --------------------------------------------------------------------------------

    def _inject(self) -> None:
        if self._injected_at:
            return
        self._injected_at = time.monotonic()
        try:
            self._hit()
        except Exception as error:  # this may be a thread that nobody joins
            self._problem = error

    def _hit(self) -> None:
        row, store = self._row, self._cluster.store
        if row.on_store:
            assert store is not None
            act = {"kill": store.kill, "freeze": store.freeze, "fill": store.fill}
            act.get(row.how, store.take_away)(which(row.what))
            return
        for node in self._nodes():
            self.hit_nodes.add(node.name)
            if row.how == "drain":
                self._begin_drain(node)
            else:
                _hit_node(node, row.how)

    def _begin_drain(self, node: Node) -> None:
        """Drain in another thread: the answer comes over the wires, and the caller may be their
        thread."""

        def drain() -> None:
            try:
                self._post_action(node.name, "drain", b'{"deadline_s": 0, "reason": "test"}')
            except Exception as error:  # in a thread of its own
                self._problem = error

        self._drains.append(threading.Thread(target=drain))
        self._drains[-1].start()

    def _post_action(self, node: str, action: str, body: bytes = b"") -> None:
        response = exchange(self._cluster.url, f"/nodes/{node}/{action}", body)
        assert response.status == 200, response.body

    def _nodes(self) -> list[Node]:
        if self._row.what == "all decode":
            return self._cluster.of_role("decode")
        role: Role = "prefill" if self._row.what == "prefill" else "decode"
        return [self._cluster.nodes[self._cluster.witness.where(self._target.prompt, role)]]

    def _should_end(self, answered: bool) -> bool:
        """Whether the fault should end now."""
        if self._row.how in ("blink", "stutter"):
            return time.monotonic() > self._injected_at + SHORT_S
        if self._row.how in UNTIL_MOVED and not self._row.on_store:
            placed = self._cluster.witness.placements(self._target.prompt)
            return answered or placed[-1].attempt > 1
        return answered

    def _mend(self) -> None:
        self._mended_at = self._mended_at or time.monotonic()
        for drain in self._drains:
            drain.join()
        for name in self.hit_nodes:
            self._cluster.nodes[name].mend()
            if self._row.how == "drain":
                self._post_action(name, "resume")
        if self._row.on_store and self._cluster.store is not None:
            self._cluster.store.mend()

    # --- the verdict ------------------------------------------------------------------------------

    def _check_placements(self) -> None:
        for case in self._cases:
            placed = self._cluster.witness.placements(case.prompt)
            first = {one.role: one.node for one in placed if one.attempt == 1}
            # The witness does not see a job that was sent into a cut wire.
            known = "decode" in first and ("prefill" in first or self._row.what != "prefill")
            nodes = set(first.values())
            if known and not self.hit_nodes & nodes and not self._was_slow(nodes):
                attempts = {one.attempt for one in placed}
                assert attempts == {1}, f"{case.kind} was not hit by the fault, but moved: {placed}"
        target = self._cluster.witness.placements(self._target.prompt)
        if self._row.loses_attempt and self._row.what != "prefill":
            assert target[-1].attempt > 1, f"the fault caused no new attempt: {target}"
        if self._should_stay():
            assert target[-1].attempt == 1, f"the fault was short, but the request moved: {target}"

    def _was_slow(self, nodes: set[str]) -> bool:
        """Whether this machine was so slow that requests may have moved or links of these nodes
        broke."""
        relinked = [self._cluster.witness.linked_again(node, self._began) for node in nodes]
        return self._longest_poll_s > MAX_POLL_GAP_S or any(at is not None for at in relinked)

    def _should_stay(self) -> bool:
        """Whether the fault was so short that the request must stay on its node: the link or the
        node was back well before any timeout."""
        if self._row.how in ("blink", "stutter"):
            return self._mended_at - self._injected_at < 1.5 * SHORT_S and not self._was_slow(set())
        if self._row.how != "blip":
            return False
        [node] = self.hit_nodes
        relinked_at = self._cluster.witness.linked_again(node, self._injected_at)
        return relinked_at is not None and relinked_at - self._injected_at < QUICK_S


def _hit_node(node: Node, how: str) -> None:
    acts = {
        "kill": node.kill,
        "kill engine": node.kill_engine,
        "freeze": node.freeze,
        "blink": node.freeze,
        "freeze engine": node.freeze_engine,
        "cut": node.wire.break_off,
        "blip": node.wire.blip,
        "hold": node.wire.hold,
        "stutter": node.wire.hold,
        "end": node.end,
    }
    acts[how]()


def run_row(
    cluster: Cluster,
    row: Row,
    undisturbed: Cluster,
    *,
    seed: str = "",
    sizes: Sizes = SIZES,
    kinds: Sequence[Kind] = KINDS,
) -> None:
    """Run a row with prompts drawn from `seed`; retry with other prompts if the moment was missed.
    Then repair the cluster, and wait until it holds no requests."""
    try:
        for number in range(TRIES):
            row_seed = f"{seed}/{row}/{number}"
            cases = make_cases(undisturbed.url, row.kind, row.when, row_seed, sizes, kinds)
            try:
                FaultRun(cluster, row, cases).run()
                break
            except MomentMissed:
                continue
        else:
            raise AssertionError(f"{row}: its moment was missed {TRIES} times")
    except AssertionError as error:
        error.add_note(cluster.logs() + undisturbed.logs())
        raise
    finally:
        cluster.repair()
    settle(cluster)
