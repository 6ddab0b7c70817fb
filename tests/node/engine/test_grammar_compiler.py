"""Jobs wait for their grammar, and nobody waits with them."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing
from threading import Event
from typing import Any

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.ipc.messages import Drain, Drained, Saved, ToEngine
from baton_node.settings import NodeSettings
from baton_protocol.link import (
    Abort,
    FirstTokens,
    Load,
    NoFirstTokens,
    PrefillJob,
    RunJob,
)
from baton_protocol.request import Request
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import BYTE_VOCAB_SIZE, ArtifactError, byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.matcher import Matcher
from baton_text.tokenizer import Tokenizer
from tests.support.nodes.processes import free_port, linked, make_request, running
from tests.support.nodes.step_loops import (
    NOBODY,
    LoopNode,
    run_alone,
    settle,
    spin,
    store_node,
    with_deadline,
)

PATIENCE_S = 120.0
PROMPT = bytes((i * 7) % 95 + 32 for i in range(205))  # 12 blocks of 16 and a tail
CHUNK2 = SimSettings(chunk_blocks=2, max_batched_tokens=48)
WORD = grammar_of("regex", "[a-z]{20}")
DIGITS = grammar_of("regex", "[0-9]{20}")
BROKEN = grammar_of("grammar", "start: missing")


class HeldGrammars(Grammars):
    """Compiles nothing before it is let."""

    def __init__(self) -> None:
        super().__init__(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)
        self.asked: list[str] = []
        self.begun, self.go = Event(), Event()

    def matcher(self, grammar: str) -> Matcher:
        self.asked.append(grammar)
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return super().matcher(grammar)


@pytest.fixture
def held() -> HeldGrammars:
    return HeldGrammars()


@pytest.fixture
def node(held: HeldGrammars) -> Iterator[LoopNode]:
    made = LoopNode("n0", grammars=lambda: held)
    yield made
    held.go.set()
    settle([made])
    made.close()


def structured(name: str, grammar: str = WORD, attempt: int = 1, **params: Any) -> Request:
    return make_request(name, PROMPT, attempt, structured=StructuredOutput(grammar), **params)


def matchers(node: LoopNode) -> list[Matcher | None]:
    """What the engine is given from now on."""
    given: list[Matcher | None] = []
    submit = node.engine.submit

    def record(request: Request, **more: Any) -> None:
        given.append(more["matcher"])
        submit(request, **more)

    node.engine.submit = record  # type: ignore[method-assign]
    return given


def wait(node: LoopNode, held: HeldGrammars, *frames: ToEngine) -> None:
    """The frames came, the first is a job, and its grammar is being compiled."""
    held.begun.clear()
    node.take(*frames)
    node.loop.turn()
    assert held.begun.wait(PATIENCE_S)


def turn(node: LoopNode, times: int = 20) -> None:
    for _ in range(times):
        node.loop.turn()


def ended(node: LoopNode, request: str, choices: int = 1) -> bool:
    return sum(token.finish is not None for token in node.tokens(request)) == choices


def last_load(node: LoopNode) -> Load:
    """What it says of itself, in time."""
    node.clock_ahead_s += 1
    node.loop.turn()
    return [frame for frame in node.port.sent if isinstance(frame, Load)][-1]


@pytest.mark.parametrize("kind", ["run", "prefill"])
def test_a_job_waits_for_its_grammar_and_then_runs(
    node: LoopNode, held: HeldGrammars, kind: str
) -> None:
    given = matchers(node)
    request = structured("r")
    wait(node, held, RunJob(request) if kind == "run" else PrefillJob(request, *NOBODY))
    turn(node)
    assert not node.engine.has_work()
    assert not node.loop.idle
    held.go.set()
    spin([node], lambda: bool(node.ids("r")), "the first token")
    settle([node])
    (matcher,) = given
    assert matcher is not None
    assert matcher.count_accepted(b"a" * 20) == 20


def test_a_job_without_a_grammar_has_no_matcher_and_loads_no_tokenizer() -> None:
    def never() -> Grammars:
        raise AssertionError("no job has a grammar")

    with closing(LoopNode("n0", grammars=never)) as node:
        given = matchers(node)
        run_alone(node, make_request("r", PROMPT))
        assert given == [None]


def test_others_go_on_while_a_grammar_is_compiled(node: LoopNode, held: HeldGrammars) -> None:
    node.take(RunJob(make_request("before", PROMPT, max_tokens=4000)))
    spin([node], lambda: len(node.ids("before")) > 2, "some tokens")
    wait(node, held, RunJob(structured("r")))
    count = len(node.ids("before"))
    assert run_alone(node, make_request("after", PROMPT[::-1]))
    assert len(node.ids("before")) > count
    assert not node.tokens("r")
    node.take(Abort(make_request("before", PROMPT).id, 1))


def test_the_loop_wakes_up_when_a_grammar_is_compiled(node: LoopNode, held: HeldGrammars) -> None:
    wait(node, held, RunJob(structured("r")))
    fd = node.compiler.fileno()
    assert select.select([fd], [], [], 0) == ([], [], [])
    held.go.set()
    assert select.select([fd], [], [], PATIENCE_S) == ([fd], [], [])
    node.loop.turn()
    assert select.select([fd], [], [], 0) == ([], [], [])
    assert not node.compiling


def test_a_grammar_that_is_known_is_not_waited_for(node: LoopNode, held: HeldGrammars) -> None:
    held.go.set()
    run_alone(node, structured("first"))
    held.go.clear()
    given = matchers(node)
    run_alone(node, structured("second"))
    assert held.asked == [WORD]
    assert given[0] is not None
    counters = node.loop.counters
    assert (counters["grammars_compiled"], counters["grammar_hits"]) == (1, 1)
    assert counters["grammar_compile_seconds"] > 0


def test_jobs_that_wait_for_one_grammar_have_a_matcher_each(
    node: LoopNode, held: HeldGrammars
) -> None:
    given = matchers(node)
    wait(node, held, RunJob(structured("a")), RunJob(structured("b")))
    held.go.set()
    spin([node], lambda: ended(node, "a") and ended(node, "b"), "both ends")
    assert len({id(matcher) for matcher in given}) == 2
    assert node.loop.counters["grammars_compiled"] == 1


# --- frames behind a job --------------------------------------------------------------------------


def test_a_first_token_that_comes_while_compiling_is_heard_behind_its_job(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = structured("r", n=2, seed=1)
    wait(node, held, RunJob(request, await_first=True))
    node.take(FirstTokens(request.id, 1, ((97,), (98,)), finished=(0,)))
    turn(node)
    assert not node.engine.has_work()
    held.go.set()
    spin([node], lambda: ended(node, "r"), "the other choice")
    settle([node])
    assert node.loop.counters["handoffs"] == 1
    assert {(token.choice, token.offset > 0) for token in node.tokens("r")} == {(1, True)}


def test_that_there_is_no_first_token_is_heard_behind_its_job(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = structured("r")
    wait(node, held, RunJob(request, await_first=True), NoFirstTokens(request.id, 1, "lost"))
    held.go.set()
    spin([node], lambda: ended(node, "r"), "the end")
    assert node.tokens("r")[0].offset == 0


def test_a_first_token_of_another_attempt_does_not_wait_with_the_job(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = structured("r", attempt=2)
    wait(node, held, RunJob(request, await_first=True), FirstTokens(request.id, 1, ((97,),)))
    held.go.set()
    spin([node], lambda: not node.compiling, "the grammar")
    turn(node)
    assert not node.tokens("r")
    node.take(Abort(request.id, 2))


@pytest.mark.integration
def test_chunks_that_are_announced_while_compiling_are_fetched(
    store: EmbeddedStore, held: HeldGrammars
) -> None:
    prefill = store_node("p0", store, CHUNK2)
    decode = store_node("d0", store, CHUNK2, grammars=lambda: held)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        request = structured("r")
        wait(decode, held, RunJob(request, await_first=True))
        prefill.take(PrefillJob(request, decode.name, decode.epoch))
        spin(both, lambda: decode.loop.early_entries == 7, "six chunks and the end")
        decode.take(FirstTokens(request.id, 1, (tuple(prefill.ids("r")),)))
        held.go.set()
        spin(both, lambda: ended(decode, "r"), "the end")
        settle(both)
        assert decode.loop.counters["reused_chunks"] == 6
        assert decode.prompted("r").stats.computed_tokens == 13


# --- ends -----------------------------------------------------------------------------------------


def test_an_abort_while_compiling_forgets_the_job_and_its_frames(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = structured("r")
    wait(node, held, RunJob(request, await_first=True), FirstTokens(request.id, 1, ((97,),)))
    node.take(Abort(request.id, 1))
    node.loop.turn()
    assert node.loop.idle
    held.go.set()
    run_alone(node, structured("next"))
    assert not node.tokens("r")
    assert not node.failures()


def test_jobs_that_were_aborted_in_the_queue_are_not_compiled(
    node: LoopNode, held: HeldGrammars
) -> None:
    wait(node, held, RunJob(structured("a")), RunJob(structured("b", DIGITS)))
    node.take(Abort(structured("b").id, 1))
    node.loop.turn()
    held.go.set()
    run_alone(node, structured("c", grammar_of("regex", "[A-Z]{20}")))
    assert DIGITS not in held.asked


def test_a_request_ends_at_its_deadline_while_its_grammar_is_compiled(
    node: LoopNode, held: HeldGrammars
) -> None:
    wait(node, held, RunJob(with_deadline(structured("r"), 1000.0)))
    node.clock_ahead_s += 900
    turn(node)
    assert not node.failures()
    node.clock_ahead_s += 100
    node.loop.turn()
    (failed,) = node.failures()
    assert (failed.request, failed.error.code) == ("r", "deadline_exceeded")
    assert node.loop.idle
    held.go.set()
    turn(node)
    assert not node.tokens("r")


def test_the_time_that_compiling_takes_counts_towards_the_deadline(
    node: LoopNode, held: HeldGrammars
) -> None:
    wait(node, held, RunJob(with_deadline(structured("r"), 1000.0), await_first=True))
    node.clock_ahead_s += 900
    held.go.set()
    spin([node], lambda: not node.compiling, "the grammar")
    node.clock_ahead_s += 100
    spin([node], lambda: bool(node.failures()), "the end")
    assert node.failures()[0].error.code == "deadline_exceeded"


def test_a_drain_waits_for_jobs_that_are_compiled(node: LoopNode, held: HeldGrammars) -> None:
    wait(node, held, RunJob(structured("r")), Drain())
    turn(node)
    ends = (Saved, Drained)
    assert [type(frame) for frame in node.port.sent if isinstance(frame, ends)] == [Saved]
    held.go.set()
    spin([node], lambda: any(isinstance(frame, Drained) for frame in node.port.sent), "Drained")
    assert ended(node, "r")


def test_a_newer_attempt_takes_the_place_of_the_one_that_waits(
    node: LoopNode, held: HeldGrammars
) -> None:
    wait(node, held, RunJob(structured("r", DIGITS)))
    newer = structured("r", DIGITS, attempt=2)
    node.take(RunJob(newer), RunJob(newer), RunJob(structured("r", DIGITS)))
    turn(node)
    assert node.compiling == 1
    held.go.set()
    spin([node], lambda: ended(node, "r"), "the end")
    settle([node])
    assert {token.attempt for token in node.tokens("r")} == {2}
    assert sum(token.finish is not None for token in node.tokens("r")) == 1
    assert not node.failures()


def test_a_job_that_comes_again_after_its_abort_is_compiled_again(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = structured("r")
    wait(node, held, RunJob(request))
    node.take(Abort(request.id, 1), RunJob(request))
    node.loop.turn()
    held.go.set()
    spin([node], lambda: ended(node, "r"), "the end")
    settle([node])
    assert sum(token.finish is not None for token in node.tokens("r")) == 1


# --- what does not compile ------------------------------------------------------------------------


def test_a_grammar_that_does_not_compile_fails_its_job_and_says_why(
    node: LoopNode, held: HeldGrammars
) -> None:
    held.go.set()
    request = structured("r", BROKEN)
    node.take(RunJob(request, await_first=True), FirstTokens(request.id, 1, ((97,),)))
    spin([node], lambda: bool(node.failures()), "the refusal")
    error = node.failures()[0].error
    assert (error.status, error.code, error.retryable) == (400, "invalid_value", False)
    assert "missing" in error.message
    assert node.loop.idle
    assert run_alone(node, structured("next"))


def test_a_tokenizer_that_cannot_be_used_fails_the_job_for_this_node_alone() -> None:
    tries = 0

    def load() -> Grammars:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ArtifactError("tokenizer.json is missing")
        return HeldGrammars()

    with closing(LoopNode("n0", grammars=load)) as node:
        node.take(RunJob(structured("r")))
        spin([node], lambda: bool(node.failures()), "the refusal")
        error = node.failures()[0].error
        assert (error.status, error.retryable) == (503, True)
        assert "tokenizer.json is missing" in error.message


def test_a_compiler_that_breaks_fails_its_job_and_compiles_the_next(
    node: LoopNode, held: HeldGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As Rust's are in Python."""

    def broken(grammar: str) -> Matcher:
        raise Panic("index out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(held, "matcher", broken)
        node.take(RunJob(structured("r")))
        spin([node], lambda: bool(node.failures()), "the refusal")
    assert node.failures()[0].error.status == 500
    held.go.set()
    assert run_alone(node, structured("next"))


def test_an_invalid_request_fails_without_compiling_its_grammar(
    node: LoopNode, held: HeldGrammars
) -> None:
    request = msgspec.structs.replace(structured("r"), prompt_ids=(1, -1))
    node.take(RunJob(request))
    node.loop.turn()
    assert node.failures()[0].error.status == 400
    assert not held.asked


# --- reports --------------------------------------------------------------------------------------


def test_jobs_that_wait_count_as_parked(node: LoopNode, held: HeldGrammars) -> None:
    wait(node, held, RunJob(structured("r", n=3)), PrefillJob(structured("p"), *NOBODY))
    node.take(RunJob(structured("partner's"), await_first=True))
    node.loop.turn()
    load = last_load(node).load
    assert (load.jobs_total, load.parked, load.queued_tokens) == (3, 5, 2 * len(PROMPT))
    held.go.set()
    spin([node], lambda: ended(node, "r", 3), "the end")
    load = last_load(node).load
    assert (load.grammars_compiled_total, load.grammar_hits_total) == (1, 2)
    assert load.grammar_compile_seconds_total > 0
    node.take(Abort(structured("partner's").id, 1))


@pytest.mark.integration
async def test_a_node_of_two_processes_compiles_grammars() -> None:
    settings = NodeSettings(node="d0", role="decode", engine="sim", port=free_port())
    async with running(settings) as (process,), linked(process) as link:
        await link.send(RunJob(structured("good")))
        await link.send(RunJob(structured("bad", BROKEN)))
        assert await link.finished("good")
        failure = await link.failure("bad")
        assert (failure.error.status, failure.error.retryable) == (400, False)
        assert "missing" in failure.error.message
        await link.until(lambda: link.last_load().load.grammars_compiled_total == 1)
