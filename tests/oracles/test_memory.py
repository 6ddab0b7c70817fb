"""Bytes of weights and KV, number of blocks (O-MEM), bytes of a hand-off (O-XFR), 8-bit KV (O-QNT),
attention's scores and the roofline of a decode step (O-PRF).

The sizes are those that the engine plans from a model's config.json. The oracles' "FP16" is
bfloat16 here, because the engine computes in float32 or bfloat16. Both 16-bit types have 2 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
import torch

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.quantization.online import SCHEMES
from baton_engine.errors import SettingsError
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.online import empty_weight
from baton_engine.memory import estimate
from baton_engine.memory.demand import Measured, MemoryBudget
from baton_engine.memory.estimate import SPARE_BYTES, activation_bytes, count_weights, weight_bytes
from baton_engine.memory.fit import free_blocks
from baton_engine.memory.fit_check import check_fit
from baton_engine.memory.roofline import DecodeRoofline, Machine
from baton_engine.models.registry import build_model
from baton_engine.runner.plan import make_plan
from baton_engine.scheduling.sequence import blocks_for
from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.ids import Fingerprint, NodeId
from baton_protocol.layout import KVLayout
from baton_protocol.policies import Quantization
from baton_protocol.store import Speeds
from baton_router.placement.costs import NodeCosts, RequestFacts
from tests.support.engines.demands import demand_of, kv_layout
from tests.support.nodes.candidates import Candidate, group_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": 32000,
            "hidden_size": self.heads * 128,
            "intermediate_size": 11008,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 4096,
        }


LLAMA_7B = Shape(32, 32, 32)
LLAMA_70B = Shape(80, 64, 8)
LLAMA_70B_MHA = Shape(80, 64, 64)
GQA_8B = Shape(32, 32, 8)

PlanShape = Callable[..., tuple[KVLayout, int]]


@pytest.fixture
def plan_shape(tmp_path: Path) -> PlanShape:
    """Returns (layout, number of blocks) that the engine plans for a shape and settings."""

    def plan(shape: Shape, **settings: int) -> tuple[KVLayout, int]:
        (tmp_path / "config.json").write_text(json.dumps(shape.config()))
        (tmp_path / "model.safetensors").touch()
        chosen: dict[str, Any] = {"kv_memory": 64 * GIB, **settings}
        # The pool may be larger than this machine's memory.
        result = make_plan(TorchSettings(model=tmp_path, overcommit=True, **chosen))
        return result.layout, result.num_blocks

    return plan


def model_of(folder: Path, parameters: int) -> ModelConfig:
    """A model with exactly 7e9 parameters and 500,000 bytes of KV per token in 16 bits, or with
    70e9 parameters and the KV size of Llama-2-70B. The size of the vocabulary makes the number of
    parameters exact."""
    large = parameters > 10**10
    layers, hidden, heads, kv_heads, head_dim, mlp = (
        (80, 8000, 64, 8, 128, 28672) if large else (25, 4000, 50, 50, 100, 11000)
    )

    def config(vocabulary: int) -> ModelConfig:
        values = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(values))
        return read_config(folder)

    return config(1 + (parameters - count_weights(config(1))) // hidden)


@pytest.mark.parametrize(
    ("parameters", "dtype", "size"),
    [
        pytest.param(7 * 10**9, "float32", 28 * 10**9, id="O-MEM-1-float32"),
        pytest.param(7 * 10**9, "bfloat16", 14 * 10**9, id="O-MEM-1-16-bits"),
        pytest.param(70 * 10**9, "float32", 280 * 10**9, id="O-MEM-1b-float32"),
        pytest.param(70 * 10**9, "bfloat16", 140 * 10**9, id="O-MEM-1b-16-bits"),
    ],
)
def test_weights_take_4_or_2_bytes_per_parameter_O_MEM_1_O_MEM_1b_O_QNT_1(
    tmp_path: Path, parameters: int, dtype: str, size: int
) -> None:
    """By the estimate before weights are read, and by the tensors of the model."""
    config = model_of(tmp_path, parameters)
    assert count_weights(config) == parameters
    assert weight_bytes(demand_of(config, dtype=dtype)) == size
    slots = WeightSlots(TORCH_DTYPES[dtype], torch.device("meta"))
    build_model(config, slots)
    assert (
        sum(math.prod(one.shape) * one.dtype.itemsize for one in slots.parameters.values()) == size
    )


@pytest.mark.parametrize("parameters", [7 * 10**9, 70 * 10**9])
@pytest.mark.parametrize(("numbers", "compression"), [("int8", 4), ("fp8", 4), ("int4", 8)])
def test_codes_of_weights_take_a_byte_or_half_a_byte_O_MEM_1_O_MEM_1b_O_MEM_14_O_QNT_1(
    numbers: Quantization, compression: int, parameters: int
) -> None:
    weight = empty_weight(SCHEMES[numbers], parameters // 4000, 4000, torch.device("meta"))
    assert weight.codes_OJ.nbytes * compression == 4 * parameters
    scales = (0 if each is None else each.nbytes for each in (weight.scales_OG, weight.shifts_OG))
    assert SCHEMES[numbers].weight_bytes(*weight.shape) == weight.codes_OJ.nbytes + sum(scales)


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        (1, 524_288),
        (16, 8_388_608),
        (512, 268_435_456),
        (1000, 524_288_000),
        (1024, 536_870_912),
        (2048, 1_073_741_824),
        (4096, 2_147_483_648),
        (8192, 4_294_967_296),
    ],
)
def test_the_kv_of_llama_2_7b_takes_512_kib_per_token_O_MEM_2(
    plan_shape: PlanShape, tokens: int, size: int
) -> None:
    layout, _ = plan_shape(LLAMA_7B)
    assert tokens * layout.token_bytes == size
    assert layout.block_bytes == 8 * MIB


def test_the_kv_of_32_sequences_of_2048_tokens_takes_32_gib_O_MEM_3(plan_shape: PlanShape) -> None:
    assert plan_shape(LLAMA_7B)[0].token_bytes * 2048 * 32 == 34_359_738_368 == 32 * GIB


def test_grouped_queries_divide_the_kv_of_llama_2_70b_by_8_O_MEM_4_O_MEM_4b_O_MEM_4c_O_MEM_13(
    plan_shape: PlanShape,
) -> None:
    layout, _ = plan_shape(LLAMA_70B)
    assert (layout.token_bytes, layout.block_bytes) == (327_680, 5_242_880)
    assert layout.token_bytes * 4096 == 1_342_177_280
    assert layout.token_bytes * 4096 * 32 == 42_949_672_960 == 40 * GIB
    ungrouped, _ = plan_shape(LLAMA_70B_MHA)
    assert ungrouped.token_bytes * 4096 == 10_737_418_240
    assert ungrouped.token_bytes == 8 * layout.token_bytes


@pytest.mark.parametrize(
    ("shape", "page", "block", "token"),
    [
        pytest.param(LLAMA_7B, 262_144, 8 * MIB, 512 * KIB, id="O-MEM-5"),
        pytest.param(GQA_8B, 65_536, 2_097_152, 131_072, id="O-MEM-5b"),
    ],
)
def test_a_layers_share_of_a_block_has_the_expected_size_O_MEM_5_O_MEM_5b(
    plan_shape: PlanShape, shape: Shape, page: int, block: int, token: int
) -> None:
    layout, _ = plan_shape(shape)
    assert msgspec.structs.replace(layout, num_layers=1).block_bytes == page
    assert (layout.block_bytes, layout.token_bytes) == (block, token)


def test_20_gib_hold_2560_blocks_O_MEM_5c(plan_shape: PlanShape) -> None:
    layout, blocks = plan_shape(LLAMA_7B, kv_memory=20 * GIB)
    assert (blocks, blocks * layout.block_size) == (2560, 40_960)


def test_memory_smaller_than_one_block_is_refused_O_MEM_5d(plan_shape: PlanShape) -> None:
    with pytest.raises(SettingsError, match="hold no block of 8388608 bytes"):
        plan_shape(LLAMA_7B, kv_memory=8 * MIB - 1)
    with pytest.raises(SettingsError, match="kv-memory is -1"):
        plan_shape(LLAMA_7B, kv_memory=-1)


def test_the_pool_tensor_has_the_expected_shape_and_size_O_MEM_5e_O_MEM_6b() -> None:
    layout = kv_layout(heads=8, dim=128, block=16, dtype="bfloat16")
    memory = TorchMemory(layout, 15, torch.device("cpu"))
    assert memory.pool.nbytes == MIB
    fields = memory.fields
    assert {name: field.shape for name, field in fields.items()} == dict.fromkeys(
        "kv", (16, 1, 8, 16, 128)
    )
    assert {field.dtype for field in fields.values()} == {torch.bfloat16}
    assert sum(field.numel() for field in fields.values()) == 524_288


@pytest.mark.parametrize(("layers", "size"), [(32, 33_554_432), (28, 29_360_128)])
def test_a_block_of_256_tokens_has_the_expected_size_O_MEM_6(
    plan_shape: PlanShape, layers: int, size: int
) -> None:
    layout, _ = plan_shape(Shape(layers, 32, 8), block_size=256)
    assert layout.block_bytes == size


def test_55_gib_hold_1760_blocks_of_256_tokens_O_MEM_6c(plan_shape: PlanShape) -> None:
    layout, blocks = plan_shape(GQA_8B, block_size=256, kv_memory=55 * GIB)
    assert (blocks, blocks * layout.block_size) == (1760, 450_560)


def test_a_profiling_run_leaves_55_gib_minus_spare_and_padding_O_MEM_6c(tmp_path: Path) -> None:
    """Other processes use 2 GiB, the engine uses 14 GiB, and the peak of a step adds 1 GiB."""
    (tmp_path / "config.json").write_text(json.dumps(GQA_8B.config()))
    demand = demand_of(read_config(tmp_path), block_size=256, graphs=False)
    measured = Measured(resident=14 * GIB, step=1 * GIB)
    room = MemoryBudget(total=80 * GIB, others=2 * GIB, share=0.9)
    spare, padding = SPARE_BYTES["cuda"] // demand.layout.block_bytes, 1
    assert spare == 12
    assert free_blocks(replace(demand, measured=measured), room) == 1760 - spare - padding


def test_a_gpu_of_24_gb_holds_112_tokens_for_each_of_100_users_O_MEM_8(tmp_path: Path) -> None:
    """90 % of 24 GB, minus 14 GB of weights and 2 GB of other memory, is 5.6 GB: 11,200 tokens."""
    demand = demand_of(model_of(tmp_path, 7 * 10**9), graphs=False)
    assert demand.layout.token_bytes == 500_000
    rest = 2 * 10**9 - SPARE_BYTES["cuda"]
    measured = Measured(resident=weight_bytes(demand), step=rest)
    blocks = free_blocks(
        replace(demand, measured=measured), MemoryBudget(total=24 * 10**9, share=0.9)
    )
    tokens = (blocks + 1) * 16  # one block is padding
    assert (tokens, tokens // 100) == (11_200, 112)


def test_weights_of_140_gb_do_not_fit_a_gpu_of_80_gb_O_MEM_8b(tmp_path: Path) -> None:
    demand = demand_of(model_of(tmp_path, 70 * 10**9))
    assert demand.layout.token_bytes == 327_680
    with pytest.raises(SettingsError, match=r"the model does not fit: weights 130\.4 "):
        check_fit(demand, MemoryBudget(total=80 * 10**9))


def test_64_gib_hold_431_requests_of_300_tokens_O_MEM_7d(plan_shape: PlanShape) -> None:
    _, blocks = plan_shape(LLAMA_7B, kv_memory=64 * GIB)
    pool, requests = BlockPool(blocks), 0
    while pool.fits(blocks_for(300, 16)):
        pool.allocate(blocks_for(300, 16))
        requests += 1
    assert (blocks_for(300, 16), requests) == (19, 431)


def test_a_large_request_fits_into_scattered_free_blocks_O_MEM_10b(plan_shape: PlanShape) -> None:
    _, blocks = plan_shape(LLAMA_7B, kv_memory=10 * GIB)
    pool = BlockPool(blocks)
    requests = [pool.allocate(blocks_for(2048, 16)) for _ in range(10)]
    assert (blocks, len(requests[0]), pool.num_free) == (1280, 128, 0)
    for held in requests[::2]:
        pool.release(held)
    assert pool.num_free == 640
    assert len(pool.allocate(blocks_for(4096, 16))) == 256


def unused(tokens: int) -> int:
    return 16 * blocks_for(tokens, 16) - tokens


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 15), (16, 0), (17, 15), (33, 15), (100, 12), (300, 4), (1000, 8)]
)
def test_the_last_block_has_the_expected_number_of_unused_slots_O_MEM_12(
    tokens: int, slots: int
) -> None:
    assert unused(tokens) == slots
    share = {33: 0.3125, 300: 0.0132}.get(tokens)
    if share is not None:
        assert slots / (tokens + slots) == pytest.approx(share, abs=5e-5)


def test_a_request_wastes_7_and_a_half_slots_on_average_O_MEM_12b() -> None:
    waste = mean(unused(tokens) for tokens in range(1, 161))
    assert waste == 7.5
    assert waste / (180 + waste) == pytest.approx(0.04)


def test_kv_bytes_are_proportional_to_the_item_size_O_MEM_14_O_XFR_1d_O_QNT_1_O_QNT_5(
    plan_shape: PlanShape,
) -> None:
    half, _ = plan_shape(LLAMA_7B)
    whole = msgspec.structs.replace(half, dtype="float32")
    byte = msgspec.structs.replace(half, dtype="uint8")
    assert whole.token_bytes == 2 * half.token_bytes == 4 * byte.token_bytes
    assert (byte.token_bytes, byte.block_bytes) == (262_144, 4 * MIB)
    assert msgspec.structs.replace(half, dtype="float16").token_bytes == half.token_bytes
    coded = msgspec.structs.replace(half, codec="int8").stored  # with an exponent per 128 numbers
    assert coded.token_bytes == byte.token_bytes + byte.token_bytes // 128


@pytest.mark.parametrize(
    ("shape", "all_mib", "full_mib"),
    [
        pytest.param(LLAMA_7B, 504, 496, id="O-XFR-1"),
        pytest.param(LLAMA_70B, 315, 310, id="O-XFR-1b"),
        pytest.param(GQA_8B, 126, 124, id="O-XFR-1c"),
    ],
)
def test_a_prompt_of_1000_tokens_has_the_expected_kv_bytes_O_XFR_1_O_XFR_1b_O_XFR_1c(
    plan_shape: PlanShape, shape: Shape, all_mib: int, full_mib: int
) -> None:
    layout, _ = plan_shape(shape)
    root = root_hash(Fingerprint("f" * 32))
    chunks = chunk_hashes(extend_hashes(root, range(1000), 16), layout.chunk_blocks)
    assert blocks_for(1000, 16) == 63
    assert 63 * layout.block_bytes == all_mib * MIB
    assert len(chunks) * layout.chunk_bytes == full_mib * MIB
    assert 1000 - len(chunks) * layout.chunk_tokens == 8


@pytest.mark.parametrize(
    ("shape", "tokens_per_s", "gigabits"),
    [(GQA_8B, 10_000, 10.49), (LLAMA_7B, 10_000, 41.94), (LLAMA_70B, 1000, 2.62)],
)
def test_fetching_is_cheaper_than_computing_above_the_break_even_bandwidth_O_XFR_2(
    plan_shape: PlanShape, shape: Shape, tokens_per_s: int, gigabits: float
) -> None:
    """Placement prices a stored prompt below a computed one only if the link is faster than the
    break-even bandwidth."""
    layout, _ = plan_shape(shape)
    facts = RequestFacts(
        prompt_tokens=1001,
        chunk_tokens=layout.chunk_tokens,
        chunk_bytes=layout.chunk_bytes,
        stored=(True,) * (1000 // layout.chunk_tokens),
    )

    def price(gigabits: float, facts: RequestFacts = facts) -> float:
        speeds = Speeds(
            prefill_tokens_per_s=tokens_per_s,
            decode_step_ms=1.0,
            put_bytes_per_s=1.0,
            get_bytes_per_s=gigabits * 1e9 / 8,
        )
        node = Candidate(node=NodeId("n"), role="decode", speeds=speeds)
        return float(NodeCosts(facts, group_of([node])).prefill_ms[0])

    compute_price = 1000 * 1001 / tokens_per_s
    assert price(0.995 * gigabits) == pytest.approx(compute_price)
    assert price(1.005 * gigabits) < compute_price - 0.001


@pytest.mark.parametrize(
    ("queries", "keys", "scores"),
    [
        (512, 512, 262_144),
        (1, 513, 513),  # the decode step that follows
        (2048, 2048, 4_194_304),
        (8192, 8192, 67_108_864),
        (32768, 32768, 1_073_741_824),
    ],
)
def test_attention_has_a_score_for_each_query_and_key_O_PRF_4(
    queries: int, keys: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of scores are the part of the estimate that grows with queries times keys. Here
    all scores exist at a time, and keys are not padded to whole splits."""
    monkeypatch.setattr(estimate, "SCORES_AT_ONCE", 1 << 60)
    monkeypatch.setattr(estimate, "split_blocks", lambda block_size: 1)

    def size(queries: int, keys: int) -> int:
        demand = demand_of(dtype="float32", kernels="torch", max_num_seqs=0)
        demand = replace(demand, max_batched_tokens=queries, layout=kv_layout(block=1))
        return activation_bytes(demand, keys)

    def growing(queries: int, keys: int) -> int:
        return size(queries, keys) - size(0, keys) - size(queries, 0) + size(0, 0)

    assert growing(queries, keys) == scores * growing(1, 1)


