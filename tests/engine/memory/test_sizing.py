"""The memory estimates: a step never takes more, and not much less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton_engine.attention.selector import attention_for
from baton_engine.config.buckets import buckets
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.step_sizes import STORED_SPLIT_BYTES
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.demand import Measured, MemoryBudget, MemoryDemand
from baton_engine.memory.estimate import (
    GIB,
    GRAPH_LAYER_BYTES,
    LOADED_CODE_BYTES,
    LOGIT_BYTES,
    SAMPLING_BYTES,
    SPARE_BYTES,
    activation_bytes,
    count_weights,
    fixed_bytes,
    graph_bytes,
    measured_bytes,
    pool_bytes,
    weight_bytes,
)
from baton_engine.memory.fit import free_blocks
from baton_engine.models.registry import build_model
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.profile_run import largest_step
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import choose
from baton_engine.scheduling.stop_conditions import permits
from baton_engine.weights.dummy import fill_slots
from tests.support.engines.demands import config_of, demand_of
from tests.support.engines.live_bytes import LiveBytes


def runner_of(demand: MemoryDemand, blocks: int) -> TorchRunner:
    slots = WeightSlots(TORCH_DTYPES[demand.dtype], torch.device("cpu"), TORCH_OPS)
    model = build_model(demand.config, slots)
    fill_slots(slots)
    slots.finish()
    memory = TorchMemory(demand.layout, blocks, torch.device("cpu"))
    return TorchRunner(model, memory, attention_for("torch", memory, demand.config))


def peak_of_a_step(demand: MemoryDemand) -> int:
    """Peak bytes of live tensors in the largest step on a CPU."""
    assert demand.max_model_len
    rows = largest_step(
        max_batched_tokens=demand.max_batched_tokens,
        max_num_seqs=demand.max_num_seqs,
        longest=demand.max_model_len,
        block_size=demand.layout.block_size,
        vocab_size=demand.config.vocab_size,
    )
    runner = runner_of(demand, 1)
    live = LiveBytes()
    with live:
        runner.launch(rows).read()
    return live.peak


WIDE_HEAD = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 20000}
WIDE_MLP = {"hidden_size": 128, "intermediate_size": 2048, "vocab_size": 320}
MANY_HEADS = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 320, "num_heads": 16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "tokens", "seqs"),
    [
        (WIDE_HEAD, 160, 160),
        (WIDE_HEAD, 64, 4),
        (WIDE_MLP, 512, 2),
        (MANY_HEADS, 512, 2),
    ],
)
def test_a_step_takes_at_most_the_estimated_memory(
    sizes: dict[str, int], tokens: int, seqs: int, dtype: str
) -> None:
    defaults = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    chosen: dict[str, Any] = {**defaults, **sizes}
    demand = demand_of(
        config_of(**chosen),
        dtype=dtype,
        device="cpu",
        kernels="torch",
        graphs=False,
        max_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=512,
    )
    peak, estimate = peak_of_a_step(demand), activation_bytes(demand, 512)
    assert estimate / 8 <= peak <= estimate + (1 << 20)  # small tensors fit in SPARE_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("sizes", "max_model_len"), [(WIDE_HEAD, 512), (WIDE_MLP, 32)])
def test_a_step_of_gemma2_takes_at_most_the_estimated_memory(
    sizes: dict[str, int], max_model_len: int, dtype: str
) -> None:
    """Its gelu is computed in float32, and its logits are changed before they are sampled."""
    defaults = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    config = replace(
        config_of(tied=True, **{**defaults, **sizes}),
        architecture="Gemma2ForCausalLM",
        qk_norm=False,
        activation="gelu_tanh",
        norms_after=True,
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        embed_scale=8.0,
        windows=(64, None),
    )
    demand = demand_of(
        config,
        dtype=dtype,
        device="cpu",
        kernels="torch",
        graphs=False,
        max_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=max_model_len,
    )
    peak, estimate = peak_of_a_step(demand), activation_bytes(demand, max_model_len)
    assert estimate / 8 <= peak <= estimate + (1 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "experts"),
    [
        (64, {"size": 2048, "top_k": 2}),
        (2048, {"size": 64, "top_k": 1, "scoring": "sigmoid", "float32_router": True}),
        (64, {"size": 16, "top_k": 1, "shared_size": 2048, "shared_gate": True}),
    ],
)
def test_a_step_with_experts_takes_at_most_the_estimated_memory(
    hidden: int, experts: dict[str, Any], dtype: str
) -> None:
    usual: dict[str, Any] = {"num_experts": 3, "scoring": "softmax", "renormalize": True}
    config = replace(
        config_of(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            hidden_size=hidden,
            intermediate_size=64,
            vocab_size=320,
        ),
        architecture="Qwen3MoeForCausalLM",
        experts=ExpertsConfig(layers=(False, True), **{**usual, **experts}),
    )
    demand = demand_of(
        config,
        dtype=dtype,
        device="cpu",
        kernels="torch",
        graphs=False,
        max_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=32,
    )
    peak, estimate = peak_of_a_step(demand), activation_bytes(demand, 32)
    assert estimate / 8 <= peak <= estimate + (1 << 20)


def test_a_cpu_needs_memory_for_two_copies_of_the_head_while_it_packs_it() -> None:
    config = config_of()
    head = config.vocab_size * config.hidden_size
    cpu = demand_of(config, device="cpu", graphs=False, kernels="torch")
    assert weight_bytes(cpu) == 2 * (count_weights(config) + head)
    assert weight_bytes(demand_of(config)) == 2 * count_weights(config)


@pytest.mark.parametrize(
    ("seqs", "sizes", "largest"),
    [
        (1, 2, 16),
        (2, 3, 32),
        (3, 5, 48),
        (8, 8, 128),
        (216, 39, 472),
        (256, 43, 512),
        (257, 45, 513),
    ],
)
def test_the_recorded_sizes_hold_max_num_seqs_and_room_for_tails(
    seqs: int, sizes: int, largest: int
) -> None:
    found = buckets(seqs)
    assert (len(found), found[-1]) == (sizes, largest)
    assert sorted(set(found)) == list(found)
    assert seqs in found


def test_batch_invariant_kernels_need_memory_for_the_splits_that_they_store() -> None:
    config = config_of(vocab_size=1000)  # layers need more memory than logits
    plain, exact = (
        activation_bytes(demand_of(config, stored_splits=each), 1) for each in (False, True)
    )
    assert exact - plain == STORED_SPLIT_BYTES


def test_eager_mode_needs_no_memory_for_graphs() -> None:
    with_graphs, eager = demand_of(), demand_of(graphs=False)
    assert graph_bytes(eager) == 0
    saved = fixed_bytes(with_graphs, 4096) - fixed_bytes(eager, 4096)
    assert saved == graph_bytes(with_graphs) > 0


def test_graphs_need_memory_for_the_layers_and_none_for_sampling() -> None:
    """256 rows of Qwen3-8B's logits and of what sampling makes of them would be 0.8 GiB more."""
    config = config_of()
    sizes = buckets(256)
    layers = sizes[-1] * 2 * (3 * config.hidden_size + 4 * config.intermediate_size)
    hidden = sum(sizes) * 2 * config.hidden_size
    records = len(sizes) * config.num_layers * GRAPH_LAYER_BYTES
    assert graph_bytes(demand_of(config)) == layers + hidden + records
    other_head = config_of(vocab_size=1000)
    assert graph_bytes(demand_of(other_head)) == graph_bytes(demand_of(config))


