"""Property test of the request's record against a model of its pool: for any order of events, each
token reaches the client once and in order, and the request ends once.

Links break; frames arrive late, twice or not at all; nodes die, freeze, refuse, drain or give up;
the client disconnects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.link import (
    DRAINED,
    Abort,
    Delta,
    DrainNode,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PinPrefix,
    PrefillDone,
    PrefillJob,
    RequestStats,
    ResetPrefixCache,
    ResumeNode,
    Resync,
    RunJob,
    ToNode,
    UnpinPrefix,
)
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_router.requests.state import (
    MAX_ATTEMPTS,
    MAX_STRIKES,
    Action,
    Emit,
    Ended,
    Failed,
    Regroup,
    Replace,
    RequestRecord,
    Send,
)
from tests.support.clock import Clock
from tests.support.pools.placements import BASIS, placement_on

T = TypeVar("T")
RID = RequestId("r")
PoolFrame = DrainNode | ResumeNode | Resync | ResetPrefixCache | PinPrefix | UnpinPrefix
NodeMessage = Delta | PrefillDone | JobFailed
DECODES = [NodeId(f"decode-{n}") for n in range(3)]
PREFILLS = [NodeId(f"prefill-{n}") for n in range(2)]
FINAL = ErrorRecord("too long", "context_length_exceeded", status=400)
BUSY = ErrorRecord("no room", "busy", status=503, retryable=True)
HANDED_BACK = ErrorRecord("it has ended", DRAINED, status=503, retryable=True)
LATE = ErrorRecord("too late", "deadline_exceeded", status=504)

decodes = st.sampled_from(DECODES)
prefills = st.sampled_from(PREFILLS)
any_node = st.sampled_from(DECODES + PREFILLS)
picks = st.integers(0, 9)  # selects one of the nodes that qualify, or one of the open choices


def select(things: Sequence[T], pick: int) -> T:
    return things[pick % len(things)]


# --- the nodes ------------------------------------------------------------------------------------


def token(choice: int, position: int) -> int:
    return 100 * choice + position


def text_of(choice: int, ids: int, length: int) -> str:
    """The text sent after `ids` ids. Every third id's text is held back until the next id or the
    end."""
    shown = ids if ids == length or ids % 3 else max(0, ids - 1)
    return "".join(f"<{token(choice, position)}>" for position in range(shown))


@dataclass
class Job:
    """A node's job for one attempt. `have[c]`: number of ids of choice c that are sent already."""

    attempt: int
    prefill: bool
    awaits_first: bool
    have: list[int]
    open: set[int]


