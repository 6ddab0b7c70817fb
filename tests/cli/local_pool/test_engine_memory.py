"""How the engines on one machine share its memory; computed before any is started."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton_cli.commands.up_plan import Machine, make_plan, share_machine
from baton_cli.errors import CommandError
from baton_cli.local_pool.engine_memory import check_memory, demand_of, fixed_bytes, share_memory
from baton_cli.local_pool.gpus import CONTEXT_BYTES, Gpu, Memory
from baton_cli.local_pool.store import StoreUrls
from baton_cli.options.devices import CUDA
from baton_cli.options.records import UpOptions
from baton_cli.options.sizes import parse_size

pytestmark = pytest.mark.integration

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def options(tiny_model: Callable[[str], Path]) -> UpOptions:
    return UpOptions(model=str(tiny_model("llama-gqa1")), dtype="float32", threads=1)


def machine(free: int | None, *gpus: Gpu) -> Machine:
    return Machine(lambda: free, lambda environment: list(gpus))


def test_engine_flags_determine_the_memory_demand(options: UpOptions) -> None:
    changed = replace(options, max_num_seqs=7, max_batched_tokens=99, block_size=8)
    demand = demand_of(changed)
    assert (demand.max_num_seqs, demand.max_batched_tokens) == (7, 99)
    assert (demand.layout.block_size, demand.layout.dtype) == (8, "float32")
    assert (demand.device, demand.kernels, demand.graphs) == ("cpu", "torch", False)
    on_gpu = demand_of(replace(options, device="cuda:1"))
    assert (on_gpu.device, on_gpu.kernels, on_gpu.graphs) == ("cuda", "triton", True)
    assert not demand_of(replace(options, device="cuda", enforce_eager=True)).graphs
    large = demand_of(replace(options, device="cuda:1"), 80 * GIB)
    assert (on_gpu.max_batched_tokens, large.max_batched_tokens) == (2048, 8192)


@pytest.mark.parametrize("free", [64 * GIB, None])
def test_with_enough_memory_engines_keep_their_default(
    options: UpOptions, free: int | None
) -> None:
    assert share_memory(options, 2, GIB, free) is None


def test_engines_share_the_free_memory_when_it_is_short(options: UpOptions) -> None:
    alone, both = (share_memory(options, engines, 0, GIB) for engines in (1, 2))
    assert alone is not None
    assert both is not None
    assert 2 * (both + fixed_bytes(options)) <= GIB * 0.9
    assert both < alone < GIB
    beside_a_store = share_memory(options, 2, 200 * MIB, GIB)
    assert beside_a_store is not None
    assert 90 * MIB < both - beside_a_store < 110 * MIB


def test_engines_that_do_not_fit_together_are_refused(
    options: UpOptions,
) -> None:
    with pytest.raises(CommandError, match=r"each of 2 engines: the model does not fit: weights"):
        share_machine(replace(options, prefill=1, decode=1), {}, machine(150 * MIB))


SIM = UpOptions(engine="sim")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_memory": 12 * GIB}, r"2 x --kv-memory 24\.\d GiB .* do not fit: 20\.0 GiB"),
        ({"kv_blocks": 2_000_000}, r"2 x --kv-blocks .* do not fit"),
        (
            {"host_kv_memory": 12 * GIB},
            r"2 x --host-kv-memory 24\.0 GiB .* do not fit: 18\.0 GiB of the 20\.0",
        ),
        ({"host_kv_memory": 12 * GIB, "device": CUDA}, "2 x --host-kv-memory 24"),
        ({"store_memory": 500 * GIB}, r"--store-memory 500\.0 GiB .* do not fit"),
        ({"store_memory": 12 * GIB, "kv_memory": 5 * GIB}, r"--store-memory 12\.0 .* 2 x --kv-mem"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_with_remedies_that_work(
    options: UpOptions, sizes: dict[str, Any], message: str
) -> None:
    here = machine(20 * GIB, *[Gpu("0", Memory(79 * GIB, 80 * GIB))] * 2)
    changed = replace(options, **sizes)
    with pytest.raises(CommandError, match=message) as caught:
        share_machine(changed, {}, here)
    text = str(caught.value)
    assert "--overcommit starts the pool anyway" in text
    assert "the model does not fit" not in text
    shares = share_machine(replace(changed, overcommit=True, redis_index="redis://i"), {}, here)
    assert shares[0].kv_memory in (sizes.get("kv_memory"), None)
    # Following any one piece of advice gives sizes that fit.
    *changes, memory = text.partition("one of these is enough: ")[2].split(", ")
    assert memory.endswith("more of free memory")
    for flag in changes:
        name, _, value = flag.removeprefix("--").replace("-", "_").partition(" ")
        advice: dict[str, Any] = {name: int(value) if name == "kv_blocks" else parse_size(value)}
        followed = replace(changed, **advice)
        check_memory(followed, 2, followed.store_memory, 20 * GIB)


def test_a_simulated_pool_s_sizes_must_fit_together_too() -> None:
    here = machine(2 * GIB)
    [share, _] = share_machine(SIM, {}, here)
    assert share.kv_memory is None
    cases: list[dict[str, Any]] = [
        {"kv_memory": GIB},
        {"kv_blocks": 1 << 17},
        {"store_memory": 3 * GIB},
    ]
    for sizes in cases:
        changed = replace(SIM, **sizes)
        with pytest.raises(CommandError, match="do not fit"):
            share_machine(changed, {}, here)
        assert len(share_machine(replace(changed, overcommit=True), {}, here)) == 2


def test_a_store_too_large_beside_the_engines_is_named_in_the_error(
    options: UpOptions,
) -> None:
    here = machine(GIB)
    changed = replace(options, store_memory=950 * MIB)
    with pytest.raises(
        CommandError, match=r"--store-memory 950 MiB .* do not fit: 922 MiB of the"
    ) as caught:
        share_machine(changed, {}, here)
    [most] = re.findall(r"enough: --store-memory (\d+)MiB", str(caught.value))
    assert share_machine(replace(changed, store_memory=int(most) * MIB), {}, here)


def test_nodes_of_a_planned_pool_start_with_overcommit(options: UpOptions) -> None:
    changed, here = replace(options, kv_memory=GIB), machine(20 * GIB)
    plan = make_plan(changed, StoreUrls("i", ("d",)), {}, machine=here)
    assert all("--overcommit" in spec.argv for spec in plan.nodes)


def test_engines_on_one_gpu_share_the_memory_that_models_and_steps_leave(
    options: UpOptions,
) -> None:
    here = machine(None, Gpu("0", Memory(9 * GIB, 10 * GIB)))
    changed = replace(options, device=CUDA, gpu_memory_utilization=0.8, prefill=1, decode=1)
    for share in share_machine(changed, {}, here):
        assert share.kv_memory is not None
        taken = 2 * (share.kv_memory + fixed_bytes(changed) + CONTEXT_BYTES)
        assert taken == int(10 * GIB * 0.8) - GIB
        assert share.variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_max_model_len_above_the_model_s_limit_is_refused(options: UpOptions) -> None:
    with pytest.raises(CommandError, match="--max-model-len 5000 exceeds the model's"):
        demand_of(replace(options, max_model_len=5000))


def test_computing_shares_imports_no_torch(options: UpOptions) -> None:
    code = (
        "import sys; from baton_cli.local_pool.engine_memory import share_memory, fixed_bytes;"
        "from baton_cli.options.records import UpOptions;"
        f"options = UpOptions(model={options.model!r}, dtype='float32');"
        "share_memory(options, 2, 0, 1 << 33); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_invalid_simulated_engine_settings_are_refused() -> None:
    invalid = UpOptions(engine="sim", kv_shards=3, kv_memory=MIB)
    with pytest.raises(CommandError, match="kv_shards is 3; it must divide kv_heads, 2"):
        check_memory(invalid, 2, 0, GIB)
