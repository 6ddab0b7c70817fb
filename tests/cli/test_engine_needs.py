"""What the engines of one machine take of its memory, before any is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.devices import CUDA, Device
from baton.engine_needs import demand_of, fixed_bytes, share_memory
from baton.errors import CommandError
from baton.gpus import CONTEXT_BYTES, Gpu
from baton.options import UpOptions
from baton.sizes import ByteSize
from baton.up import share_machine

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def options(tiny_model: Callable[[str], Path]) -> UpOptions:
    return UpOptions(model=str(tiny_model("llama-gqa1")), dtype="float32", threads=1)


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Say how much memory this machine has free."""

    def say(size: int | None) -> None:
        monkeypatch.setattr("baton_engine.machine_memory.free_memory", lambda: size)

    return say


def test_the_flags_make_the_demand(options: UpOptions) -> None:
    changed = replace(options, max_num_seqs=7, max_batched_tokens=99, block_size=8)
    demand = demand_of(changed)
    assert (demand.max_num_seqs, demand.max_batched_tokens) == (7, 99)
    assert (demand.layout.block_size, demand.layout.dtype) == (8, "float32")
    assert (demand.device, demand.kernels, demand.graphs) == ("cpu", "torch", False)
    on_gpu = demand_of(replace(options, device=Device("cuda:1")))
    assert (on_gpu.device, on_gpu.kernels, on_gpu.graphs) == ("cuda", "triton", True)
    assert not demand_of(replace(options, device=Device("cuda"), enforce_eager=True)).graphs


def test_with_memory_enough_engines_take_their_default(
    options: UpOptions, leaves: Callable[[int | None], None]
) -> None:
    leaves(64 * GIB)
    assert share_memory(options, 2, GIB) is None
    leaves(None)
    assert share_memory(options, 2, GIB) is None


def test_engines_divide_what_is_free_when_it_is_little(
    options: UpOptions, leaves: Callable[[int | None], None]
) -> None:
    leaves(GIB)
    alone, both = (share_memory(options, engines, 0) for engines in (1, 2))
    assert alone is not None
    assert both is not None
    assert 2 * (both + fixed_bytes(options)) <= GIB * 0.9
    assert both < alone < GIB
    beside_a_store = share_memory(options, 2, 200 * MIB)
    assert beside_a_store is not None
    assert 90 * MIB < both - beside_a_store < 110 * MIB


def test_engines_that_do_not_fit_together_are_refused_before_any_is_started(
    options: UpOptions, leaves: Callable[[int | None], None]
) -> None:
    leaves(150 * MIB)
    with pytest.raises(CommandError, match=r"each of 2 engines: the model does not fit: weights"):
        share_machine(replace(options, prefill=1, decode=1), {})


def test_a_size_that_was_given_is_believed(
    options: UpOptions, leaves: Callable[[int | None], None]
) -> None:
    leaves(1)
    [share, _] = share_machine(replace(options, kv_memory=ByteSize(5 * GIB)), {})
    assert share.kv_memory == 5 * GIB
    [share, _] = share_machine(replace(options, kv_blocks=100), {})
    assert share.kv_memory is None
    [share, _] = share_machine(UpOptions(engine="sim"), {})
    assert share.kv_memory is None


def test_engines_on_one_gpu_divide_what_their_models_and_steps_leave(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.up.list_gpus", lambda visible: [Gpu("0", 9 * GIB, 10 * GIB)])
    asked = replace(options, device=CUDA, gpu_memory_utilization=0.8, prefill=1, decode=1)
    for share in share_machine(asked, {}):
        assert share.kv_memory is not None
        taken = 2 * (share.kv_memory + fixed_bytes(asked) + CONTEXT_BYTES)
        assert taken == int(10 * GIB * 0.8) - GIB
        assert share.variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_length_the_model_cannot_have_is_one_line(options: UpOptions) -> None:
    with pytest.raises(CommandError, match="--max-model-len 5000 exceeds the model's"):
        demand_of(replace(options, max_model_len=5000))


def test_it_needs_no_torch(options: UpOptions) -> None:
    code = (
        "import sys; from baton.engine_needs import share_memory, fixed_bytes;"
        "from baton.options import UpOptions;"
        f"options = UpOptions(model={options.model!r}, dtype='float32');"
        "share_memory(options, 2, 0); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