@dataclass
class ModelNode:
    """A node without sockets and clocks that generates the only correct tokens.

    `lengths`: number of tokens of each choice. `sent`: frames on their way to the router. `aborts`:
    aborts that wait for the link. `lost`: the router has declared the node lost since its link
    broke."""

    name: NodeId
    lengths: list[int]
    linked: bool = True
    lost: bool = False
    job: Job | None = None
    sent: list[NodeMessage] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)

    # --- the link ---------------------------------------------------------------------------------

    def receive(self, frame: ToNode) -> None:
        if not self.linked:
            self.aborts += [frame] if isinstance(frame, Abort) else []
        elif isinstance(frame, RunJob | PrefillJob):
            ended = frame.finished if isinstance(frame, RunJob) else ()
            self.job = Job(
                frame.request.attempt,
                isinstance(frame, PrefillJob),
                isinstance(frame, RunJob) and frame.await_first,
                [len(ids) for ids in frame.request.outputs],
                set(range(len(self.lengths))) - set(ended),
            )
        elif isinstance(frame, PoolFrame):
            raise AssertionError("a request's record does not send such frames")
        elif self.job is not None and self.job.attempt == frame.attempt:
            if isinstance(frame, Abort):
                self.job = None
                return
            self.job.awaits_first = False
            if isinstance(frame, FirstTokens):
                self.job.have = [len(ids) for ids in frame.outputs]
                self.job.open -= set(frame.finished)

    def cut(self) -> None:
        """Break the link. Frames on their way are lost."""
        self.lost = self.lost and not self.linked
        self.linked = False
        self.sent.clear()

    def link_up(self) -> None:
        self.linked, self.lost = True, False
        aborts, self.aborts = self.aborts, []
        for abort in aborts:
            self.receive(abort)

    def die(self) -> None:
        self.job = None
        self.sent.clear()

    def _send(self, frame: NodeMessage) -> None:
        if self.linked:
            self.sent.append(frame)

    # --- the job ----------------------------------------------------------------------------------

    def step(self, pick: int, count: int) -> None:
        """Send up to `count` tokens of one open choice, or the prefill job's answer."""
        job = self.job
        assert job is not None
        if job.prefill:
            firsts = tuple(self._delta(job, choice, 1) for choice in sorted(job.open))
            self._send(PrefillDone(RID, job.attempt, firsts, RequestStats(2)))
            self.job = None
        elif not job.awaits_first:
            choice = sorted(job.open)[pick % len(job.open)]
            delta = self._delta(job, choice, count)
            self._send(delta)
            job.have[choice] += len(delta.ids)
            if delta.finish is not None:
                job.open.discard(choice)
                self.job = job if job.open else None

    def fail(self, error: ErrorRecord) -> None:
        assert self.job is not None
        self._send(JobFailed(RID, self.job.attempt, error))
        self.job = None

    def give_up(self) -> None:
        """Send a delta that leaves a gap, or a prefill answer without choices."""
        job, self.job = self.job, None
        assert job is not None
        if job.prefill:
            self._send(PrefillDone(RID, job.attempt, (), RequestStats(2)))
        elif not job.awaits_first:
            choice = min(job.open)
            self._send(Delta(RID, job.attempt, choice, job.have[choice] + 1, ids=(0,)))

    def _delta(self, job: Job, choice: int, count: int) -> Delta:
        length, start = self.lengths[choice], job.have[choice]
        until = min(length, start + count)
        overlap = len(text_of(choice, start, length))
        return Delta(
            RID,
            job.attempt,
            choice,
            start,
            ids=tuple(token(choice, position) for position in range(start, until)),
            text=text_of(choice, until, length)[overlap:],
            finish="length" if until == length else None,
        )


# --- the pool -------------------------------------------------------------------------------------


