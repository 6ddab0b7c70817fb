"""Answers with grammars whose node is killed mid-answer: the matrix of runs, and its execution.

In: a pool with two decode nodes, and an undisturbed one. Out: nothing, or an AssertionError about
one run. The runs of a part are concurrent. Each decode node is killed when one of its answers
reaches a random number of tokens, which interrupts all its runs. Runs that were not interrupted run
again, until each has lost its node mid-answer.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Generic, Literal, TypeVar

from baton_protocol.link import Deltas
from baton_text.grammars.grammars import Grammars
from tests.support.clients.http import Json
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.cases import PATH
from tests.support.faults.structures import STRUCTURES, TOKENIZER, Structure
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster, Node
from tests.support.wires.wire import Passing
from tests.support.wires.witness import Trap

Sampling = Literal["greedy", "seeded", "unseeded"]
AT_ONCE = 40  # concurrent runs of a part
ROUNDS = 16
# Upper limits of the number of tokens at which a node is killed, used in turn: the small ones catch
# short answers.
LATEST = (90, 12, 3)
PROMPT = 48  # tokens
LONG, SHORT = 140, 20  # max_tokens of an answer; SHORT cuts many answers


@dataclass(frozen=True)
class Run:
    structure: str
    sampling: Sampling
    n: int
    draw: int

    def __str__(self) -> str:
        return f"{self.structure}, {self.sampling}, n {self.n}, draw {self.draw}"

    def body(self, turn: int) -> Json:
        """The request's body, with a prompt that is unique to this run and turn."""
        rng = random.Random(f"{self}/{turn}")
        structure: Structure = STRUCTURES[self.structure]
        return {
            "prompt": [rng.randrange(32, 127) for _ in range(PROMPT)],
            "max_tokens": SHORT if rng.random() < 0.2 else LONG,
            "n": self.n,
            "temperature": 0 if self.sampling == "greedy" else 1.0,
            **({"seed": rng.getrandbits(31)} if self.sampling == "seeded" else {}),
            **({"logit_bias": structure.bias} if structure.bias else {}),
            **{"stream": True, "stream_options": {"include_usage": True}},
            **{"return_token_ids": True, **structure.fields},
        }


def all_runs() -> list[Run]:
    samplings: tuple[Sampling, ...] = ("greedy", "seeded", "unseeded")
    runs = [Run(*each) for each in product(STRUCTURES, samplings, (1, 3), (0, 1))]
    random.Random(25).shuffle(runs)
    return runs


def parts(runs: Sequence[Run]) -> list[list[Run]]:
    return [list(runs[at : at + AT_ONCE]) for at in range(0, len(runs), AT_ONCE)]


def selection(count: int) -> list[Run]:
    """The first `count` of a selection with one run per structure, which cycles through pairs of
    sampling and n."""
    kinds = [("greedy", 1), ("seeded", 3), ("unseeded", 1), ("seeded", 1), ("unseeded", 3)]
    of_structure = {
        structure: kinds[number % len(kinds)] for number, structure in enumerate(STRUCTURES)
    }
    selected = [
        run
        for run in all_runs()
        if run.draw == 0 and of_structure[run.structure] == (run.sampling, run.n)
    ]
    return selected[:count]


@dataclass
class Counts:
    """Counts of choices that ended, choices that were cut, nodes that were killed, and runs that
    are repeated because they lost no node."""

    ended: int = 0
    cut: int = 0
    kills: int = 0
    again: int = 0


R = TypeVar("R", bound=Hashable)