A100 = Machine(bytes_per_s=2e12, operations_per_s=312e12)


def roofline_7b(folder: Path) -> DecodeRoofline:
    """Of 7e9 parameters and 500,000 bytes of KV per token, in 16 bits."""
    config = model_of(folder, 7 * 10**9)
    return DecodeRoofline.of(config, demand_of(config).layout, 2)


@pytest.mark.parametrize(
    ("rows", "gigabytes", "ms", "tokens_per_s", "speedup"),
    [
        pytest.param(1, 14.5, 7.25, 137.9, 1, id="O-PRF-1"),
        pytest.param(32, 30, 15.0, 2133, 15.47, id="O-PRF-2"),
        pytest.param(64, 46, 23.0, 2783, 20.17, id="O-PRF-2b"),
    ],
)
def test_a_decode_step_takes_the_time_of_its_bytes_O_PRF_1_O_PRF_2_O_PRF_2b(
    tmp_path: Path, rows: int, gigabytes: float, ms: float, tokens_per_s: float, speedup: float
) -> None:
    model = roofline_7b(tmp_path)
    kv = rows * model.kv_read(1000)
    assert model.weights_read(rows) + kv == gigabytes * 1e9
    seconds = model.seconds(A100, rows, kv)
    assert seconds == model.byte_seconds(A100, rows, kv) == pytest.approx(ms / 1e3)
    assert rows / seconds == pytest.approx(tokens_per_s, rel=3e-4)
    alone = model.seconds(A100, 1, model.kv_read(1000))
    assert rows * alone / seconds == pytest.approx(speedup, abs=0.005)


def test_products_of_one_token_take_a_160th_of_the_read_O_PRF_1b(tmp_path: Path) -> None:
    model = roofline_7b(tmp_path)
    products = model.operations(1) / 312e12
    assert 1e3 * products == pytest.approx(0.0449, abs=5e-5)
    read = model.byte_seconds(A100, 1, model.kv_read(1000))
    assert read / products == pytest.approx(160, abs=2)


def test_products_take_as_long_as_the_read_of_weights_at_156_rows_O_PRF_2c(tmp_path: Path) -> None:
    model = roofline_7b(tmp_path)
    assert model.balance_rows(A100) == 156
    assert model.seconds(A100, 155, 0) == model.byte_seconds(A100, 155, 0)
    assert model.seconds(A100, 157, 0) > model.byte_seconds(A100, 157, 0)
    assert model.balance_rows(Machine(2e12)) is None
