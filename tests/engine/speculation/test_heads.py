"""Heads that draft from the target's hidden states: the drafts are those of the same head in plain
torch, and answers are the same as without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Row
from baton_engine.runner.head_drafts import HeadDrafts
from baton_engine.runner.input_batch import StepInput
from baton_engine.runner.medusa_drafts import MedusaDrafts
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.scheduling.sequence import Sequence as Tokens
from baton_protocol.ids import BlockId
from tests.support.engines.engine_core import make_request, run_all
from tests.support.engines.heads import make_head, medusa_drafts, mtp_twin, twin_of, with_mtp_layer
from tests.support.engines.proposers import Guesses, drafter
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import small_engine

Models = Callable[[str], Path]
Proposer = HeadDrafts | MedusaDrafts
LLAMA = "llama-gqa1"  # three layers
TARGETS = {
    "eagle": LLAMA,
    "eagle3": LLAMA,
    "medusa": LLAMA,
    "mtp glm": "glm4-moe",
    "mtp deepseek": "deepseek-v3",
}
MOST = 4


def some(*quick: str) -> list[Any]:
    """All kinds, of which the others take longer."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.long) for kind in TARGETS]


def folders(kind: str, tiny_model: Models, root: Path) -> tuple[Path, dict[str, Any]]:
    """The target's folder and the config of its head."""
    method, target = kind.split()[0], tiny_model(TARGETS[kind])
    if method == "mtp":
        return with_mtp_layer(target, root / "target"), {"method": "mtp"}
    head = make_head(method, target, root / "head")
    return target, {"method": method, "model": str(head)}


def with_head(folder: Path, config: dict[str, Any], **settings: Any) -> EngineCore:
    text = json.dumps({**config, "num_speculative_tokens": MOST})
    return small_engine(folder, speculative_config=text, **settings)


def proposer_of(engine: EngineCore) -> Proposer:
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    assert isinstance(runner.tap, HeadDrafts | MedusaDrafts)
    return runner.tap


@dataclass
class Watched:
    """A head's drafts are noted, and then replaced by others."""

    head: Proposer
    others: Guesses
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def propose(self, sequences: Sequence[Tokens], most: Sequence[int]) -> list[Sequence[int]]:
        found = self.head.propose(sequences, most)
        self.drafts += [
            ([*sequence.tokens], [*ids]) for sequence, ids in zip(sequences, found, strict=True)
        ]
        return self.others.propose(sequences, most)

    def forget(self, sequence: Tokens) -> None:
        self.head.forget(sequence)


@dataclass
class AllStates:
    """The hidden states of one step."""

    hidden_TC: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def take(self, step: StepInput, hidden_TC: torch.Tensor) -> None:
        self.hidden_TC = hidden_TC.clone()


def hidden_states(engine: EngineCore, tokens: Sequence[int]) -> torch.Tensor:
    """What the target returns of these tokens, computed in one step."""
    runner, states = engine.runner, AllStates()
    assert isinstance(runner, TorchRunner)
    runner.tap = states
    blocks = [BlockId(id + 1) for id in range(-(-len(tokens) // engine.info.layout.block_size))]
    runner.launch([Row(tokens, 0, blocks)]).read()
    return states.hidden_TC


@pytest.mark.parametrize("kind", some("eagle3", "medusa", "mtp deepseek"))
def test_drafts_are_those_of_the_same_head_in_plain_torch(
    kind: str, tiny_model: Models, tmp_path: Path
) -> None:
    folder, config = folders(kind, tiny_model, tmp_path)
    requests = [
        make_request(name, prompt_of(length), max_tokens=14, ignore_eos=True)
        for name, length in (("a", 37), ("b", 5))
    ]
    answers = run_all(small_engine(folder), requests).all_ids()
    plain = with_head(folder, config, max_batched_tokens=16)
    watched = Watched(proposer_of(plain), Guesses(answers, right=6))
    run = run_all(EngineCore(plain.info, plain.runner, drafter=drafter(watched, MOST)), requests)
    assert run.all_ids() == answers
    assert 0 < sum(step.accepted for step in run.steps) < sum(step.drafted for step in run.steps)
    assert len(watched.drafts) > 8
    states = {}
    for request in requests:
        tokens = [*request.prompt_ids, *answers[str(request.id), 0]]
        states[tokens[0]] = hidden_states(plain, tokens)
    if kind == "medusa":
        head = tmp_path / "head"
        for tokens, ids in watched.drafts:
            assert ids == medusa_drafts(folder, head, states[tokens[0]], tokens, len(ids))
        return
    mtp = config["method"] == "mtp"
    twin = mtp_twin(folder, tmp_path / "twin") if mtp else twin_of(kind, folder, tmp_path / "head")
    for tokens, ids in watched.drafts:
        assert ids == twin.drafts(states[tokens[0]], tokens, len(ids))
    assert any(len(ids) == MOST for _, ids in watched.drafts)


REQUESTS: dict[str, dict[str, Any]] = {
    "a": {"logprobs": 2, "prompt_logprobs": 1},
    "b": {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 1},
    "c": {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.3},
    "d": {"logit_bias": ((5, 3.0),), "bad_words": ((7,), (8, 9))},
    "e": {"temperature": 1.5, "seed": 1, "min_tokens": 9, "logprobs": 0},
    "f": {"max_tokens": 40},
}


@pytest.mark.parametrize("overlap", ["off", pytest.param("on", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", some("eagle3"))
def test_answers_and_logprobs_are_the_same_with_a_head(
    kind: str, overlap: str, tiny_model: Models, tmp_path: Path
) -> None:
    """Eight sequences in a pool that is too small for them, so that some are preempted."""
    folder, config = folders(kind, tiny_model, tmp_path)
    requests = [
        make_request(name, prompt_of(5 + 9 * place), **{"max_tokens": 24, **params})
        for place, (name, params) in enumerate(REQUESTS.items())
    ]
    settings = {"max_batched_tokens": 48, "overlap": overlap}
    alone = run_all(small_engine(folder, **settings), requests)
    plain = with_head(folder, config, kv_blocks=16, **settings)
    heads = Watched(proposer_of(plain), Guesses(alone.all_ids(), right=7))
    engine = EngineCore(
        plain.info, plain.runner, overlap=plain.overlap, drafter=drafter(heads, MOST)
    )
    run = run_all(engine, requests)
    assert sorted(run.tokens, key=str) == sorted(alone.tokens, key=str)
    assert run.prompt_logprobs("a") == alone.prompt_logprobs("a")
    load = engine.load()
    assert load.preemptions_total > 0
    assert load.accepted_drafts_total > 0
    assert any(heads.drafts)
    assert load.free_blocks == engine.info.num_blocks
    # What is kept of a sequence that was preempted before it got drafts goes as others come.
    assert len(heads.head.kept) <= load.preemptions_total


@pytest.mark.parametrize("kind", some("eagle", "medusa"))
def test_the_engine_drafts_with_the_head_of_its_config(
    kind: str, tiny_model: Models, tmp_path: Path
) -> None:
    folder, config = folders(kind, tiny_model, tmp_path)
    requests = [make_request("a", prompt_of(40), max_tokens=40)]
    engine = with_head(folder, config)
    run = run_all(engine, requests)
    assert run.all_ids() == run_all(small_engine(folder), requests).all_ids()
    assert engine.load().drafted_tokens_total > 0
