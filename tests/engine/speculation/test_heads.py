"""Heads that draft from the target's hidden states: the drafts are those of the same head in plain
torch, and answers are the same as without."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config.engine_config import TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import (
    EngineError,
    ModelError,
    SettingsError,
    UnsupportedModel,
    WeightsError,
)
from baton_engine.interface import Row
from baton_engine.runner.head_drafts import HeadDrafts
from baton_engine.runner.input_batch import StepInput
from baton_engine.runner.medusa_drafts import MedusaDrafts
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.plan import make_plan
from baton_engine.scheduling.sequence import Sequence as Tokens
from baton_engine.sim.build import SimSettings, build_sim
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_protocol.ids import BlockId
from tests.support.engines.engine_core import make_request, run_all
from tests.support.engines.heads import make_head, medusa_drafts, mtp_twin, twin_of, with_mtp_layer
from tests.support.engines.kernels import DEVICE
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
# Windows in all layers, of which the head has none, and in every other one.
WINDOWS = {"eagle window": "mistral-window", "eagle3 groups": "gemma2"}
MOST = 4


def some(*quick: str) -> list[Any]:
    """All kinds, of which the others take longer."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.long) for kind in TARGETS]


def folders(kind: str, tiny_model: Models, root: Path) -> tuple[Path, dict[str, Any]]:
    """The target's folder and the config of its head."""
    method, target = kind.split()[0], tiny_model((TARGETS | WINDOWS)[kind])
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
    """A head's drafts are noted, and then replaced by others. It is not asked for the outputs from
    number `until` to number `again`."""

    head: Proposer
    others: Guesses
    until: int = 0
    again: int = 0
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def propose(self, sequences: Sequence[Tokens], most: Sequence[int]) -> list[Sequence[int]]:
        if any(self.until <= sequence.num_outputs < self.again for sequence in sequences):
            return [()] * len(sequences)
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


def test_the_context_begins_in_cached_blocks_that_have_the_heads_kv(
    tiny_model: Models, tmp_path: Path
) -> None:
    """A conversation's second turn finds the first in the prefix cache."""
    folder, config = folders("eagle3", tiny_model, tmp_path)
    prompt, more = prompt_of(70), prompt_of(20, seed=1)
    first = make_request("a", prompt, max_tokens=20, ignore_eos=True)
    [answer] = run_all(small_engine(folder), [first]).all_ids().values()
    second = make_request("b", [*prompt, *answer, *more], max_tokens=12, ignore_eos=True)
    answers = run_all(small_engine(folder), [second]).all_ids()
    plain = with_head(folder, config)
    watched = Watched(proposer_of(plain), Guesses(answers, right=6))
    engine = EngineCore(plain.info, plain.runner, drafter=drafter(watched, MOST))
    run_all(engine, [first])
    watched.drafts.clear()
    run = run_all(engine, [second])
    assert (run.all_ids(), run.use("b")[0]) == (answers, 80)
    tokens = [*second.prompt_ids, *answers["b", 0]]
    states = hidden_states(plain, tokens)
    twin = twin_of("eagle3", folder, tmp_path / "head")
    assert len(watched.drafts) > 3
    for known, ids in watched.drafts:
        assert ids == twin.drafts(states, known, MOST)[: len(ids)]


@pytest.mark.parametrize("kind", some("eagle3", "medusa", "mtp deepseek"))
def test_drafts_are_those_of_the_same_head_in_plain_torch(
    kind: str, tiny_model: Models, tmp_path: Path
) -> None:
    folder, config = folders(kind, tiny_model, tmp_path)
    requests = [
        make_request(name, prompt_of(length), max_tokens=14, ignore_eos=True)
        for name, length in (("a", 150), ("b", 5), ("c", 37))
    ]
    answers = run_all(small_engine(folder), requests).all_ids()
    plain = with_head(folder, config, max_batched_tokens=24)
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
@pytest.mark.parametrize(
    "kind", [*some("eagle3"), *(pytest.param(kind, marks=pytest.mark.long) for kind in WINDOWS)]
)
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
    plain = with_head(folder, config, kv_blocks=12, **settings)
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


