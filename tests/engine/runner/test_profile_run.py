"""The largest step, which runs on a GPU before the first request, and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.engine_config import TorchSettings
from baton_engine.interface import Row
from baton_engine.memory.demand import Measured, MemoryBudget
from baton_engine.runner.cuda_card import CudaCard
from baton_engine.runner.plan import EnginePlan, make_plan
from baton_engine.runner.profile_run import profile
from tests.support.engines.engine_core import ScriptedRunner, ScriptedStep

ROOT = Path(__file__).resolve().parents[3]
MIB, GIB = 1 << 20, 1 << 30


class FakeCard(CudaCard):
    """A card of 80 GiB, of which others hold 1 and the weights 2. A step adds 10 MiB per row while
    it runs, and 64 MiB for good that torch did not allocate."""

    def __init__(self) -> None:
        self.loaded = self.peaked = 0

    def release(self) -> None:
        self.peaked = 0

    def reserved(self) -> int:
        return 2 * GIB

    def peak(self) -> int:
        return 2 * GIB + self.peaked

    def free(self) -> int:
        return 80 * GIB - GIB - 2 * GIB - self.loaded


class RunnerOnCard(ScriptedRunner):
    def __init__(self, card: FakeCard) -> None:
        super().__init__()
        self._card = card

    def launch(self, rows: Sequence[Row]) -> ScriptedStep:
        self._card.peaked = max(self._card.peaked, 10 * MIB * len(rows))
        self._card.loaded = 64 * MIB
        return super().launch(rows)


def plan_on_card(**settings: Any) -> EnginePlan:
    """A plan as it would be on an idle card of 80 GiB."""
    model = ROOT / "benchmarks" / "shapes" / "qwen3-8b"
    chosen = TorchSettings(model=model, load_format="dummy", max_num_seqs=16, **settings)
    plan = make_plan(chosen, free=lambda: 400 * GIB)
    demand = replace(plan.demand, device="cuda", kernels="triton", graphs=True)
    room = MemoryBudget(total=80 * GIB, others=GIB, share=0.9)
    return replace(plan, device=torch.device("cuda", 0), demand=demand, room=room)


def test_the_pool_gets_what_the_measured_step_leaves() -> None:
    card, plan = FakeCard(), plan_on_card()
    found = profile(plan, RunnerOnCard(card), card)
    assert found.demand.measured == Measured(resident=2 * GIB + 64 * MIB, step=160 * MIB)
    assert found == plan.measured(Measured(resident=2 * GIB + 64 * MIB, step=160 * MIB))


@pytest.mark.parametrize("settings", [{"kv_blocks": 500}, {"kv_memory": 2 * GIB}, {}])
def test_every_kind_of_sampling_runs_before_the_first_request(settings: dict[str, int]) -> None:
    """Also if the size of the pool is given, and nothing needs to be measured."""
    card, plan = FakeCard(), plan_on_card(**settings)
    runner = RunnerOnCard(card)
    found = profile(plan, runner, card)
    assert (found == plan) == bool(settings)
    largest, plain = runner.steps
    assert (len(largest), sum(len(row.tokens) for row in largest)) == (16, 512)
    for row in largest:
        [sample] = row.samples
        params = sample.params
        assert (params.temperature, params.logprobs) == (1.0, 1)
        assert (params.top_k > 0, params.top_p < 1, params.min_p > 0) == (True, True, True)
        assert sample.matcher is not None
        assert sample.matcher.mask() == b"\xff" * (plan.config.vocab_size // 8)
        assert params.penalized
        assert sample.penalty_counts is not None
        assert sample.listed is not None
        assert len(sample.listed.biased) == 1
        assert row.prompt is not None
    [row] = plain
    assert row.samples[0].params.temperature == 0
    assert runner.unread == []