@pytest.mark.parametrize(
    ("reserved", "free", "resident"),
    [
        (15.0, 64.0, 15.0),  # nothing else changed: this process's context is among the others
        (15.0, 63.875, 15.125),  # kernels were loaded
        (15.0, 34.0, 15.25),  # another process loaded 30 GiB
        (15.0, 64.5, 15.0),  # another process gave back 0.5 GiB
        (15.0, 79.0, 15.0),
        (0.0, 0.0, 0.25),
    ],
)
def test_what_other_processes_take_or_give_back_does_not_count_as_ours(
    reserved: float, free: float, resident: float
) -> None:
    """Before the start, 1 of 80 GiB was in use."""
    assert LOADED_CODE_BYTES == GIB / 4
    room = MemoryBudget(total=80 * GIB, others=GIB)
    found = measured_bytes(reserved=int(reserved * GIB), step=7, free=int(free * GIB), room=room)
    assert found == Measured(resident=int(resident * GIB), step=7)


def test_two_engines_that_start_at_once_get_pools_of_the_same_size() -> None:
    """Each has 15 GiB of weights and a context of 0.5 GiB, and measures while the other already
    holds everything it ever will, or nothing yet."""
    total, context, weights, step = 80 * GIB, GIB // 2, 15 * GIB, GIB
    room = MemoryBudget(total=total, others=2 * context, share=0.45)
    demand = demand_of(max_model_len=4096)
    blocks = set()
    for other in (0, 10 * GIB, weights + 18 * GIB):
        free = total - room.others - weights - other
        found = measured_bytes(reserved=weights, step=step, free=free, room=room)
        blocks.add(free_blocks(replace(demand, measured=found), room))
    most, least = max(blocks), min(blocks)
    held = 2 * (pool_bytes(demand, most) + weights + step + context + SPARE_BYTES["cuda"])
    assert held + 2 * graph_bytes(demand) <= 0.9 * total
    assert (most - least) * demand.layout.block_bytes <= LOADED_CODE_BYTES + GIB // 100