def changed_head(folder: Path, **values: Any) -> Path:
    """The head with other values in its config.json; None removes a tensor."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def changed_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The head with other tensors; None removes one."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    return folder


WRONG_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("eagle", {"hidden_size": 128}, "hidden_size is 128, and the target's is 64"),
    ("eagle", {"vocab_size": 100}, "vocab_size is 100, and the target's is 320"),
    ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers 2; heads of 1 layer"),
    ("eagle", {"architectures": ["GptOssForCausalLM"]}, "supported: LlamaForCausalLM"),
    ("eagle3", {"target_hidden_size": 32}, "target_hidden_size is 32, and the target's is 64"),
    (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        "eagle_aux_hidden_state_layer_ids is [0, 1, 3]; expected 3 layers of the target's 3",
    ),
    ("medusa", {"medusa_num_heads": 3}, "num_speculative_tokens 4 is more than the medusa_num_h"),
    ("medusa", {"hidden_size": 32}, "hidden_size is 32, and the target's is 64"),
]
TENSOR = torch.zeros(2)
WRONG_TENSORS: list[tuple[str, dict[str, torch.Tensor | None], str]] = [
    ("eagle", {"fc.weight": None}, "lacks fc.weight"),
    ("eagle", {"layers.1.mlp.up_proj.weight": TENSOR}, "no use for: layers.1.mlp.up_proj.weight"),
    ("eagle3", {"fc.weight": TENSOR}, "has shape [2]; the config asks for [64, 192]"),
    ("eagle3", {"d2t": torch.full((200,), 300)}, "gives ids from 300 to 499, and the vocabulary"),
    ("medusa", {"3.1.weight": None}, "lacks 3.1.weight"),
    ("medusa", {"4.1.weight": TENSOR}, "has no use for: 4.1.weight"),
]


@pytest.mark.parametrize(("method", "values", "message"), WRONG_CONFIGS)
def test_a_head_for_another_model_is_refused_by_key(
    method: str, values: dict[str, Any], message: str, tiny_model: Models, tmp_path: Path
) -> None:
    target = tiny_model(LLAMA)
    head = changed_head(make_head(method, target, tmp_path), **values)
    with pytest.raises(EngineError, match=re.escape(message)):
        with_head(target, {"method": method, "model": str(head)})


@pytest.mark.parametrize(("method", "tensors", "message"), WRONG_TENSORS)
def test_a_head_with_other_tensors_is_refused_by_name(
    method: str,
    tensors: dict[str, torch.Tensor | None],
    message: str,
    tiny_model: Models,
    tmp_path: Path,
) -> None:
    target = tiny_model(LLAMA)
    head = changed_tensors(make_head(method, target, tmp_path), **tensors)
    with pytest.raises(WeightsError, match=re.escape(message)):
        with_head(target, {"method": method, "model": str(head)})


def test_a_missing_head_is_refused_by_its_place(tiny_model: Models, tmp_path: Path) -> None:
    llama, glm = tiny_model(LLAMA), tiny_model("glm4-moe")
    nowhere = {"method": "eagle", "model": str(tmp_path / "none")}
    with pytest.raises(ModelError, match=r"eagle: the head's folder .*none has no config.json"):
        with_head(llama, nowhere)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"x")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    with pytest.raises(WeightsError, match=r"medusa_lm_head.pt is a pickle.*safetensors.torch"):
        with_head(llama, {"method": "medusa", "model": str(tmp_path)})
    with pytest.raises(UnsupportedModel, match=r"mtp: LlamaForCausalLM has no layers that draft"):
        with_head(llama, {"method": "mtp"})
    with pytest.raises(WeightsError, match=r"lacks model.layers.2.eh_proj.weight, "):
        with_head(glm, {"method": "mtp"})


@pytest.mark.parametrize("kind", some("eagle3", "medusa"))
def test_the_memory_estimate_counts_the_head(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    folder, config = folders(kind, tiny_model, tmp_path)
    text = json.dumps({**config, "num_speculative_tokens": MOST})
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kv_blocks": 100,
        "max_num_seqs": 8,
        "threads": 1,
    }
    plan = make_plan(TorchSettings(model=folder, speculative_config=text, **settings))
    assert plan.head is not None
    names, unused = plan.head.names or (), plan.head.config.layer.unused_tensors
    held = sum(
        math.prod(entry.shape) * 4
        for path in weight_files(plan.head.config.folder)
        for entry in read_entries(path)
        if entry.name in names and not (unused and entry.name.startswith(unused))
    )
    assert plan.demand.head.weights == pytest.approx(held, rel=0.01)
    engine = with_head(folder, config, kv_blocks=100, max_num_seqs=8)
    if kind == "medusa":
        assert plan.demand.head.block == 0
        return
    heads = proposer_of(engine)
    assert isinstance(heads, HeadDrafts)
    held_kv = 101 * plan.demand.head.block + 8 * plan.demand.head.block
    assert heads.kv_bytes == held_kv


def test_the_simulated_engine_has_no_hidden_states() -> None:
    with pytest.raises(SettingsError, match=r"the simulated engine has no weights for mtp"):
        build_sim(SimSettings(speculative_config='{"method": "mtp"}'))


def test_the_context_lasts_while_a_sequence_gets_no_drafts(
    tiny_model: Models, tmp_path: Path
) -> None:
    """Its positions are computed without a draft, some at a time."""
    folder, config = folders("eagle3", tiny_model, tmp_path)
    request = make_request("a", prompt_of(10), max_tokens=150, ignore_eos=True)
    answers = run_all(small_engine(folder), [request]).all_ids()
    plain = with_head(folder, config)
    watched = Watched(proposer_of(plain), Guesses(answers, right=0), until=2, again=140)
    engine = EngineCore(plain.info, plain.runner, drafter=drafter(watched, MOST))
    assert run_all(engine, [request]).all_ids() == answers
    tokens = [*request.prompt_ids, *answers["a", 0]]
    states, twin = hidden_states(plain, tokens), twin_of("eagle3", folder, tmp_path / "head")
    lengths = [len(known) - 10 for known, _ in watched.drafts]
    assert lengths[0] == 1
    assert lengths[-1] > 140
    assert max(later - earlier for earlier, later in pairwise(lengths)) > 130
    for known, ids in watched.drafts:
        assert ids == twin.drafts(states, known, MOST)[: len(ids)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["eagle3", "mtp deepseek"])
def test_heads_draft_with_tritons_kernels(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    """On a GPU, decode steps are recorded, and have padding."""
    folder, config = folders(kind, tiny_model, tmp_path)
    request = make_request("a", prompt_of(20), max_tokens=4, ignore_eos=True)
    settings = {"kernels": "triton", "device": DEVICE.type}
    answers = run_all(small_engine(folder, **settings), [request]).all_ids()
    plain = with_head(folder, config, **settings)
    watched = Watched(proposer_of(plain), Guesses(answers, right=6))
    engine = EngineCore(plain.info, plain.runner, drafter=drafter(watched, MOST))
    assert run_all(engine, [request]).all_ids() == answers
    tokens = [*request.prompt_ids, *answers["a", 0]]
    states = hidden_states(plain, tokens).cpu()
    twin = (
        twin_of("eagle3", folder, tmp_path / "head")
        if kind == "eagle3"
        else mtp_twin(folder, tmp_path / "twin")
    )
    assert watched.drafts
    for known, ids in watched.drafts:
        assert ids == twin.drafts(states, known, MOST)[: len(ids)]