class KilledRuns(ABC, Generic[R]):
    """Executes some runs until each has lost its node, and compares the answers with those of an
    undisturbed pool."""

    path = PATH

    def __init__(self, pool: Cluster, undisturbed: Cluster, seed: str) -> None:
        self._pool = pool
        self._undisturbed = undisturbed
        self._rng = random.Random(seed)
        self.counts = Counts()

    @abstractmethod
    def body(self, run: R, turn: int) -> Json:
        """The request's body, with a prompt that is unique to this run and turn."""

    @abstractmethod
    def check(self, run: R, answer: StreamedAnswer) -> None:
        """Raise AssertionError unless the complete answer matches what the run requests."""

    def prompt_ids(self, body: Json) -> Sequence[int]:
        prompt: list[int] = body["prompt"]
        return prompt

    def run(self, runs: Sequence[R]) -> None:
        left = list(runs)
        for turn in range(ROUNDS):
            moved = self._round(left, turn)
            left = [run for run in left if run not in moved]
            self.counts.again += len(left)
            if not left:
                return
        raise AssertionError(f"in {ROUNDS} rounds no node was killed under {[*map(str, left)]}")

    def _round(self, runs: Sequence[R], turn: int) -> set[R]:
        """Execute the runs once, and return those that moved to another node."""
        witness = self._pool.witness
        witness.forget()
        for node in self._pool.of_role("decode"):
            witness.set_trap(self._trap(node, self._rng.randrange(1, LATEST[turn % len(LATEST)])))
        moved = self.execute(runs, turn)
        self._pool.repair()
        settle(self._pool)
        return moved

    def execute(self, runs: Sequence[R], turn: int = 0) -> set[R]:
        """Execute the runs at the same time, check their answers, and return those that moved to
        another node."""
        bodies = {run: self.body(run, turn) for run in runs}
        witness = self._pool.witness
        with ThreadPoolExecutor(len(runs)) as threads:
            answers = dict(zip(runs, threads.map(self._ask, bodies.values()), strict=True))
            moved = {
                run
                for run, body in bodies.items()
                if witness.placements(self.prompt_ids(body))[-1].attempt > 1
            }
            expected = dict(zip(runs, threads.map(self._reference, bodies.values()), strict=True))
        for run in runs:
            self._compare(run, answers[run], expected[run])
        return moved

    def _ask(self, body: Json) -> StreamedAnswer:
        return ask(self._pool.url, self.path, body)

    def _reference(self, body: Json) -> StreamedAnswer:
        """The undisturbed answer to the same request, with the seed that the router chose if the
        request had none."""
        seed = self._pool.witness.seed(self.prompt_ids(body))
        return ask(self._undisturbed.url, self.path, {**body, "seed": seed})

    def _trap(self, node: Node, tokens: int) -> Trap:
        """A trap that kills the node when one of its answers reaches `tokens` tokens."""

        def fits(passing: Passing) -> bool:
            frame = passing.frame
            return (
                passing.node == node.name
                and isinstance(frame, Deltas)
                and any(delta.offset + len(delta.ids) >= tokens for delta in frame.items)
            )

        def kill() -> None:
            node.kill()
            self.counts.kills += 1

        return Trap(fits, kill, after=True)

    def _compare(self, run: R, answer: StreamedAnswer, expected: StreamedAnswer) -> None:
        for each in (answer, expected):
            assert (each.status, each.error, each.whole) == (200, None, True), f"{run}: {each}"
        assert answer.result == expected.result, (
            f"{run}:\ngot    {answer.result}\nexpected {expected.result}"
        )
        self.check(run, answer)


class PartRun(KilledRuns[Run]):
    """Executes runs of the matrix of structures."""

    def __init__(self, pool: Cluster, undisturbed: Cluster, grammars: Grammars, seed: str) -> None:
        super().__init__(pool, undisturbed, seed)
        self._grammars = grammars

    def body(self, run: Run, turn: int) -> Json:
        return run.body(turn)

    def check(self, run: Run, answer: StreamedAnswer) -> None:
        structure = STRUCTURES[run.structure]
        assert len(answer.result.choices) == run.n
        for choice in answer.result.choices.values():
            matcher = self._grammars.matcher(structure.grammar)
            ids = [id for id in choice.ids if id not in TOKENIZER.eos_ids]
            assert matcher.accept(ids), f"{run}: {choice}"
            if choice.finish == "length":
                self.counts.cut += 1
                continue
            assert matcher.complete, f"{run}: {choice}"
            structure.check(choice.text)
            self.counts.ended += 1
