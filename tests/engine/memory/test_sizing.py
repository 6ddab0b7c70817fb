"""The memory estimates: a step never takes more, and not much less."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton_engine.attention.selector import attention_for
from baton_engine.config.buckets import buckets
from baton_engine.config.engine_config import STORED_SPLIT_BYTES
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import (
    GRAPH_LAYER_BYTES,
    SPARE_BYTES,
    Demand,
    Measured,
    activation_bytes,
    count_weights,
    fixed_bytes,
    graph_bytes,
    weight_bytes,
)
from baton_engine.models.registry import build_model
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.profile_run import largest_step
from baton_engine.weights.dummy import fill_slots
from tests.support.engines.demands import config_of, demand_of


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the peak bytes of live tensors that were created since it was entered (`peak`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if _is_dense(leaf)}
        for leaf in tree_leaves(out):
            if _is_dense(leaf):
                self._count(_storage(leaf), given)
        return out

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in given:
            return
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def runner_of(demand: Demand, blocks: int) -> TorchRunner:
    slots = WeightSlots(TORCH_DTYPES[demand.layout.dtype], torch.device("cpu"), TORCH_OPS)
    model = build_model(demand.config, slots)
    fill_slots(slots)
    slots.finish()
    memory = TorchMemory(demand.layout, blocks, torch.device("cpu"))
    return TorchRunner(model, memory, attention_for("torch", memory, demand.config))


def peak_of_a_step(demand: Demand) -> int:
    """Peak bytes of live tensors in the largest step on a CPU."""
    assert demand.max_model_len
    rows = largest_step(
        max_batched_tokens=demand.max_batched_tokens,
        max_num_seqs=demand.max_num_seqs,
        longest=demand.max_model_len,
        block_size=demand.layout.block_size,
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


def test_a_cpu_needs_memory_for_two_copies_of_the_head_while_it_packs_it() -> None:
    config = config_of()
    head = config.vocab_size * config.hidden_size
    cpu = demand_of(config, device="cpu", graphs=False, kernels="torch")
    assert weight_bytes(cpu) == 2 * (count_weights(config) + head)
    assert weight_bytes(demand_of(config)) == 2 * count_weights(config)


@pytest.mark.parametrize("seqs", [1, 8, 256, 300])
def test_each_layer_of_each_recorded_size_keeps_its_launches(seqs: int) -> None:
    one, two = (
        graph_bytes(demand_of(config_of(num_layers=layers), max_num_seqs=seqs)) for layers in (1, 2)
    )
    assert two - one == len(buckets(seqs)) * GRAPH_LAYER_BYTES


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
    rows = largest_step(max_batched_tokens=tokens, max_num_seqs=seqs, longest=longest, block_size=4)
    assert [len(row.tokens) for row in rows] == lengths
    for row in rows:
        assert len(row.blocks) * 4 >= len(row.tokens)
        assert set(row.blocks) == {1}
        assert [each.position for each in row.samples] == [len(row.tokens)]
