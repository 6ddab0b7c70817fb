"""Padded decode steps with kernels over inputs at fixed addresses; on a GPU, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine.attention.selector import attention_for
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.forward import Graphs, NoGraphs, forward_steps
from baton_engine.runner.input_buffers import Staging, staging_for
from baton_engine.runner.model_runner import TorchRunner
from tests.support.engines.decoding import Driver, alone, make_runner, spoiled_staging, streams
from tests.support.engines.kernels import DEVICE

Folders = Callable[[str], Path]
MakeStaging = Callable[[int, torch.device], Staging]
LENGTHS = (5, 30, 15, 8, 41)
STEPS = 4
SIZES = (1, 2, 4, 5)


def make_triton_runner(folder: Path, staging: MakeStaging = spoiled_staging) -> TorchRunner:
    on_gpu = DEVICE.type == "cuda"
    return make_runner(
        folder,
        kernels="triton",
        sizes=SIZES,
        recorder=Graphs() if on_gpu else NoGraphs(),
        make_staging=staging_for if on_gpu else staging,
        device=DEVICE,
    )


def pool_of(runner: TorchRunner) -> torch.Tensor:
    memory = runner.memory
    assert isinstance(memory, TorchMemory)
    return memory.pool


@pytest.mark.parametrize("name", ["llama-gqa2-tied", "mistral-window"])
@pytest.mark.parametrize(
    "count", [3, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 4, 5))]
)
def test_ids_equal_those_of_the_torch_runner(count: int, name: str, tiny_model: Folders) -> None:
    folder = tiny_model(name)
    runner = make_triton_runner(folder)
    pool_of(runner)[1:].fill_(torch.nan)  # kernels must not read what they did not write
    made, driver = streams(LENGTHS[:count]), Driver(runner)
    for _ in range(STEPS):
        driver.step(made, late=True)
    driver.read()
    assert [each.given for each in made] == alone(make_runner(folder), LENGTHS[:count], STEPS)


def test_warm_up_and_padding_write_no_block(tiny_model: Folders) -> None:
    runner = make_triton_runner(tiny_model("llama-gqa2-tied"))
    before = pool_of(runner).clone()
    for size in runner.buckets[::-1]:
        runner.warm(size)
    assert torch.equal(pool_of(runner), before)
    [one], driver = streams(LENGTHS[:1]), Driver(runner)
    for number in range(3):
        padding = [] if number else streams((6,) * 2)[1:]
        driver.step([one, *padding], late=True)
    driver.read()
    changed = (pool_of(runner) != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert 0 not in changed


def test_a_line_that_no_request_uses_any_more_becomes_padding(tiny_model: Folders) -> None:
    """Stale slots in the line would write into blocks that now belong to another request."""
    runner = make_triton_runner(tiny_model("llama-gqa2-tied"), staging_for)
    made = streams((9, 9, 9, 9))
    driver = Driver(runner)
    driver.step(made)
    driver.step(made)  # uses all four lines
    driver.read()
    pool_of(runner)[made[3].blocks] = 7.0
    driver.step(made[:3])  # uses three of the four lines
    driver.read()
    assert bool((pool_of(runner)[made[3].blocks] == 7.0).all())


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_are_recorded_only_on_cuda_and_not_with_enforce_eager(
    enforce_eager: bool, tiny_model: Folders
) -> None:
    from baton_engine.build import ops_for
    from baton_engine.config.families import read_config
    from baton_engine.layers.parameter import WeightSlots
    from baton_engine.models.registry import build_model

    runner = make_triton_runner(tiny_model("llama-gqa2-tied"))
    memory = runner.memory
    assert isinstance(memory, TorchMemory)
    config = read_config(tiny_model("llama-gqa2-tied"))
    model = build_model(config, WeightSlots(torch.float32, DEVICE, ops_for("triton")))
    forward = forward_steps(
        *(model, memory, attention_for("triton", memory, config)),
        max_num_seqs=20,
        max_model_len=100,
        enforce_eager=enforce_eager,
    )
    recorded = DEVICE.type == "cuda" and not enforce_eager
    assert forward.sizes == ((1, 2, 4, 8, 16, 20) if recorded else ())
