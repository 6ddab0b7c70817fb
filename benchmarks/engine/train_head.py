"""A head of EAGLE-3 for the demo model, trained here for minutes on the demo model's own answers.

The demo model answers `QUESTIONS` about `TOPICS`, and its hidden states are kept; then the head is
trained on them (see `benchmarks.support.engine.eagle3_training`). All of it takes `--minutes` (9)
of CPU time on `--threads` (1). Then the head drafts four tokens at a time for questions about other
topics, greedily: prints how many drafts of each position are right, given that those before them
are; how many tokens a step yields; and tokens per second with and without the head. Answers must be
equal. The goal is that the first draft is right at least 0.3 of the time. Then prints how often the
head's second and third candidate is right, the seconds of steps by rows, and whether a tree of
drafts would yield more tokens per second than a chain (see `support.engine.draft_trees`).

`--keep FOLDER` keeps the head, for `--speculative-config '{"method": "eagle3", "model": ...}'`, and
`--head FOLDER` measures a kept one. `--quick` trains for seconds and has no goal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton_cli.models.demo_model import fetch_demo
from baton_engine import LLM, SamplingParams
from baton_engine.attention.interface import StepAttention
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Row, Sample
from baton_engine.models.heads.head import Head
from baton_engine.runner.head_drafts import HeadDrafts
from baton_engine.runner.input_batch import StepInput
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.scheduling.sequence import Sequence as EngineSequence
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.proposer import Proposer
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.request import Request
from benchmarks.support.engine.draft_trees import StepSeconds, best_chain, best_tree
from benchmarks.support.engine.eagle3_training import (
    Answer,
    Target,
    Tensors,
    Trainer,
    first_tensors,
    head_config,
)

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Why does {} matter?",
    "List five facts about {}.",
    "How did people learn about {}?",
    "What are common mistakes about {}?",
    "Describe {} in two sentences.",
    "Give advice to somebody who starts with {}.",
    "Compare {} with something similar.",
)
TOPICS = (
    *("rain", "bread", "the moon", "bicycles", "chess", "volcanoes", "gardening", "the heart"),
    *("trains", "honey", "gravity", "coral reefs", "painting", "the Roman Empire", "coffee"),
    *("computers", "sleep", "winter", "maps", "music", "whales", "democracy", "cooking", "glass"),
    *("forests", "running", "electricity", "the alphabet", "money", "dogs", "bridges", "the sun"),
    *("paper", "tea", "dinosaurs", "clocks", "rivers", "football", "vaccines", "poetry", "ants"),
    *("satellites", "cheese", "deserts", "photography", "the brain", "ships", "writing"),
)
OTHER_TOPICS = ("mountains", "the internet", "apples", "history", "swimming", "stars")
TOKENS = 128  # of an answer
AT_ONCE = 48
DRAFTS = 4
CANDIDATES = 3
MOST_ROWS = 13
TRIES = 8
VOCAB = 4096
# Shares of the CPU time.
ANSWERING, TRAINING = 0.35, 0.6
LEAST_RIGHT = 0.3


@dataclass
class Collector:
    """Keeps the tokens of each sequence that a runner computes, and what the target returns."""

    parts: dict[int, list[tuple[Sequence[int], torch.Tensor]]] = field(default_factory=dict)

    def take(self, step: StepInput, hidden_TC: torch.Tensor) -> None:
        starts = step.arrays.query_starts_R1.tolist()
        for begin, row in zip(starts, step.rows, strict=False):
            some_TC = hidden_TC[begin : begin + len(row.tokens)].to(torch.bfloat16, copy=True)
            self.parts.setdefault(row.blocks_id, []).append((row.tokens, some_TC))

    def answers(self) -> list[Answer]:
        found = []
        for parts in self.parts.values():
            tokens = [id for ids, _ in parts for id in ids]
            if len(tokens) > 2:
                found.append(Answer(tokens, torch.cat([hidden for _, hidden in parts]).clone()))
        self.parts = {}
        return found


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    demo = fetch_demo(None, print)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        head = options.head or options.keep or Path(name) / "head"
        if options.head is None:
            train(demo, head, options)
        met = measure(demo, head, options)
    sys.exit(0 if options.quick or met else 1)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="train for 20 s, and try one question")
    add("--minutes", type=float, default=9.0, help="CPU time for answers and training (default 9)")
    add("--threads", type=int, default=1, help="threads (default 1)")
    add("--keep", type=Path, help="keep the head in this folder")
    add("--head", type=Path, help="measure the head of this folder, and train none")
    options = parser.parse_args()
    if options.quick:
        options.minutes = 0.3
    return options


def chats(topics: Sequence[str]) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": question.format(topic)}]
        for question in QUESTIONS
        for topic in topics
    ]


def train(demo: Path, head: Path, options: argparse.Namespace) -> None:
    seconds = 60 * options.minutes
    tensors = load_file(demo / "model.safetensors")
    config = json.loads((demo / "config.json").read_text())
    embed_VD = tensors["model.embed_tokens.weight"].float()
    norm_D = tensors["model.norm.weight"].float()
    target = Target(config, embed_VD, norm_D, torch.arange(VOCAB))
    save(head, target, first_tensors(target))  # so that the engine keeps hidden states
    began = time.process_time()
    answers = answer(demo, head, began + ANSWERING * seconds, options.threads)
    counts = Counter(id for each in answers for id in each.tokens)
    ids = sorted(id for id, _ in counts.most_common(VOCAB))
    ids += [id for id in range(len(embed_VD)) if id not in counts][: VOCAB - len(ids)]
    total = sum(counts.values())
    covered = sum(counts[id] for id in ids) / total
    print(
        f"{len(answers)} answers, {total} tokens, {covered:.1%} of them of the head's {VOCAB} ids;"
        f" {time.process_time() - began:.0f} s of CPU time"
    )
    target = Target(config, embed_VD, norm_D, torch.tensor(sorted(ids)))
    made = first_tensors(target)
    pairs = Trainer(target, made).train(answers, TRAINING * seconds, print)
    print(f"trained on {pairs} pairs, {pairs / total:.1f} times each")
    save(head, target, made)


def save(head: Path, target: Target, tensors: Tensors) -> None:
    head.mkdir(parents=True, exist_ok=True)
    (head / "config.json").write_text(json.dumps(head_config(target)))
    plain = {name: each.detach().contiguous() for name, each in tensors.items()}
    save_file(plain, head / "model.safetensors", {"format": "pt"})


def engine_with(demo: Path, head: Path | None, threads: int) -> LLM:
    config = None
    if head is not None:
        config = json.dumps(
            {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
        )
    return LLM(demo, threads=threads, dtype="bfloat16", kv_blocks=1500, speculative_config=config)


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm.engine.runner
    assert isinstance(runner, TorchRunner)
    return runner


def answer(demo: Path, head: Path, until: float, threads: int) -> list[Answer]:
    """The demo model's answers, greedy and sampled, until this CPU time."""
    llm, collector = engine_with(demo, head, threads), Collector()
    runner_of(llm).tap = collector
    questions, answers = chats(TOPICS), list[Answer]()
    for number in range(0, 2 * len(questions), AT_ONCE):
        some = [questions[(number + each) % len(questions)] for each in range(AT_ONCE)]
        sampled = 0.0 if number // AT_ONCE % 2 else 0.7
        llm.chat(some, SamplingParams(max_tokens=TOKENS, temperature=sampled, seed=number))
        answers += collector.answers()
        if time.process_time() > until:
            break
    return answers


