"""Models that transformers' code computes: what is refused and why, weights, memory, fingerprint.

That their ids equal those of transformers is in test_exactness, where each is a row.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.families import read_config
from baton_engine.errors import EngineError, SettingsError, UnsupportedModel, WeightsError
from baton_engine.interface import ComputedStep, Launched, Row, RowResult
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_engine.models.bridge.kernels import use_kernels
from baton_engine.models.bridge.learn import window_of
from baton_engine.runner.state_check import check_state
from baton_protocol.layout import KVLayout
from baton_protocol.request import PositionLogprobs, TokenLogprob
from tests.support.engines.tiny_models import BRIDGE_MODELS, prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

TinyModel = Callable[[str], Path]
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 1024,
    "vocab_size": 320,
}
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
# What is refused: the config.json, and what the error says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ALiBi outside the interface": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 1},
        "does not go through transformers' interface",
    ),
    "attention by class": (
        {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_layer": 1},
        "does not go through transformers' interface",
    ),
    "recurrent state": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "keeps a state that is no KV",
    ),
    "recurrent layers": (
        {**GPT2, "layer_types": ["full_attention", "linear_attention"]},
        "layers of the kind 'linear_attention' keep a state that is no KV",
    ),
    "encoder and decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        "no causal language model",
    ),
    "cross attention": ({**GPT2, "add_cross_attention": True}, "it has cross attention"),
    "attention to later tokens": (
        {"architectures": ["BertLMHeadModel"], "model_type": "bert", **SMALL},
        "neither causal nor a sliding window",
    ),
    "images": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        "parts beside the language model: vision_config",
    ),
    "chunks": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"},
        "layers of the kind 'chunked_attention'",
    ),
    "code in the folder": (
        {
            "architectures": ["NewForCausalLM"],
            "model_type": "new",
            "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"},
        },
        "auto_map.*which Baton never runs",
    ),
    "unknown": ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "no model_type 'new'"),
    "another head": ({**GPT2, "architectures": ["GPT2ForTokenClassification"]}, "no causal"),
    "quantized": (
        {**GPT2, "quantization_config": {"quant_method": "gptq"}},
        "quantization_config is not supported",
    ),
    "wrong type": ({**GPT2, "n_embd": "wide"}, "config.json: transformers refuses it: .*n_embd"),
    "wrong value": ({**GPT2, "n_head": 7}, "cannot be built"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    values, why = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(EngineError, match=why) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_the_code_in_a_folder_never_runs(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The folder names code of its own for an architecture that transformers has."""
    folder, traces = tmp_path / "model", tmp_path / "traces"
    shutil.copytree(tiny_model("gpt2"), folder)
    code = f"open({str(traces)!r}, 'w')\n"
    for name in ("configuration_own.py", "modeling_own.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    values = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps({**values, "auto_map": own}))
    prompts = [prompt_of(20)]
    expected = generate_ids(small_engine(tiny_model("gpt2")), prompts)
    assert generate_ids(small_engine(folder), prompts) == expected
    assert not traces.exists()


def test_without_transformers_the_error_says_what_to_install(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"pip install '\.\[bridge\]'"):
        read_config(folder)


@pytest.mark.parametrize("name", ["mistral-window", "gpt-oss"])
def test_model_impl_chooses_whose_code_computes_a_model(
    name: str, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """With windows, with and without attention sinks."""
    folder, prompts = tiny_model(name), [prompt_of(90), prompt_of(7)]
    engines = {}
    for impl in ("auto", "transformers"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "baton_engine"):
            engines[impl] = small_engine(folder, model_impl=impl)
        told = [line for line in caplog.messages if "computed by transformers' code" in line]
        assert len(told) == (impl == "transformers")
    own, bridged = engines["auto"], engines["transformers"]
    assert generate_ids(bridged, prompts) == generate_ids(own, prompts)
    assert (own.info.exact, bridged.info.exact) == ("bitwise", "numeric")
    assert own.info.layout == bridged.info.layout
    assert own.info.fingerprint != bridged.info.fingerprint
    with pytest.raises(UnsupportedModel, match=r"\['GPT2LMHeadModel'\] is not supported"):
        read_config(tiny_model("gpt2"), "baton")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 1025}, "--max-model-len 1025 exceeds .* max_position_embeddings 1024"),
        ({"batch_invariant": "on"}, "--batch-invariant on: .*computed by transformers' code"),
        ({"model_impl": "vllm"}, "--model-impl vllm is unknown; use auto, baton, transformers"),
    ],
)
def test_settings_that_the_bridge_cannot_keep_are_refused(
    settings: dict[str, Any], message: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(SettingsError, match=message):
        small_engine(tiny_model("gpt2"), **settings)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "phimoe" else pytest.mark.long)
        for name in BRIDGE_MODELS
    ],
)
def test_the_estimate_counts_every_weight(name: str, tiny_model: TinyModel) -> None:
    """The checkpoint has each weight once, and none that is tied to another."""
    from safetensors import safe_open

    folder = tiny_model(name)
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        saved = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert count_weights(read_config(folder)) == saved


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