class Pool(RuleBasedStateMachine):
    @initialize(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def open_request(self, lengths: list[int]) -> None:
        n = len(lengths)
        self.lengths = lengths
        self.record = RequestRecord(
            Request(
                id=RID,
                attempt=1,
                prompt_ids=(1, 2),
                params=SamplingParams(n=n),
                outputs=((),) * n,
            ),
            Clock(),
        )
        self.nodes = {name: ModelNode(name, lengths) for name in DECODES + PREFILLS}
        self.delivered: list[tuple[NodeId, NodeMessage]] = []
        self.received: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.serving: dict[int, set[NodeId]] = {}
        self.aborted: set[tuple[NodeId, int]] = set()
        self.over: str | None = None
        self.strikes = self.chunks = self.refusals = 0
        self.progress = False
        self.regrouping = False
        self.may_fail: ErrorRecord | None = None  # error that a node or the router has just given

    # --- placements -------------------------------------------------------------------------------

    @precondition(lambda self: self.record.phase == "waiting" and not self.over)
    @rule(decode=decodes, prefill=st.none() | prefills, chunks=st.sampled_from([0, 0, 0, 1, 2]))
    def place(self, decode: NodeId, prefill: NodeId | None, chunks: int) -> None:
        prefill = None if any(self.received) else prefill
        if chunks > self.chunks:
            self.chunks, self.strikes = chunks, 0
        verdict = self.record.check_strikes(chunks)
        assert bool(verdict) == (self.strikes >= MAX_STRIKES)
        self.apply(verdict)
        if not verdict:
            self.place_on(decode, prefill)

    @precondition(lambda self: self.regrouping)
    @rule(decode=decodes, prefill=prefills, pair=st.booleans())
    def regroup(self, decode: NodeId, prefill: NodeId, pair: bool) -> None:
        if pair:
            self.place_on(decode, prefill)
        else:
            self.regrouping = False
            self.apply(self.record.give_up_prefill("no other node"))

    @precondition(lambda self: self.record.phase == "running")
    @rule(decode=decodes)
    def move(self, decode: NodeId) -> None:
        """The request's node drains, and the request moves to another node."""
        if decode not in self.serving[self.record.attempt]:
            self.place_on(decode, None)

    @rule(name=prefills)
    def leave_prefill(self, name: NodeId) -> None:
        self.apply(self.record.on_leaving(name))

    @rule(name=decodes)
    def roll_out(self, name: NodeId) -> None:
        """The node drains, and no node of its kind is left or expected."""
        self.apply(self.record.on_rolled_out(name))

    def place_on(self, decode: NodeId, prefill: NodeId | None) -> None:
        self.regrouping = False
        pair = {decode} if prefill is None else {decode, prefill}
        for name in pair:
            self.nodes[name].link_up()
        self.serving[self.record.attempt + 1] = pair
        self.apply(self.record.start_attempt(placement_on(decode, prefill), Epoch("e"), BASIS))

    # --- nodes at work ----------------------------------------------------------------------------

    def busy(self) -> list[ModelNode]:
        return [node for node in self.nodes.values() if node.job is not None]

    @precondition(lambda self: self.busy())
    @rule(pick=picks, choice=picks, count=st.integers(1, 2))
    def work(self, pick: int, choice: int, count: int) -> None:
        select(self.busy(), pick).step(choice, count)

    @precondition(lambda self: self.busy())
    @rule(pick=picks, choice=picks)
    def work_and_deliver(self, pick: int, choice: int) -> None:
        node = select(self.busy(), pick)
        node.step(choice, 1)
        if node.sent:
            self.receive_at_router(node.name, node.sent.pop(0))

    @precondition(lambda self: self.busy())
    @rule(pick=picks, error=st.sampled_from([BUSY, BUSY, BUSY, HANDED_BACK, FINAL]))
    def fail(self, pick: int, error: ErrorRecord) -> None:
        select(self.busy(), pick).fail(error)

    @precondition(lambda self: self.busy())
    @rule(pick=picks)
    def give_up(self, pick: int) -> None:
        select(self.busy(), pick).give_up()

    # --- links ------------------------------------------------------------------------------------

    def sending(self) -> list[ModelNode]:
        return [node for node in self.nodes.values() if node.sent]

    @precondition(lambda self: self.sending())
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        node = select(self.sending(), pick)
        self.receive_at_router(node.name, node.sent.pop(0))

    @precondition(lambda self: self.sending())
    @rule(pick=picks)
    def lose_a_frame(self, pick: int) -> None:
        select(self.sending(), pick).sent.pop(0)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        assert self.pass_to_record(*data.draw(st.sampled_from(self.delivered))) == []

    def receive_at_router(self, name: NodeId, frame: NodeMessage) -> None:
        self.delivered.append((name, frame))
        late = frame.attempt != self.record.attempt
        actions = self.pass_to_record(name, frame)
        assert not (late and actions)
        self.may_fail = frame.error if isinstance(frame, JobFailed) else None
        self.apply(actions)
        self.may_fail = None

    def pass_to_record(self, name: NodeId, frame: NodeMessage) -> list[Action]:
        if isinstance(frame, Delta):
            return self.record.on_delta(name, frame)
        if isinstance(frame, PrefillDone):
            return self.record.on_prefill_done(name, frame)
        return self.record.on_failed(name, frame)

    @rule(name=any_node)
    def cut(self, name: NodeId) -> None:
        self.nodes[name].cut()

    @rule(name=any_node)
    def come_back(self, name: NodeId) -> None:
        node = self.nodes[name]
        if not node.linked:
            resumed = not node.lost
            node.link_up()
            if resumed:
                self.apply(self.record.on_resumed(name))

    @rule(name=any_node, dead=st.booleans())
    def lose(self, name: NodeId, dead: bool) -> None:
        """A dead node loses its job. A frozen or disconnected node continues when it can."""
        if dead:
            self.nodes[name].die()
        self.nodes[name].lost = True
        self.apply(self.record.on_lost(name, "link" if dead else "stalled"))

    @precondition(lambda self: self.record.attempt > 2)  # earlier, most histories would be short
    @rule(error=st.none() | st.just(LATE))
    def leave(self, error: ErrorRecord | None) -> None:
        self.may_fail = error
        was_over = self.over
        self.apply(self.record.cancel(error))
        self.may_fail = None
        self.over = was_over or self.over or "left"
        self.regrouping = False

    # --- the record's actions ---------------------------------------------------------------------

    def apply(self, actions: Sequence[Action]) -> None:
        assert not (self.over and actions), actions
        for action in actions:
            if isinstance(action, Emit):
                self.emit(action.delta)
            elif isinstance(action, Send):
                self.check_send(action)
                self.nodes[action.node].receive(action.frame)
            elif isinstance(action, Replace | Regroup):
                if action.cause == "refused":
                    self.refusals += 1
                elif action.cause != "drained" and not self.regrouping:
                    self.strikes = 0 if self.progress else self.strikes + 1
                    self.progress = False
                self.regrouping = isinstance(action, Regroup)
            elif isinstance(action, Ended):
                self.end("ended")
            elif isinstance(action, Failed):
                self.end("failed")
                self.check_failure(action.error)

    def emit(self, delta: Delta) -> None:
        assert delta.offset == len(self.received[delta.choice])
        self.received[delta.choice] += delta.ids
        self.texts[delta.choice] += delta.text
        self.progress = self.progress or bool(delta.ids)

    def end(self, outcome: str) -> None:
        assert self.over is None
        self.over = outcome
        self.regrouping = False

    def check_failure(self, error: ErrorRecord) -> None:
        if error.code == "request_kills_nodes":
            assert self.strikes >= MAX_STRIKES
        else:
            assert error == self.may_fail
            assert error != BUSY or (self.refusals == MAX_ATTEMPTS and not any(self.received))

    def check_send(self, send: Send) -> None:
        frame, attempt = send.frame, self.record.attempt
        if isinstance(frame, Abort):
            assert (send.node, frame.attempt) not in self.aborted
            self.aborted.add((send.node, frame.attempt))
            attempt = frame.attempt
        elif isinstance(frame, RunJob | PrefillJob):
            assert frame.request.attempt == attempt
            assert [list(ids) for ids in frame.request.outputs] == self.received
        else:
            assert isinstance(frame, FirstTokens | NoFirstTokens)
            assert frame.attempt == attempt
            assert not (isinstance(frame, NoFirstTokens) and any(self.received))
        assert send.node in self.serving[attempt]

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def the_client_has_a_prefix_of_the_correct_answer(self) -> None:
        assert self.received == self.record.outputs
        for choice, ids in enumerate(self.received):
            assert ids == [token(choice, position) for position in range(len(ids))]
            assert self.texts[choice] == text_of(choice, len(ids), self.lengths[choice])

    @invariant()
    def no_node_works_for_an_attempt_that_is_over(self) -> None:
        served = self.record.phase in ("handoff", "running")
        for node in self.nodes.values():
            if node.linked and node.job is not None:
                assert served
                assert node.job.attempt == self.record.attempt

    @invariant()
    def a_finished_request_is_over_and_complete(self) -> None:
        assert (self.over is not None) == (self.record.phase == "over")
        if self.over == "ended":
            assert [len(ids) for ids in self.received] == self.lengths

    def teardown(self) -> None:
        """From any state, one healthy node finishes the request."""
        if not hasattr(self, "record"):
            return
        for _ in range(100):
            if self.over:
                break
            if self.record.phase == "waiting":
                self.place(DECODES[0], None, self.chunks)
            elif self.regrouping:
                self.regroup(DECODES[0], PREFILLS[0], False)
            else:
                self.run_all()
        assert self.over in ("ended", "failed", "left")
        self.the_client_has_a_prefix_of_the_correct_answer()
        self.a_finished_request_is_over_and_complete()

    def run_all(self) -> None:
        """Let every node send what it can. If none sends a frame, lose the serving nodes."""
        before = (len(self.delivered), self.record.attempt)
        for node in self.nodes.values():
            self.come_back(node.name)
            if node.job is not None:
                node.step(0, 1)
            while node.sent:
                self.receive_at_router(node.name, node.sent.pop(0))
        if before == (len(self.delivered), self.record.attempt) and not self.over:
            for name in self.serving[self.record.attempt]:
                self.lose(name, True)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.long
class TestManyPools(TestPool):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