def test_sampling_with_kernels_takes_at_most_the_estimated_memory() -> None:
    """Each row has a grammar, changed logits and logprobs. The kernel draws in place."""
    vocab, rows = 20_001, 16
    step = largest_step(
        max_batched_tokens=rows, max_num_seqs=rows, longest=1, block_size=4, vocab_size=vocab
    )
    samples = [row.samples[0] for row in step]
    live = LiveBytes()
    with live:
        logits_SV = torch.randn(rows, vocab)
        chosen = choose(
            *(logits_SV, samples, draws_of(samples, torch.device("cpu"))),
            lambda logits_SV, _: logits_SV.argmax(dim=-1),
            changed=range(rows),
            asking=dict.fromkeys(range(rows), 1),
        )
    assert chosen.logprobs is not None
    estimate = rows * vocab * (LOGIT_BYTES + SAMPLING_BYTES["triton"])
    assert estimate / 2 < live.peak <= estimate + (1 << 18)


def test_measured_memory_replaces_the_estimates_of_weights_and_activations() -> None:
    demand = demand_of(graphs=False)
    measured = replace(demand, measured=Measured(resident=5, step=7))
    assert fixed_bytes(measured, 4096) == 12 + SPARE_BYTES["cuda"]


@pytest.mark.parametrize(
    ("tokens", "seqs", "longest", "lengths"),
    [
        (10, 3, 100, [4, 3, 3]),
        (3, 8, 100, [1, 1, 1]),
        (100, 2, 20, [20, 20]),
        (7, 1, 100, [7]),
    ],
)
def test_the_largest_step_reaches_every_limit(
    tokens: int, seqs: int, longest: int, lengths: list[int]
) -> None:
    rows = largest_step(
        max_batched_tokens=tokens,
        max_num_seqs=seqs,
        longest=longest,
        block_size=4,
        vocab_size=20,
    )
    assert [len(row.tokens) for row in rows] == lengths
    for row in rows:
        assert len(row.blocks) * 4 >= len(row.tokens)
        assert set(row.blocks) == {1}
        [sample] = row.samples
        assert sample.position == len(row.tokens)
        assert sample.matcher is not None
        assert all(permits(sample.matcher.mask(), id) for id in range(20))