BIAS = "transformer.h.1.mlp.c_fc.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(BIAS), f"lacks {BIAS}"),
        (
            lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}),
            "has no use for: extra.weight",
        ),
        (
            lambda tensors: tensors.update({BIAS: torch.zeros(7)}),
            rf"{BIAS} has shape \[7\]; the config asks for \[256\]",
        ),
    ],
    ids=["missing", "left over", "another shape"],
)
def test_wrong_weights_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("gpt2"), folder)
    _change(folder, change)
    with pytest.raises(WeightsError, match=message):
        small_engine(folder)


def test_a_folder_with_an_adapter_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("gpt2"), folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="holds an adapter"):
        small_engine(folder)


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    engines = [small_engine(tmp_path, load_format="dummy") for _ in range(2)]
    first, second = (generate_ids(engine, [prompt_of(9)]) for engine in engines)
    assert first == second
    assert engines[0].info.fingerprint == engines[1].info.fingerprint


def test_bfloat16_runs_and_gives_float32_logits(tiny_model: TinyModel) -> None:
    engine = small_engine(tiny_model("olmo2"), dtype="bfloat16")
    [ids] = generate_ids(engine, [prompt_of(50)])
    assert len(ids) == 64


class Scaled(torch.nn.Module):
    """An RMSNorm whose outputs are a thousandth larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(64)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * torch.nn.functional.rms_norm(x, (64,), self.weight, self.eps)


def _mlp(activation: torch.nn.Module) -> torch.nn.Module:
    llama: Any = import_module("transformers.models.llama.modeling_llama")
    mlp: torch.nn.Module = llama.LlamaMLP(llama.LlamaConfig(hidden_size=64, intermediate_size=96))
    mlp.act_fn = activation
    return mlp


def _norm_of(family: str, name: str) -> torch.nn.Module:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    norm: torch.nn.Module = getattr(module, name)(64)
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return norm


# Modules, and whether Baton's kernels compute the same.
KERNELS: dict[str, tuple[Callable[[], torch.nn.Module], bool]] = {
    "RMSNorm": (lambda: _norm_of("llama", "LlamaRMSNorm"), True),
    "RMSNorm of 1 + weight": (lambda: _norm_of("gemma", "GemmaRMSNorm"), True),
    "LayerNorm": (lambda: torch.nn.LayerNorm(64, bias=False), False),
    "scaled RMSNorm": (Scaled, False),
    "MLP with silu": (lambda: _mlp(torch.nn.SiLU()), True),
    "MLP with gelu": (lambda: _mlp(torch.nn.GELU()), False),
    "MLP with a clamped gate": (
        lambda: _mlp(torch.nn.Sequential(torch.nn.Hardtanh(-7.0, 7.0), torch.nn.SiLU())),
        False,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
@torch.inference_mode()
def test_kernels_replace_what_computes_the_same(name: str, dtype: torch.dtype) -> None:
    make, replaced = KERNELS[name]
    torch.manual_seed(0)
    module = make().to(dtype)
    x_1TD = torch.randn(1, 7, 64).to(dtype)
    expected_1TD = module(x_1TD)
    use_kernels(module, WeightSlots(dtype, torch.device("cpu")))
    assert ("forward" in vars(module)) == replaced
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(module(x_1TD), expected_1TD, rtol=bound, atol=bound)


WINDOWED: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (lambda b, h, q, k: k <= q, None),
    "window": (lambda b, h, q, k: (k <= q) & (k > q - 40), 40),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_is_read_from_a_mask(name: str) -> None:
    function, window = WINDOWED[name]
    assert window_of(function) == window


class OtherState:
    """A runner whose log-probabilities depend on how a sequence is cut, as with a state that is no
    KV, by `leak`."""

    def __init__(self, leak: float) -> None:
        self._leak = leak

    def launch(self, rows: Sequence[Row]) -> Launched:
        return ComputedStep([self._result(row) for row in rows])

    def _result(self, row: Row) -> RowResult:
        targets = () if row.prompt is None else row.prompt.targets
        lost = self._leak if row.start else 0.0  # in all pieces but the first
        return RowResult(
            prompt=tuple(PositionLogprobs(TokenLogprob(id, -1.0 - lost)) for id in targets)
        )


@pytest.mark.parametrize(("leak", "refused"), [(1e-4, False), (0.3, True), (float("nan"), True)])
def test_a_model_whose_state_is_more_than_kv_is_refused(
    leak: float, refused: bool, tiny_model: TinyModel
) -> None:
    layout = KVLayout(2, 2, 16, 16, "float32", 2)
    runner: Any = OtherState(leak)
    config = read_config(tiny_model("gpt2"))

    def expected(tokens: Sequence[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    if not refused:
        return check_state(runner, layout, config, expected)
    with pytest.raises(UnsupportedModel, match="depend on more than the KV before them"):
        check_state(runner, layout, config, expected)
