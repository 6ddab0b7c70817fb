"""Parts of the models (O-MDL): attention over the paged cache, norms, rope and sizes. Also the
recorded sizes of decode steps (O-NAN)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.interface import KVSlots, StepAttention
from baton_engine.config.buckets import buckets
from baton_engine.config.families import read_config
from baton_engine.config.model_config import Activation, ModelConfig, RopeConfig
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.decoder_layers import GatedMLP, Linear, RMSNorm
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import Rope, rotate
from baton_engine.models.decoder import Decoder, DecoderLayer
from baton_engine.models.registry import build_model
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.decoding import Driver, RecordingGraphs, make_runner, streams
from tests.support.engines.demands import kv_layout
from tests.support.engines.small_pool import kv_of

CPU = torch.device("cpu")
Rows = Sequence[Sequence[float]]

Q: Rows = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
K: Rows = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]]
V: Rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
ALL_THREE = [5.711177, 6.711177, 7.711177, 8.711177]


def attention_output(
    q: Any, k: Any, v: Any, *, start: int = 0, blocks: Sequence[int] = (1,)
) -> Any:
    """Attention outputs of len(q) tokens after `start` cached tokens. k and v [S, K, H] include the
    cached tokens."""
    q_TNH, k_SKH, v_SKH = (torch.as_tensor(each, dtype=torch.float32) for each in (q, k, v))
    layout = kv_layout(heads=k_SKH.shape[1], dim=k_SKH.shape[2], block=16)
    memory = TorchMemory(layout, 16, CPU)
    kv_of(memory).normal_()
    table = [BlockId(block) for block in blocks]
    backend = TorchAttention(memory, specs_of(memory.layout, q_TNH.shape[1]))
    if start:
        past = backend.begin(batch_of([Row([0] * start, 0, table)], layout))
        past.attend(0, torch.zeros(start, *q_TNH.shape[1:]), k_SKH[:start], v_SKH[:start])
    step = backend.begin(batch_of([Row([0] * q_TNH.shape[0], start, table)], layout))
    return step.attend(0, q_TNH, k_SKH[start:], v_SKH[start:])


def one_head(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)[:, None]


@pytest.mark.parametrize("query", range(3))
def test_a_query_over_three_keys_gives_the_expected_output_O_MDL_1(query: int) -> None:
    """Each query is the newest of three tokens, so no key is masked."""
    q = one_head([Q[query]])
    out = attention_output(q, one_head(K), one_head(V), start=2)[0, 0]
    assert out.tolist() == pytest.approx(ALL_THREE, abs=1e-5)
    weights = attention_output(q, one_head(K), torch.eye(3, 4)[:, None], start=2)[0, 0]
    assert weights.tolist() == pytest.approx([0.274069, 0.274069, 0.451863, 0], abs=1e-6)


def test_attention_in_a_prompt_is_causal_O_MDL_1b() -> None:
    out = attention_output(one_head(Q), one_head(K), one_head(V))[:, 0]
    assert out[0].tolist() == pytest.approx([1, 2, 3, 4])
    assert out[1].tolist() == pytest.approx([3, 4, 5, 6])
    assert out[2].tolist() == pytest.approx(ALL_THREE, abs=1e-5)


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        ([0.5], [1]),
        ([0.3, 0.7], [0.401312, 0.598688]),
        ([0.2, 0.4, 0.6], [0.269307, 0.328933, 0.401760]),
        ([0.1, 0.3, 0.5, 0.8], [0.174612, 0.213272, 0.260491, 0.351626]),
    ],
)
def test_attention_weights_are_the_softmax_over_the_visible_keys_O_MDL_2(
    scores: list[float], weights: list[float]
) -> None:
    q: Rows = [[math.sqrt(4), 0, 0, 0]]
    k: Rows = [[score, 0, 0, 0] for score in scores]
    out = attention_output(
        one_head(q), one_head(k), torch.eye(len(k), 4)[:, None], start=len(k) - 1
    )
    assert out[0, 0, : len(k)].tolist() == pytest.approx(weights, abs=1e-6)


def test_a_token_attends_to_itself_and_earlier_tokens_O_MDL_3() -> None:
    zeros = torch.zeros(4, 1, 4)
    out = attention_output(zeros, zeros, torch.eye(4)[:, None])[:, 0]
    assert torch.equal(out > 0, torch.ones(4, 4).tril() > 0)


def count_parameters(slots: WeightSlots, part: str = "") -> int:
    """Number of parameters in the slots whose name contains `part`."""
    return sum(math.prod(one.shape) for name, one in slots.parameters.items() if part in name)


def test_a_linear_layer_has_the_expected_number_of_parameters_O_MDL_5() -> None:
    slots = WeightSlots(torch.float32, torch.device("meta"))
    Linear(slots, ["linear"], [3072], 768, True)
    assert count_parameters(slots) == 2_362_368


def llama(folder: Path, **changes: int) -> ModelConfig:
    """The config of Llama-2-7B with the given changes."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(values | changes))
    return read_config(folder)


