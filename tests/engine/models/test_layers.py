"""Parts of the models against transformers: rope frequencies, logits, bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.attention.cpu_bf16 import multiplies_bf16
from baton_engine.build import build_runner
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.interface import PromptAsk, Row
from baton_engine.layers.linear_method import (
    HEAD_ROWS,
    head_product,
    twice_product,
    widened_product,
)
from baton_engine.layers.rotary import Rope, inverse_frequencies, rotate
from baton_protocol.ids import BlockId
from baton_protocol.policies import DType
from baton_protocol.sampling import SamplingParams
from tests.support.engines.exactness import reference_logprobs
from tests.support.engines.tiny_models import EXPERT_MODELS, MORE_MODELS, TINY_MODELS, prompt_of
from tests.support.engines.torch_engines import ask

TOP_20 = SamplingParams(temperature=0.0, logprobs=20)


def top_logprobs(folder: Path, prompt: list[int], dtype: DType) -> dict[int, float]:
    settings = TorchSettings(model=folder, dtype=dtype, threads=1, kv_blocks=70)
    blocks = [BlockId(block) for block in range(1, 71)]
    row = Row(prompt, 0, blocks, ask(len(prompt), TOP_20))
    [sample] = build_runner(settings).launch([row]).read()[0].samples
    assert sample.logprobs is not None
    return {each.id: each.logprob for each in sample.logprobs.top}


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3-gqa2", "qwen3-bias-linear-rope"])
def test_rope_frequencies_equal_those_of_transformers(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(name)
    expected = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    config = read_config(folder)
    actual = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


# `max_position_embeddings` is 4096.
YARN: dict[str, dict[str, Any]] = {
    "defaults": {"factor": 4.0},
    "an original length": {"factor": 32.0, "original_max_position_embeddings": 128},
    "bounds between frequencies": {
        **{"factor": 32.0, "original_max_position_embeddings": 128, "truncate": False},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
    "equal bounds": {"factor": 2.0, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "other turns": {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 12.5},
    "two scales": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    "one scale": {"factor": 40.0, "mscale": 0.7},
    "an attention factor": {"factor": 4.0, "attention_factor": 1.3, "mscale": 0.7},
    "the ratio of lengths": {"factor": None, "original_max_position_embeddings": 256},
    "a context that is no longer": {"factor": 1.0},
}


@pytest.mark.parametrize("name", YARN)
def test_yarn_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 5e4, **YARN[name]}
    theirs = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        rope_parameters=rope,
        head_dim=48,
        max_position_embeddings=4096,
    )
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    actual = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(actual, inv_freq, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_rotation_keeps_norms_and_leaves_position_0_unchanged() -> None:
    from baton_engine.config.model_config import RopeConfig

    rope = Rope(RopeConfig(type="default", theta=1e4), 8, torch.float32, torch.device("cpu"))
    heads = torch.randn(3, 2, 8)
    rotated = rotate(heads, rope.tables(torch.tensor([0, 1, 500])))
    torch.testing.assert_close(rotated[0], heads[0])
    torch.testing.assert_close(rotated.norm(dim=-1), heads.norm(dim=-1))
    assert not torch.allclose(rotated[1], heads[1])


@pytest.mark.parametrize("name", [*TINY_MODELS, *MORE_MODELS, *EXPERT_MODELS])
def test_logprobs_are_within_1e_4_of_transformers(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    folder, prompt = tiny_model(name), prompt_of(300, seed=5)
    expected = reference_logprobs(folder, prompt)
    for id, logprob in top_logprobs(folder, prompt, "float32").items():
        assert logprob == pytest.approx(expected[id], abs=1e-4)


@pytest.mark.parametrize("vocab", [320, 2 * HEAD_ROWS + 100])
def test_logits_of_a_bfloat16_head_are_not_rounded_to_bfloat16(vocab: int) -> None:
    """In bfloat16, logits of 16 to 32 would be multiples of 1/8."""
    torch.manual_seed(0)
    x_SD, head_VD = torch.randn(5, 64).bfloat16(), torch.randn(vocab, 64).bfloat16()
    exact_SV = x_SD.double() @ head_VD.double().T
    logits_SV = head_product(head_VD)(x_SD)
    assert logits_SV.dtype == torch.float32
    assert exact_SV.abs().max() > 16
    torch.testing.assert_close(logits_SV.double(), exact_SV, rtol=2**-16, atol=1e-4)
    if multiplies_bf16():  # the path of CPUs with AMX
        twice_SV = twice_product(head_VD)(x_SD)
        torch.testing.assert_close(twice_SV.double(), exact_SV, rtol=2**-16, atol=1e-4)
    # The path of CPUs without bfloat16 products.
    wide_SV = widened_product(head_VD)(x_SD)
    torch.testing.assert_close(wide_SV.double(), exact_SV, rtol=2**-20, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_logits_of_a_bfloat16_head_on_cuda_are_not_rounded_to_bfloat16() -> None:
    x_SD = torch.randn(5, 64, device="cuda").bfloat16()
    head_VD = torch.randn(320, 64, device="cuda").bfloat16()
    logits_SV = head_product(head_VD)(x_SD)
    assert logits_SV.dtype == torch.float32
    exact_SV = x_SD.double() @ head_VD.double().T
    torch.testing.assert_close(logits_SV.double(), exact_SV, rtol=2**-18, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa2-tied", "qwen3-gqa2"])
def test_the_two_best_logits_of_a_bfloat16_model_are_never_equal(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """With rounded logits some would be equal, and a greedy sample would take the lower id although
    the other is likelier."""
    settings = TorchSettings(model=tiny_model(name), dtype="bfloat16", threads=1, kv_blocks=70)
    runner, prompt = build_runner(settings), prompt_of(256, seed=7)
    blocks = [BlockId(block) for block in range(1, 17)]
    row = Row(prompt, 0, blocks, prompt=PromptAsk(tuple(prompt[1:]), 2))
    [result] = runner.launch([row]).read()
    assert len(result.prompt) == 255
    for position in result.prompt:
        best, second = position.top
        assert best.logprob > second.logprob


@pytest.mark.parametrize(
    "name", ["llama-gqa1", "qwen3-gqa4", "phi3-long-rope", "gemma2", "gpt-oss"]
)
def test_bfloat16_is_finite_and_close_to_float32(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """The bound is loose: 8 bits of mantissa through a few layers with large random weights."""
    folder, prompt = tiny_model(name), prompt_of(100, seed=6)
    exact = top_logprobs(folder, prompt, "float32")
    rounded = top_logprobs(folder, prompt, "bfloat16")
    assert all(abs(logprob) < 1e4 for logprob in rounded.values())  # NaN fails
    common = exact.keys() & rounded.keys()
    assert len(common) >= 12
    assert max(abs(exact[id] - rounded[id]) for id in common) < 0.5