def measure(demo: Path, head: Path, options: argparse.Namespace) -> bool:
    """Whether the first draft is right often enough."""
    plain, drafting = (engine_with(demo, each, options.threads) for each in (None, head))
    questions = chats(OTHER_TOPICS)[:: 30 if options.quick else 3]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    seconds, same, prompts = {"without": 0.0, "with": 0.0}, True, []
    for question in questions:
        ids = []
        for name, llm in (("without", plain), ("with", drafting)):
            began = time.perf_counter()
            [output] = llm.chat([question], params)
            seconds[name] += time.perf_counter() - began
            ids.append(output.outputs[0].token_ids)
        same = same and ids[0] == ids[1]
        prompts.append(output.prompt_token_ids)
    ratio = seconds["without"] / seconds["with"]
    print(f"one request at a time: {ratio:.2f}x as fast with the head; answers are equal: {same}")
    right, ranks_DR = count_right(drafting, prompts)
    shares = [later / max(1, earlier) for earlier, later in pairwise(right)]
    print(
        f"{right[0]} steps with {DRAFTS} drafts: each is right, if those before it are, in"
        f" {', '.join(f'{share:.2f}' for share in shares)} of the cases;"
        f" {sum(right) / right[0]:.2f} tokens a step"
    )
    compare_trees(
        drafting,
        prompts[0],
        [[n / max(1, right[d]) for n in ranks] for d, ranks in enumerate(ranks_DR)],
    )
    met = shares[0] >= LEAST_RIGHT
    print(f"first draft {shares[0]:.2f}  goal {LEAST_RIGHT} {'met' if met else 'MISSED'}")
    return same and met


