"""Padded decode steps with kernels over inputs at fixed addresses; on a GPU, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton_engine.attention import triton_backend, triton_paged_attention
from baton_engine.attention.interface import StepAttention
from baton_engine.attention.selector import attention_for
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.build import ops_for
from baton_engine.config.buckets import buckets
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers import triton_ops
from baton_engine.models.decoder import Decoder
from baton_engine.runner.forward import (
    Compute,
    Forward,
    Graphs,
    NoGraphs,
    eager_steps,
    forward_steps,
)
from baton_engine.runner.input_batch import InputBatch
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.staging_buffers import Staging, staging_for
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import specs_of
from tests.support.engines.decoding import (
    BLOCK,
    CPU,
    Driver,
    alone,
    make_runner,
    spoiled_staging,
    streams,
)
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import DEVICE, CountedLaunches
from tests.support.engines.small_pool import kv_of

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
    return kv_of(memory)


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


class AttentionAlone(Decoder):
    """A model whose only layer attends with queries of zeros."""

    def __init__(self, num_heads: int, dim: int) -> None:
        self.ops = ops_for("triton")
        self._shape = num_heads, dim

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        q_TNH = torch.zeros(len(tokens_T), *self._shape, device=DEVICE)
        return attention.attend(0, q_TNH, q_TNH, q_TNH, stored=True).flatten(1)


MULTIPROCESSORS = 132  # of an H100
LONGEST = 600 * BLOCK
VARIANTS = {
    "with graphs": (True, [(False, 1), *((True, 1 << power) for power in range(6))]),
    "without graphs": (
        False,
        [(one_token, 1 << power) for one_token in (False, True) for power in range(6)],
    ),
}


@pytest.mark.parametrize(("graphs", "variants"), VARIANTS.values(), ids=VARIANTS)
def test_warm_up_launches_every_variant_of_attention_that_serving_needs(
    graphs: bool, variants: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that is not warm is compiled while requests wait: whether all rows have one new
    token, and how many programs share the keys of such a row."""
    launched: set[tuple[bool, int]] = set()

    def launch(*args: Any, programs: int, **options: Any) -> None:
        launched.add((args[2].one_token, programs))

    monkeypatch.setattr(triton_backend, "paged_attention", launch)
    monkeypatch.setattr(
        triton_backend,
        "programs_for",
        lambda rows, heads, longest, _: triton_paged_attention.programs_for(
            rows, heads, longest, MULTIPROCESSORS
        ),
    )
    memory = TorchMemory(kv_layout(heads=2, dim=16, block=BLOCK), 4, DEVICE)
    attention = TritonAttention(memory, specs_of(memory.layout, 4))
    model = AttentionAlone(4, 16)
    forward = Forward(
        *(model, memory, attention),
        sizes=buckets(20) if graphs else (),
        width=LONGEST // BLOCK,
        eager=eager_steps(LONGEST, graphs=graphs),
    )
    runner = TorchRunner(model, memory, attention, forward)
    for size in runner.buckets:
        runner.warm(size)
    runner.warm_eager()
    assert sorted(launched) == variants
    launched.clear()
    for length in (1, 2, 20, 127, 128, 129, 300, 600, 1100, 2048, 4096, LONGEST):
        tail, piece = min(length, 9), min(length, 40)
        for counts in ([1], [tail], [piece], [1, piece], [1] * 9 + [tail, piece], [tail] * 20):
            rows = [
                Row([0] * count, length - count, [BlockId(1)] * (LONGEST // BLOCK))
                for count in counts
            ]
            runner.launch(rows).read()
    assert launched <= set(variants)
    assert {one_token for one_token, _ in launched} == {False, True}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_decode_step_launched_ahead_is_a_copy_a_kernel_and_a_replay(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a step launches before it samples."""
    launches: list[str] = []
    put_sampled = staticmethod(lambda *args: launches.append("sampled ids"))
    monkeypatch.setattr(triton_ops.TritonOps, "put_sampled", put_sampled)
    hidden_TD, sampled = torch.zeros(SIZES[-1], 1), torch.zeros(rows, dtype=torch.int64)

    class Replay:
        def run(self, size: int, compute: Compute) -> torch.Tensor:
            launches.append("replay")
            return hidden_TD

    memory = TorchMemory(kv_layout(heads=2, dim=16, block=BLOCK), rows, CPU)
    attention = TritonAttention(memory, specs_of(memory.layout, 4))
    forward = Forward(
        *(AttentionAlone(4, 16), memory, attention),
        sizes=SIZES,
        width=1,
        recorder=Replay(),
        make_staging=spoiled_staging,
    )
    ahead = [Row([-1], 3, [BlockId(row + 1)], (), None, row) for row in range(rows)]
    step = InputBatch(memory.layout).take(ahead, np.arange(rows))
    with CountedLaunches() as counted:
        forward.run(step, sampled)
    assert launches == ["sampled ids", "replay"]
    # The staging buffer's fake copy ends by filling its source.
    assert [name for name in counted.names if name != "fill_.Scalar"] == ["copy_.default"]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_are_recorded_only_on_cuda_and_not_with_enforce_eager(
    enforce_eager: bool, tiny_model: Folders
) -> None:
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
    assert forward.sizes == (buckets(20) if recorded else ())