@pytest.fixture
def llama_7b(tmp_path: Path) -> WeightSlots:
    """The weight slots of Llama-2-7B, without memory."""
    slots = WeightSlots(torch.bfloat16, torch.device("meta"))
    build_model(llama(tmp_path), slots)
    return slots


def test_the_parts_of_llama_2_7b_have_the_expected_parameters_O_MDL_5b_O_MDL_5c_O_MDL_5d(
    llama_7b: WeightSlots,
) -> None:
    assert count_parameters(llama_7b, "embed_tokens") == 131_072_000
    layer = "model.layers.7."
    assert count_parameters(llama_7b, f"{layer}self_attn") == 67_108_864
    assert count_parameters(llama_7b, f"{layer}mlp") == 135_266_304
    for part in "qkvo":
        assert count_parameters(llama_7b, f"{layer}self_attn.{part}_proj") == 16_777_216
    for part in ("gate", "up", "down"):
        assert count_parameters(llama_7b, f"{layer}mlp.{part}_proj") == 45_088_768
    norms = [name for name in llama_7b.parameters if name.startswith(layer) and "norm" in name]
    assert sum(math.prod(llama_7b.parameters[name].shape) for name in norms) == 8_192


def test_llama_2_7b_has_the_expected_parameters_and_shares_O_MDL_5e_O_MDL_5f(
    llama_7b: WeightSlots,
) -> None:
    total = count_parameters(llama_7b)
    assert count_parameters(llama_7b, "model.layers.7.") == 202_383_360
    assert count_parameters(llama_7b, "model.layers.") == 6_476_267_520
    assert total == 6_738_415_616
    ends = count_parameters(llama_7b, "embed_tokens") + count_parameters(llama_7b, "lm_head")
    for part, percent in (
        (count_parameters(llama_7b, "self_attn"), 31.87),
        (count_parameters(llama_7b, "mlp"), 64.24),
        (ends, 3.89),
        (count_parameters(llama_7b, "norm"), 0.004),
    ):
        assert 100 * part / total == pytest.approx(percent, abs=0.005 if percent > 1 else 0.0005)


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"),
    [(768, 12, 64), (1280, 20, 64), (4096, 32, 128), (8192, 64, 128)],
)
def test_head_dim_is_hidden_size_divided_by_heads_O_MDL_6(
    tmp_path: Path, hidden: int, heads: int, head_dim: int
) -> None:
    config = llama(tmp_path, hidden_size=hidden, num_attention_heads=heads)
    assert config.head_dim == head_dim


@pytest.mark.parametrize("start", [0, 1], ids=["prompt", "decode"])
def test_a_kv_head_serves_consecutive_query_heads_O_MDL_7(start: int) -> None:
    v = torch.zeros(start + 1, 2, 4)
    v[:, 1] = 1
    out = attention_output(torch.ones(1, 8, 4), torch.ones(start + 1, 2, 4), v, start=start)
    assert out[0, :, 0].tolist() == [0] * 4 + [1] * 4


def test_rms_norm_gives_the_expected_output_O_MDL_8() -> None:
    norm = RMSNorm(WeightSlots(torch.float32, CPU), "norm", 4, 1e-6)
    norm.weight_D.fill_(1)
    actual = norm(torch.tensor([[1.0, 2, 3, 4]]))[0].tolist()
    assert actual == pytest.approx([0.365148, 0.730297, 1.095445, 1.460593], abs=1e-6)


