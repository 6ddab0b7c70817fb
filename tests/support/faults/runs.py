"""Executes one row of the fault table on a cluster, and checks the answers.

In: a row, a healthy cluster, a calm pool for comparison. Out: nothing, or an AssertionError with
the problem. The fault is triggered by a frame on a wire, a marker in the index or an event at the
client, never by a time.
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
SHORT_S = 1.0
QUICK_S = 0.5  # half of the router's link_patience
LIMIT_S = 240.0
TURNS = 10  # tries to meet the row's moment
CALM_S = 0.2  # a larger gap between two polls means that the machine itself may break links
AGAIN = ("freeze", "freeze engine", "cut", "hold", "drain")


class Missed(Exception):
    """The moment had passed before the fault; possible only for moments in the store."""


class FaultRun:
    """One execution of a row."""

    def __init__(self, cluster: Cluster, row: Row, cases: list[Case]) -> None:
        self._cluster = cluster
        self._row = row
        self._cases = cases
        self._target = cases[0]
        self._began = time.monotonic()
        self._longest_look_s = 0.0
        self._struck_at = 0.0
        self._mended_at = 0.0
        self._problem: Exception | None = None
        self._drains: list[threading.Thread] = []
        self.struck: set[str] = set()  # names of nodes

    def run(self) -> None:
        """Send the requests, inject the fault, and check every answer. Raise Missed or
        AssertionError."""
        self._cluster.witness.forget()
        self._set_trap()
        with ThreadPoolExecutor(len(self._cases)) as threads:
            asked = [threads.submit(self._ask, case) for case in self._cases]
            try:
                self._attend(asked)
            finally:
                self._mend()
        for case, answer in zip(self._cases, asked, strict=True):
            case.check(answer.result())
        if self._problem is not None:
            raise self._problem
        if not self._struck_at:
            raise Missed(str(self._row))
        self._check_placements()

    # --- the moment -------------------------------------------------------------------------------

    def _set_trap(self) -> None:
        traps: dict[str, tuple[Callable[[ToNode | ToRouter], bool], bool]] = {
            "job sent": (self._is_job(PrefillJob), True),
            "parked": (self._is_job(RunJob), True),
            "first computed": (self._is_first(PrefillDone), False),
            "first told": (self._is_first(FirstTokens), False),
            "mid-stream": (self._reaches(self._target.middle), True),
            "one left": (self._reaches(self._target.tokens - 1), True),
            "last lost": (self._reaches(self._target.tokens), False),
        }
        if self._row.when == "first seen" and self._target.kind == "whole":
            traps["first seen"] = (self._is_first(PrefillDone), True)
        if self._row.when in traps:
            fits, after = traps[self._row.when]
            trap = Trap(lambda seen: fits(seen.frame), self._strike, after)
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
        def heard(told: StreamedAnswer) -> bool:
            seen = told.result.choices.get(0)
            if self._row.when == "first seen" and case is self._target and seen and seen.ids:
                self._strike()
            return True

        return ask(self._cluster.url, PATH, case.body, heard, LIMIT_S)

    def _attend(self, asked: list[Future[StreamedAnswer]]) -> None:
        """Poll until all answers are there: strike at a moment in the index, and end the fault in
        time."""
        until = time.monotonic() + LIMIT_S
        keys = self._marker_keys() if self._row.when == "half published" else []
        looked_at = time.monotonic()
        while not all(answer.done() for answer in asked):
            assert time.monotonic() < until, f"{self._row}: no end after {LIMIT_S:g} s"
            if keys and not self._struck_at:
                keys = self._watch_markers(keys)
            if self._struck_at and not self._mended_at and self._is_over(asked[0].done()):
                self._mend()
                looked_at = time.monotonic()
            time.sleep(POLL_S)
            looked_at, before = time.monotonic(), looked_at
            self._longest_look_s = max(self._longest_look_s, looked_at - before)

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
            found = int(client.exists(*keys))
        if 0 < found < len(keys):
            self._strike()
        return keys if found < len(keys) else []

    # --- the fault --------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self._struck_at:
            return
        self._struck_at = time.monotonic()
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
            self.struck.add(node.name)
            if row.how == "drain":
                self._begin_drain(node)
            else:
                _hit_node(node, row.how)

    def _begin_drain(self, node: Node) -> None:
        """Drain in another thread: the answer comes over the wires, and the caller may be their
        thread."""

        def drain() -> None:
            try:
                self._tell(node.name, "drain", b'{"deadline_s": 0, "reason": "test"}')
            except Exception as error:  # in a thread of its own
                self._problem = error

        self._drains.append(threading.Thread(target=drain))
        self._drains[-1].start()

    def _tell(self, node: str, act: str, body: bytes = b"") -> None:
        answer = exchange(self._cluster.url, f"/nodes/{node}/{act}", body)
        assert answer.status == 200, answer.body

    def _nodes(self) -> list[Node]:
        if self._row.what == "all decode":
            return self._cluster.of_role("decode")
        role: Role = "prefill" if self._row.what == "prefill" else "decode"
        return [self._cluster.nodes[self._cluster.witness.where(self._target.prompt, role)]]

    def _is_over(self, answered: bool) -> bool:
        """Whether the fault should end now."""
        if self._row.how in ("blink", "stutter"):
            return time.monotonic() > self._struck_at + SHORT_S
        if self._row.how in AGAIN and not self._row.on_store:
            placed = self._cluster.witness.placements(self._target.prompt)
            return answered or placed[-1].attempt > 1
        return answered

    def _mend(self) -> None:
        self._mended_at = self._mended_at or time.monotonic()
        for drain in self._drains:
            drain.join()
        for name in self.struck:
            self._cluster.nodes[name].mend()
            if self._row.how == "drain":
                self._tell(name, "resume")
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
            if known and not self.struck & nodes and not self._was_slow(nodes):
                attempts = {one.attempt for one in placed}
                assert attempts == {1}, f"{case.kind} had no part in the fault, but: {placed}"
        target = self._cluster.witness.placements(self._target.prompt)
        if self._row.loses_attempt and self._row.what != "prefill":
            assert target[-1].attempt > 1, f"the fault changed nothing: {target}"
        if self._should_go_on():
            assert target[-1].attempt == 1, f"it was short, and yet: {target}"

    def _was_slow(self, nodes: set[str]) -> bool:
        """Whether this machine was so slow that requests may have moved or links of these nodes
        broke."""
        again = [self._cluster.witness.linked_again(node, self._began) for node in nodes]
        return self._longest_look_s > CALM_S or any(at is not None for at in again)

    def _should_go_on(self) -> bool:
        """Whether the fault was so short that the request must stay on its node: the link or the
        node was back well before any timeout."""
        if self._row.how in ("blink", "stutter"):
            return self._mended_at - self._struck_at < 1.5 * SHORT_S and not self._was_slow(set())
        if self._row.how != "blip":
            return False
        [node] = self.struck
        again = self._cluster.witness.linked_again(node, self._struck_at)
        return again is not None and again - self._struck_at < QUICK_S


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
    calm: Cluster,
    *,
    seed: str = "",
    sizes: Sizes = SIZES,
    kinds: Sequence[Kind] = KINDS,
    judge: Callable[[Case], Case] = lambda case: case,
) -> None:
    """Run a row with prompts drawn from `seed`; retry with other prompts if the moment was missed.
    Then repair the cluster, and wait until it holds no requests. `judge` may replace a case by one
    with a different check."""
    try:
        for turn in range(TURNS):
            seeds = f"{seed}/{row}/{turn}"
            cases = make_cases(calm.url, row.kind, row.when, seeds, sizes, kinds)
            try:
                FaultRun(cluster, row, [judge(case) for case in cases]).run()
                break
            except Missed:
                continue
        else:
            raise AssertionError(f"{row}: its moment was missed {TURNS} times")
    except AssertionError as error:
        error.add_note(cluster.logs() + calm.logs())
        raise
    finally:
        cluster.repair()
    settle(cluster)
