"""Whether an engine fits a device, the error if it does not, and whether the advice in the error
works."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.config.families import quantized_online, read_config
from baton_engine.errors import SettingsError
from baton_engine.memory.demand import DraftModelDemand, Measured, MemoryBudget, MemoryDemand
from baton_engine.memory.estimate import (
    SPARE_BYTES,
    activation_bytes,
    blocks_for,
    fixed_bytes,
    graph_bytes,
    pool_bytes,
    weight_bytes,
)
from baton_engine.memory.fit import fits, free_blocks, least_length
from baton_engine.memory.fit_check import check_fit, gib
from baton_engine.memory.remedies import remedies
from baton_engine.memory.requirements import batched_tokens
from baton_protocol.layout import KVGroup
from baton_protocol.policies import Quantization
from tests.support.engines.demands import GIB, config_of, demand_of, kv_layout

ROOT = Path(__file__).resolve().parents[3]
GPU = MemoryBudget(total=80 * GIB, others=GIB, share=0.9)


@st.composite
def demands(draw: st.DrawFn) -> MemoryDemand:
    """Demands of models with 1 million to 100 billion weights, on a CPU or a GPU."""
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    config = config_of(
        max_positions=draw(st.sampled_from([300, 4096, 131072])),
        tied=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([320, 32000, 151936])),
        hidden_size=draw(st.sampled_from([64, 1024, 8192])),
        intermediate_size=draw(st.sampled_from([128, 3072, 28672])),
        num_layers=draw(st.sampled_from([2, 28, 80])),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.sampled_from([1, 4])),
        head_dim=draw(st.sampled_from([16, 128])),
    )
    pool: dict[str, Any] = draw(
        st.sampled_from([{}, {}, {"kv_memory": 3 * GIB}, {"kv_blocks": 5000}])
    )
    demand = demand_of(
        config,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        kernels=draw(st.sampled_from(["torch", "triton"])),
        graphs=draw(st.booleans()),
        block_size=draw(st.sampled_from([1, 16, 256])),
        max_batched_tokens=draw(st.integers(1, 20000)),
        max_num_seqs=draw(st.integers(1, 1024)),
        **pool,
    )
    windows = draw(st.lists(st.sampled_from([None, 512]), max_size=3))
    if windows:
        share = -(-config.num_layers // len(windows))
        groups = tuple(KVGroup(tuple(range(share)), window) for window in windows)
        demand = replace(demand, layout=msgspec.structs.replace(demand.layout, groups=groups))
    if draw(st.booleans()):
        smaller = config_of(num_layers=draw(st.sampled_from([1, 40])), tied=True)
        layout = kv_layout(
            layers=smaller.num_layers,
            heads=smaller.num_kv_heads,
            dim=smaller.head_dim,
            block=demand.layout.block_size,
            dtype=demand.layout.dtype,
            groups=draw(st.sampled_from([(), (KVGroup((0,)), KVGroup((1,), 512))])),
        )
        demand = replace(demand, draft_model=DraftModelDemand(config=smaller, layout=layout))
    room = config.max_positions
    if demand.pool_blocks is not None:
        room = min(room, demand.layout.tokens_in(demand.pool_blocks))
    lengths = st.integers(1, max(1, room))
    return replace(demand, max_model_len=draw(st.none() | lengths))


@st.composite
def rooms(draw: st.DrawFn) -> MemoryBudget:
    total = draw(st.integers(1, 200 * GIB))
    others = draw(st.just(0) | st.integers(0, total))
    return MemoryBudget(total=total, others=others, share=draw(st.sampled_from([0.5, 0.9, 1.0])))


def kept_in(demand: MemoryDemand, dtype: str) -> MemoryDemand:
    """The demand with KV in this dtype."""
    layout, second = demand.layout.in_dtype(dtype), demand.draft_model
    if second is not None:
        second = replace(second, layout=second.layout.in_dtype(dtype))
    return replace(demand, layout=layout, draft_model=second)


def apply_advice(
    advice: str, demand: MemoryDemand, room: MemoryBudget
) -> tuple[MemoryDemand, MemoryBudget]:
    """The demand and the budget after a user follows this advice."""
    flag, _, value = advice.partition(" ")
    if flag == "--dtype":
        return replace(kept_in(demand, value), dtype=value), room
    if flag == "--kv-cache-dtype":
        return kept_in(demand, value), room
    if flag == "--speculative-config":
        return replace(demand, draft_model=None), room
    if flag == "--quantization":
        config = quantized_online(demand.config, cast(Quantization, value))
        return replace(demand, config=config), room
    if flag == "--gpu-memory-utilization":
        assert 0 < float(value) <= 1
        return demand, replace(room, share=float(value))
    if flag == "--kv-memory":
        return replace(demand, kv_memory=int(value.removesuffix("MiB")) << 20), room
    if flag == "--enforce-eager":
        return replace(demand, graphs=False), room
    if flag.startswith("--"):
        changes: dict[str, Any] = {flag[2:].replace("-", "_"): int(value)}
        return replace(demand, **changes), room
    [size] = re.findall(r"(\d+) GiB", advice)
    return demand, replace(room, total=int(size) * GIB)


def advice_of(message: str) -> list[str]:
    return message.partition("one of these is enough: ")[2].split(", ")


@given(demands(), rooms())
def test_each_advice_in_the_error_makes_the_engine_fit(
    demand: MemoryDemand, room: MemoryBudget
) -> None:
    try:
        check_fit(demand, room)
    except SettingsError as error:
        message = str(error)
    else:
        assert fits(demand, room)
        return
    assert not fits(demand, room)
    assert "\n" not in message
    for advice in advice_of(message):
        changed = apply_advice(advice, demand, room)
        assert changed != (demand, room)
        assert fits(*changed), advice


@given(demands(), rooms())
def test_a_larger_device_is_always_the_last_remedy(
    demand: MemoryDemand, room: MemoryBudget
) -> None:
    if not fits(demand, room):
        *flags, device = [each.text for each in remedies(demand, room)]
        assert re.fullmatch(r"a card with \d+ GiB|\d+ GiB of free memory", device)
        assert all(each.startswith("--") for each in flags)


@given(demands(), rooms())
def test_the_pool_and_all_other_memory_stay_within_the_limit(
    demand: MemoryDemand, room: MemoryBudget
) -> None:
    if demand.pool_blocks is not None or not fits(demand, room):
        return
    blocks = free_blocks(demand, room)
    tokens = demand.layout.tokens_in(blocks)
    length = demand.max_model_len or min(demand.config.max_positions, tokens)
    assert blocks >= blocks_for(demand, least_length(demand))
    assert fixed_bytes(demand, length) + pool_bytes(demand, blocks) <= room.limit


def error_of(demand: MemoryDemand, room: MemoryBudget) -> str:
    with pytest.raises(SettingsError) as error:
        check_fit(demand, room)
    return str(error.value)


def documented(text: str) -> bool:
    """Whether docs/engine.md contains this text, apart from line breaks."""
    return " ".join(text.split()) in " ".join((ROOT / "docs" / "engine.md").read_text().split())


def test_the_documented_memory_of_an_8b_model_equals_the_estimate() -> None:
    config = read_config(ROOT / "benchmarks" / "shapes" / "qwen3-8b")
    demand = demand_of(config, max_batched_tokens=batched_tokens("bfloat16", GPU.total))
    blocks = free_blocks(demand, GPU)
    parts = {
        "limit": GPU.limit,
        "weights": weight_bytes(demand),
        "activations": activation_bytes(demand, config.max_positions),
        "graphs": graph_bytes(demand),
        "spare": SPARE_BYTES["cuda"],
        "kv": pool_bytes(demand, blocks),
    }
    row = " | ".join(gib(size) for size in parts.values())
    assert documented(f"| {row} | {blocks:,} blocks of 16 tokens: {blocks * 16:,} tokens |")
    card = 24 * GIB
    tokens = batched_tokens("bfloat16", card)
    small = replace(demand, max_model_len=40960, max_batched_tokens=tokens)
    assert documented(error_of(small, replace(GPU, total=card)))


def test_the_pool_uses_measured_memory_instead_of_estimates() -> None:
    estimated = demand_of(max_model_len=4096)
    measured = replace(estimated, measured=Measured(resident=20 * GIB, step=GIB))
    blocks = free_blocks(measured, GPU)
    assert pool_bytes(measured, blocks) <= GPU.limit - fixed_bytes(measured, 4096)
    assert fixed_bytes(measured, 4096) - fixed_bytes(measured, 16) == 0
    more = replace(estimated, measured=Measured(resident=21 * GIB, step=GIB))
    fewer_blocks = GIB // measured.layout.block_bytes
    assert blocks - free_blocks(more, GPU) in (fewer_blocks, fewer_blocks + 1)


def test_the_error_states_the_memory_of_each_part_and_advice() -> None:
    demand = demand_of(dtype="float32", max_model_len=40960, max_batched_tokens=16384)
    message = error_of(demand, MemoryBudget(total=40 * GIB, others=GIB, share=0.85))
    for text in (
        "weights 30.5",
        "KV of one sequence of 40960 tokens 11.3",
        "GiB in float32",
        "33.0 GiB may be used: --gpu-memory-utilization 0.85, and others hold 1.0 of the card's",
        "--dtype bfloat16",
        "a card with",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda demand: replace(demand, max_model_len=40960), r"--max-model-len \d+"),
        (lambda demand: replace(demand, max_batched_tokens=50000), r"--max-batched-tokens \d+"),
        (lambda demand: replace(demand, max_num_seqs=9000), r"--max-num-seqs \d+"),
        (lambda demand: replace(demand, kv_memory=20 * GIB), r"--kv-memory \d+MiB"),
        (lambda demand: replace(demand, kv_blocks=10**6), r"--kv-blocks \d+"),
    ],
)
def test_the_error_for_a_too_large_setting_suggests_a_smaller_value(
    change: Callable[[MemoryDemand], MemoryDemand], advice: str
) -> None:
    assert re.search(
        advice, error_of(change(demand_of()), MemoryBudget(total=20 * GIB, share=0.99))
    )


def test_the_error_suggests_a_larger_gpu_share_only_if_that_is_enough() -> None:
    demand = demand_of(max_model_len=4096)
    assert "--gpu-memory-utilization 0.44" in error_of(
        demand, MemoryBudget(total=40 * GIB, share=0.2)
    )
    assert "--gpu-memory-utilization 0.9" not in error_of(
        demand, MemoryBudget(total=16 * GIB, share=0.2)
    )


def test_the_error_on_a_cpu_names_free_memory_and_no_gpu() -> None:
    demand = demand_of(device="cpu", kernels="torch", graphs=False)
    message = error_of(demand, MemoryBudget(total=4 * GIB, share=0.9))
    assert "3.6 of the 4.0 GiB that are free here may be used" in message
    assert "GiB of free memory" in message
    assert "gpu" not in message
    assert "card" not in message