def gated_mlp(
    *, gate: float, up: float, up_bias: float = 0.0, activation: Activation = "silu"
) -> GatedMLP:
    """A GatedMLP of width 1: x -> activation(gate x) * (up x + up_bias)."""
    slots = WeightSlots(torch.float32, CPU)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        norm_eps=1e-6,
        max_positions=1,
        tied=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=True,
        qk_norm=False,
        rope=RopeConfig(type="default", theta=1e4),
        eos_ids=(),
        dtype="float32",
        activation=activation,
    )
    mlp = GatedMLP(slots, "mlp", config)
    values = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": 1.0}
    for name, parameter in slots.parameters.items():
        parameter.place.fill_(
            (values | {"up_proj.bias": up_bias}).get(name.removeprefix("mlp."), 0.0)
        )
    slots.finish()
    return mlp


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        pytest.param(
            "silu", [-0.238406, -0.268941, 0, 0.311230, 0.731059, 1.761594], id="O-MDL-8c"
        ),
        pytest.param(
            "gelu_tanh", [-0.045402, -0.158808, 0, 0.345714, 0.841192, 1.954598], id="O-MDL-8d"
        ),
    ],
)
def test_activations_give_the_expected_outputs_O_MDL_8c_O_MDL_8d(
    activation: Activation, expected: list[float]
) -> None:
    points = torch.tensor([[-2.0], [-1], [0], [0.5], [1], [2]])
    mlp = gated_mlp(gate=1.0, up=0.0, up_bias=1.0, activation=activation)
    assert mlp(points)[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_gated_mlp_is_silu_of_the_gate_times_up_O_MDL_8e() -> None:
    actual = gated_mlp(gate=1.0, up=3.0)(torch.ones(1, 1)).item()
    assert actual == pytest.approx(2.193176, abs=2e-6)


def rotated(heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Each row of `heads`, rotated for its position, with dim 4 and theta 10000."""
    rope = Rope(RopeConfig(type="default", theta=1e4), 4, torch.float32, CPU)
    return rotate(heads[:, None], rope.tables(torch.tensor(positions)))[:, 0]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, [1, 2, 3, 4]),
        (1, [-1.984111, 1.959901, 2.462378, 4.019800]),
        (2, [-3.144039, 1.919605, -0.339143, 4.039197]),
    ],
)
def test_rope_gives_the_expected_rotation_O_MDL_9(position: int, expected: list[float]) -> None:
    actual = rotated(torch.tensor([[1.0, 2, 3, 4]]), [position])[0].tolist()
    assert actual == pytest.approx(expected, abs=2e-6)


def test_q_times_k_depends_only_on_the_distance_O_MDL_9b() -> None:
    noise = torch.Generator().manual_seed(9)
    q, k = torch.randn(2, 1, 4, generator=noise)
    near, far, other = (
        (rotated(q, [at + distance]) @ rotated(k, [at]).T).item()
        for at, distance in ((0, 5), (700, 5), (0, 6))
    )
    assert near == pytest.approx(far, abs=1e-4)
    assert abs(near - other) > 1e-3


class AveragingAttention:
    """Attention without a cache: each token gets the mean of v up to its position."""

    def slots(self, layer: int) -> KVSlots:
        raise AssertionError("this attention has no pool")

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert not stored
        assert v_TKV is not None
        counts = torch.arange(1, v_TKV.shape[0] + 1)[:, None, None]
        return (v_TKV.cumsum(0) / counts).repeat_interleave(q_TNH.shape[1] // v_TKV.shape[1], dim=1)


def test_the_residual_stream_in_place_equals_x_plus_f_of_norm_x_O_MDL_10(tmp_path: Path) -> None:
    slots = WeightSlots(torch.float32, CPU)
    small = {"num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 50}
    config = llama(tmp_path, hidden_size=64, intermediate_size=96, **small)
    model = Decoder(config, slots)
    noise = torch.Generator().manual_seed(10)
    for parameter in slots.parameters.values():
        parameter.place.normal_(std=0.2, generator=noise)
    slots.finish()
    attention: StepAttention = AveragingAttention()
    positions = torch.arange(7)
    tokens = torch.randint(0, config.vocab_size, (7,), generator=noise)
    actual = model.forward(tokens, positions, attention)
    x = model._embed(tokens)
    rope = model._rope.tables(positions)
    for layer in model._layers:
        x = layer_output(layer, x, rope, attention)
    torch.testing.assert_close(actual, x)


def layer_output(
    layer: DecoderLayer,
    x_TD: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    attention: StepAttention,
) -> torch.Tensor:
    after_attention = x_TD + layer._attention(layer._attention_norm(x_TD), rope, attention)
    return after_attention + layer._mlp(layer._mlp_norm(after_attention))


@pytest.mark.parametrize(("start", "tokens"), [(57, 1), (20, 38)], ids=["decode", "prompt"])
def test_attention_does_not_depend_on_the_block_ids_O_MDL_11(start: int, tokens: int) -> None:
    noise = torch.Generator().manual_seed(11)
    q = torch.randn(tokens, 4, 8, generator=noise)
    k, v = torch.randn(2, 58, 2, 8, generator=noise)
    paged = attention_output(q, k, v, start=start, blocks=[5, 2, 8, 12])
    assert torch.equal(paged, attention_output(q, k, v, start=start, blocks=[1, 2, 3, 4]))
    queries = torch.cat([torch.zeros(start, 4, 8), q])
    # One prompt, without cached tokens.
    whole = attention_output(queries, k, v, blocks=[1, 2, 3, 4])
    torch.testing.assert_close(paged, whole[start:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "most", "recorded"),
    [(1, 512, [1]), (2, 512, [2]), (3, 512, [4]), (5, 512, [8]), (9, 512, [16]), (9, 8, [32])],
)
def test_a_decode_step_is_padded_to_the_next_recorded_size_O_NAN_4(
    tiny_model: Callable[[str], Path], rows: int, most: int, recorded: list[int]
) -> None:
    recorder = RecordingGraphs()
    runner = make_runner(tiny_model("llama-gqa2-tied"), sizes=buckets(most), recorder=recorder)
    made, driver = streams([17] * rows), Driver(runner)
    driver.step(made)
    assert recorder.sizes == []  # prompts of more than 16 tokens are not recorded
    driver.step(made)
    driver.read()
    assert recorder.sizes == recorded


def test_the_recorded_sizes_include_the_largest_batch_O_NAN_4() -> None:
    sizes = buckets(512)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert {*range(16, 513, 16)} <= {*sizes}
    assert 512 in sizes
