"""Writes the files of `tests/engine/quantization/tool_files`: layers of a tiny Llama, quantized by
the tools that users have. Needs their packages, which the tests do not:

    pip install accelerate auto-round bitsandbytes compressed-tensors gptqmodel
    python -m tests.support.engines.quantized.write_tool_files

A file has two layers as the tool writes them, `expected.` and their names with the numbers that
the tool itself reads there, and as metadata the quantization_config and the names of plain layers.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PLACE = Path(__file__).parents[3] / "engine" / "quantization" / "tool_files"
LAYERS = ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj")
VOCAB = 64

# Arguments of gptqmodel's QuantizeConfig.
GPTQMODEL: Mapping[str, Mapping[str, Any]] = {
    "gptqmodel act-order": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    "gptqmodel int8": {"bits": 8, "group_size": -1, "sym": True, "desc_act": False},
    "gptqmodel v2 zeros": {
        **{"bits": 4, "group_size": 16, "sym": False, "desc_act": True},
        "format": "gptq_v2",
    },
    "gptqmodel dynamic zeros": {
        **{"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        "dynamic": {
            r"-:.*\.o_proj": {},
            r"+:.*self_attn\..*": {"bits": 8, "group_size": 16},
        },
    },
}
# Arguments of AutoRound, and the format.
AUTO_ROUND: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "auto-round gptq": ({"bits": 4, "group_size": 32, "sym": True}, "auto_round"),
    "auto-round awq": ({"bits": 4, "group_size": 32, "sym": False}, "auto_round:auto_awq"),
    "auto-round as awq": ({"bits": 4, "group_size": 32, "sym": False}, "auto_awq"),
    "auto-round mixed": (
        {
            **{"bits": 4, "group_size": 32, "sym": True},
            "layer_config": {
                "model.layers.0.mlp.down_proj": {"bits": 8},
                "model.layers.0.self_attn.o_proj": {"bits": 16},
            },
        },
        "auto_round",
    ),
}
# Arguments of transformers' BitsAndBytesConfig.
BITSANDBYTES: Mapping[str, Mapping[str, Any]] = {
    "bitsandbytes int8": {"load_in_8bit": True},
    "bitsandbytes nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes nf4 double": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bnb_4bit_use_double_quant": True,
    },
}
# The groups of compressed-tensors: targets, arguments of the weights and of the inputs.
Arguments = Mapping[str, Any] | None
COMPRESSED: Mapping[str, list[tuple[str, Arguments, Arguments]]] = {
    "compressed-tensors w4a16 zeros": [
        ("Linear", {"num_bits": 4, "group_size": 16, "symmetric": False}, None)
    ],
    "compressed-tensors w8a8 static": [
        ("Linear", {"num_bits": 8, "group_size": -1}, {"num_bits": 8, "strategy": "tensor"})
    ],
    "compressed-tensors float static": [
        (
            "Linear",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
        )
    ],
    "compressed-tensors float channel": [
        (
            "Linear",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        )
    ],
    "compressed-tensors nvfp4": [
        (
            "Linear",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            None,
        )
    ],
    "compressed-tensors w8a8 zeros": [
        (
            "Linear",
            {"num_bits": 8, "strategy": "tensor", "symmetric": False},
            {"num_bits": 8, "strategy": "token", "dynamic": True},
        )
    ],
    "compressed-tensors mixed": [
        ("Linear", {"num_bits": 4, "group_size": 32}, None),
        ("re:.*self_attn.*", {"num_bits": 8, "group_size": -1, "symmetric": False}, None),
    ],
}


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        _write_base(root / "base")
        writers: tuple[tuple[Mapping[str, Any], Callable[..., Path]], ...] = (
            (GPTQMODEL, _gptqmodel),
            (AUTO_ROUND, _auto_round),
            (BITSANDBYTES, _bitsandbytes),
            (COMPRESSED, _compressed),
        )
        for cases, write in writers:
            for name, case in cases.items():
                folder = write(root / "base", root / name, case)
                _keep(folder, PLACE / f"{name.replace(' ', '-')}.safetensors")


def _write_base(folder: Path, hidden: int = 32) -> None:
    transformers, tokenizers = import_module("transformers"), import_module("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{word}": word for word in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    fast = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1").save_pretrained(folder)


def _gptqmodel(base: Path, folder: Path, case: Mapping[str, Any]) -> Path:
    package = import_module("gptqmodel")
    order = random.Random(0)
    texts = [[order.randrange(VOCAB) for _ in range(64)] for _ in range(32)]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]
    config = package.QuantizeConfig(
        **{"device": "cpu", "offload_to_disk": False, "pack_impl": "original"},
        **{"act_group_aware": False, **case},
    )
    model = package.GPTQModel.load(str(base), config)
    model.quantize(rows, batch_size=4)
    model.save(str(folder))
    _save_expected(folder, _loaded_by_gptqmodel(folder))
    return folder


def _auto_round(base: Path, folder: Path, case: tuple[Mapping[str, Any], str]) -> Path:
    transformers = import_module("transformers")
    arguments, layout = case
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tool = import_module("auto_round").AutoRound(
        *(model, tokenizer), iters=0, disable_opt_rtn=True, device_map="cpu", **arguments
    )
    tool.quantize_and_save(str(folder), format=layout)
    [written] = {path.parent for path in folder.rglob("config.json")}
    if layout == "auto_awq":
        _save_expected(written, _loaded_by_gptqmodel(written))
    else:
        load = transformers.AutoModelForCausalLM.from_pretrained
        _save_expected(written, load(written, device_map="cpu"))
    return written


def _bitsandbytes(base: Path, folder: Path, case: Mapping[str, Any]) -> Path:
    transformers, package = import_module("transformers"), import_module("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**case)
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Blocks of 64 numbers are parts of one row.
    base = base.parent / "wide"
    _write_base(base, hidden=64)
    model = load(base, quantization_config=config, device_map="cpu", dtype=torch.float32)
    model.save_pretrained(folder)
    for name in LAYERS:
        module = model.get_submodule(name)
        if "load_in_8bit" in case:
            scales_O1 = module.weight.SCB[:, None] / 127
            numbers = module.weight.data.float() * scales_O1
        else:
            state = module.weight.quant_state
            numbers = package.functional.dequantize_4bit(module.weight.data, state)
        module.weight = torch.nn.Parameter(numbers)
    _save_expected(folder, model)
    return folder


def _compressed(base: Path, folder: Path, case: list[tuple[str, Arguments, Arguments]]) -> Path:
    transformers = import_module("transformers")
    package = import_module("compressed_tensors.quantization")
    parameters = import_module("compressed_tensors.quantization.utils").calculate_qparams
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def arguments(values: Arguments) -> Any:
        return None if values is None else package.QuantizationArgs(**values)

    groups = {
        f"group_{i}": package.QuantizationScheme(
            targets=[target], weights=arguments(weights), input_activations=arguments(inputs)
        )
        for i, (target, weights, inputs) in enumerate(case)
    }
    config = package.QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], quantization_status="frozen"
    )
    package.apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        scheme, weight_OI = module.quantization_scheme, module.weight.data
        group = scheme.weights.group_size
        size = {"group": group, "tensor_group": group, "tensor": weight_OI.numel()}.get(
            scheme.weights.strategy, weight_OI.shape[1]
        )
        whole = getattr(module, "weight_global_scale", None)
        if whole is not None:
            whole.data.fill_(float(6 * 448 / weight_OI.abs().max()))
        rows = weight_OI.view(-1, size)
        scale, zero = parameters(rows.amin(1), rows.amax(1), scheme.weights, whole)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(
                zero.float().round().view(module.weight_scale.shape)
            )
        if getattr(module, "input_scale", None) is not None:
            module.input_scale.data.fill_(1 / 32)
    compressor = import_module("compressed_tensors.compressors").ModelCompressor
    compressor = compressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    _save_expected(folder, model)
    return folder


def _loaded_by_gptqmodel(folder: Path) -> Any:
    load = import_module("gptqmodel").GPTQModel.load
    return load(str(folder), backend="torch", device="cpu").model


def _save_expected(folder: Path, model: Any) -> None:
    expected = {}
    for name in LAYERS:
        module = model.get_submodule(name)
        if hasattr(module, "dequantize_weight"):
            weight = module.dequantize_weight().t()
        elif isinstance(getattr(module, "weight", None), torch.Tensor):
            weight = module.weight.data
        else:
            inputs = getattr(module, "infeatures", None) or module.in_features
            half = import_module("gptqmodel.nn_modules.qlinear.torch_awq").__name__
            dtype = torch.float16 if type(module).__module__ == half else torch.float32
            weight = module(torch.eye(inputs, dtype=dtype)).t()
        expected[name] = weight.detach().contiguous()
    save_file(expected, folder / "expected.safetensors")


def _keep(folder: Path, file: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= load_file(path)
    beginnings = tuple(f"{layer}." for layer in LAYERS)
    kept = {name: each for name, each in tensors.items() if name.startswith(beginnings)}
    expected = load_file(folder / "expected.safetensors")
    kept |= {f"expected.{name}": each for name, each in expected.items()}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config.pop("meta", None)
    plain = [name.removesuffix(".weight") for name in tensors if name.endswith("proj.weight")]
    plain = [name for name in plain if tensors[f"{name}.weight"].dtype == torch.float32]
    metadata = {"quantization_config": json.dumps(config), "plain": json.dumps(sorted(plain))}
    save_file(kept, file, metadata)


if __name__ == "__main__":
    main()