def count_right(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Of all steps that drafted, the number in which the first 0, 1, ... drafts were right. And of
    those in which all drafts before a position were right, for each position, the number in which
    the head's first, second, ... candidate was the next token."""
    heads = runner_of(llm).tap
    assert isinstance(heads, HeadDrafts)
    info = llm.engine.info
    candidates = heads._head = Candidates(heads._head)
    drafter = Drafter(heads, DRAFTS, info.vocab_size, adaptive=False)
    engine = EngineCore(info, llm.engine.runner, drafter=drafter)
    right, ranks_DR = [0] * (DRAFTS + 1), [[0] * CANDIDATES for _ in range(DRAFTS)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(
                id=RequestId(str(number)),
                attempt=0,
                prompt_ids=tuple(prompt),
                params=params,
                outputs=((),),
            )
        )
        while engine.has_work():
            candidates.ids_DR.clear()
            step = engine.step()
            if step.drafted < DRAFTS:
                continue
            for place in range(step.accepted + 1):
                right[place] += 1
            for ids_R, ranks, token in zip(candidates.ids_DR, ranks_DR, step.tokens, strict=False):
                if token.id in ids_R:
                    ranks[ids_R.index(token.id)] += 1
    return right, ranks_DR


class Candidates:
    """A head that notes the most probable ids of each of its drafts."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.ids_DR: list[list[int]] = []

    def states(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        return self._head.states(hidden_TC)

    def forward(
        self,
        states_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        return self._head.forward(states_TD, tokens_T, positions_T, attention)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = self._head.logits(hidden_SD)
        self.ids_DR += logits_SV.topk(CANDIDATES).indices.tolist()
        return logits_SV


def compare_trees(llm: LLM, prompt: Sequence[int], rates_DR: Sequence[Sequence[float]]) -> None:
    seconds = step_seconds(llm, prompt)
    print(
        f"candidates 1 to {CANDIDATES} are right by position: "
        + "; ".join(", ".join(f"{rate:.2f}" for rate in rates) for rates in rates_DR)
    )
    steps = ", ".join(f"{1e3 * each:.1f}" for each in seconds.target)
    print(f"a step of 1 to {MOST_ROWS} rows takes {steps} ms; a draft {1e3 * seconds.head:.1f} ms")
    chain, tree = best_chain(rates_DR, seconds), best_tree(rates_DR, seconds)
    print(f"best chain: {chain}; best tree: {tree}, {tree.speed / chain.speed:.3f}x")


def step_seconds(llm: LLM, prompt: Sequence[int]) -> StepSeconds:
    """The least seconds of several steps of each number of rows, after these tokens."""
    runner, samples = runner_of(llm), SamplingParams(temperature=0.0)
    size = llm.engine.info.layout.block_size
    blocks = [BlockId(1 + place) for place in range(-(-(len(prompt) + MOST_ROWS) // size))]
    runner.launch([Row(prompt, 0, blocks, blocks_id=1)]).read()
    heads, runner.tap = runner.tap, None
    least = [math.inf] * MOST_ROWS
    for _ in range(TRIES):
        for rows in range(1, MOST_ROWS + 1):
            asked = tuple(Sample(0, len(prompt) + 1 + row, samples) for row in range(rows))
            began = time.perf_counter()
            runner.launch([Row(prompt[:rows], len(prompt), blocks, asked, blocks_id=1)]).read()
            least[rows - 1] = min(least[rows - 1], time.perf_counter() - began)
    runner.tap = heads
    return StepSeconds(least, head_seconds(llm, prompt))


def head_seconds(llm: LLM, prompt: Sequence[int]) -> float:
    """The least seconds of DRAFTS drafts of a sequence, by their number."""
    heads = runner_of(llm).tap
    assert isinstance(heads, HeadDrafts)
    timed = TimedProposer(heads)
    info = llm.engine.info
    drafter = Drafter(timed, DRAFTS, info.vocab_size, adaptive=False)
    engine = EngineCore(info, llm.engine.runner, drafter=drafter)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    request = Request(
        id=RequestId("t"), attempt=0, prompt_ids=tuple(prompt), params=params, outputs=((),)
    )
    engine.submit(request)
    while engine.has_work():
        engine.step()
    return timed.least / DRAFTS


@dataclass
class TimedProposer:
    """Notes the least seconds of a proposal with DRAFTS drafts."""

    proposer: Proposer
    least: float = math.inf

    def propose(
        self, sequences: Sequence[EngineSequence], most: Sequence[int]
    ) -> list[Sequence[int]]:
        began = time.perf_counter()
        drafts = self.proposer.propose(sequences, most)
        if len(drafts[0]) == DRAFTS:
            self.least = min(self.least, time.perf_counter() - began)
        return drafts

    def forget(self, sequence: EngineSequence) -> None:
        self.proposer.forget(sequence)


if __name__ == "__main__":
    main()
