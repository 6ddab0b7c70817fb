"""A quantization_config is read as its tool means it, or refused in one line that names the field
and what is supported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.families import config_of, read_config
from baton_engine.config.quantization.read import BESIDE, KEY, METHODS, read_quantization
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme
from baton_engine.errors import ModelError, UnsupportedModel
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.weight_format import format_of
from tests.support.engines.changed_fields import REMOVED, VALUES, Field, Json, changed, others
from tests.support.engines.quantized.quantized_models import ALL_LAYOUTS, LAYOUTS
from tests.support.engines.tiny_models import make_tiny_model

LAYERS = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.0.mlp.experts.3.down_proj",
    "model.layers.0.mlp.gate",
    "lm_head",
)
MOST_BYTES = 1 << 20  # of a layer of 64 x 64


def read(config: Mapping[str, Any]) -> QuantizationConfig:
    found = read_quantization({KEY: config})
    assert found is not None
    return found


def with_changes(layout: str, **changes: Any) -> Json:
    return {**LAYOUTS[layout].config, **changes}


def groups_with(part: str, *, layout: str = "w8a8", **changes: Any) -> Json:
    """The config of `layout` with changes of a part of its group."""
    config: Any = LAYOUTS[layout].config
    group = config["config_groups"]["group_0"]
    if part:
        changes = {part: {**group[part], **changes}}
    return {**config, "config_groups": {"group_0": {**group, **changes}}}


def float_with(part: str, **changes: Any) -> Json:
    return groups_with(part, layout="w8a8 float", **changes)


FLOATS: Json = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
INTEGERS: Json = {**FLOATS, "type": "int"}


def fields_of(values: Any, path: Field = ()) -> Iterator[tuple[Field, Any]]:
    for key, value in values.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from fields_of(value, (*path, key))


def complaint(config: Json, field: Field, value: Any) -> str | None:
    """What is wrong about how `config` is read with another `value` of the field."""
    try:
        use(read(changed(config, field, value)))
    except ModelError as error:
        text = str(error)
        clear = any(key in text for key in field) and "\n" not in text and len(text) < 600
        return None if clear else text
    except Exception as error:
        return repr(error)
    return None


def use(config: QuantizationConfig) -> None:
    """Declare tensors of layers as the config says."""
    for name in LAYERS:
        scheme = config.scheme_of(name)
        if scheme is not None:
            slots = WeightSlots(torch.float32, torch.device("cpu"))
            format_of(scheme).declare(slots, name, 64, 64)
            assert sum(each.place.nbytes for each in slots.parameters.values()) < MOST_BYTES
            assert math.isfinite(scheme.weight_bytes(1, 64) / 64)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_changed_field_is_read_or_named_in_the_error(layout: str) -> None:
    config: Any = ALL_LAYOUTS[layout].config
    found = [
        f"{'.'.join(field)} {'removed' if new is REMOVED else repr(new)[:40]}: {wrong}"
        for field, value in fields_of(config)
        for new in (*VALUES, *others(value))
        if (wrong := complaint(config, field, new))
    ]
    assert not found, f"{len(found)} cases:\n" + "\n".join(found)


@pytest.mark.parametrize("value", [True, 7, "gptq", ["gptq"]])
def test_what_is_no_object_is_named_in_the_error(value: Any) -> None:
    with pytest.raises(ModelError, match=rf"{KEY} is .*; expected an object"):
        read_quantization({KEY: value})


@pytest.mark.parametrize("method", ["hqq", "aqlm", None, ""])
def test_an_unknown_method_is_refused_with_those_that_are_supported(method: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=r"quant_method.*supported: .*gptq") as error:
        read_quantization({KEY: {"quant_method": method, "bits": 4}})
    assert all(each in str(error.value) for each in METHODS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_changes("gptq", bits=3), "gptq with bits 3 .* supported: 4, 8"),
        (with_changes("gptq", group_size=0), "group_size is 0; expected -1 or"),
        (with_changes("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin' .*gptq_v2"),
        (with_changes("gptq", checkpoint_format="gptq", format="gptq_v2"), "format differ"),
        (with_changes("gptq", is_marlin_format=True), "is_marlin_format True"),
        (with_changes("gptq", pack_dtype="int64"), "pack_dtype 'int64' .* supported: int32"),
        (with_changes("gptq", rotation="hadamard"), "rotation 'hadamard'"),
        (with_changes("gptq", adapter={"rank": 64}), "adapter"),
        (with_changes("gptq", dynamic={"+:(": {"bits": 8}}), "dynamic '\\(' is no regular"),
        (with_changes("gptq", dynamic={"+:a": {"bits": 2}}), "bits 2 .* supported: 4, 8"),
        (with_changes("awq", bits=8), "awq with bits 8 .* supported: 4"),
        (with_changes("awq", version="gemv"), "version 'gemv' .* supported: gemm"),
        (with_changes("awq", version="gemv_fast"), "version 'gemv_fast' .* supported: gemm"),
        (with_changes("awq", version="marlin"), "version 'marlin' .* supported: gemm"),
        (with_changes("awq", backend="llm-awq"), "backend 'llm-awq' .* supported: autoawq"),
        (with_changes("auto-round gptq", bits=2), "bits 2 .* supported: 4, 8"),
        (with_changes("auto-round gptq", packing_format="auto_round:marlin"), "packing_format"),
        (with_changes("auto-round gptq", data_type="mx_fp"), "data_type 'mx_fp' .* int"),
        (with_changes("auto-round gptq", act_bits=8), "act_bits 8"),
        (with_changes("auto-round gptq", rotation_config={"a": 1}), "rotation_config"),
        (with_changes("w8a8", kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme .* num_bits 8"),
        (with_changes("w8a8", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (with_changes("w8a8", transform_config={"config_groups": {"a": {}}}), "transform_config"),
        (with_changes("w8a8", quantization_status="calibration"), "quantization_status .*frozen"),
        (with_changes("w8a8", format="marlin-24"), "format 'marlin-24'.* supported: int weights"),
        (groups_with("", weights=None), "weights is None"),
        (groups_with("", output_activations={"num_bits": 8}), "output_activations"),
        (groups_with("weights", num_bits=3), "num_bits 3"),
        (groups_with("weights", strategy="block"), "strategy 'block' .* channel, group"),
        (float_with("weights", strategy="block", block_structure=[9]), "block_structure is"),
        (float_with("weights", symmetric=False), "symmetric false .* symmetric true"),
        (float_with("input_activations", type="int"), "type 'int', .* symmetric float of 8 bits"),
        (with_changes("bitsandbytes nf4", bnb_4bit_quant_type="fp4"), "type 'fp4' .* nf4, or"),
        (with_changes("bitsandbytes nf4", load_in_8bit=True), "load_in_4bit .* true for one"),
        (with_changes("bitsandbytes nf4", bnb_4bit_quant_storage="bfloat16"), "supported: uint8"),
        (with_changes("bitsandbytes int8", llm_int8_has_fp16_weight=True), "fp16_weight True"),
        (with_changes("modelopt fp8", quant_algo="INT4_AWQ"), "quant_algo 'INT4_AWQ' .* NVFP4"),
        (with_changes("modelopt fp8", kv_cache_quant_algo="NVFP4"), "'NVFP4' .* FP8, INT8"),
        (
            with_changes("modelopt fp8", kv_cache_quant_algo="FP8", kv_cache_scheme=INTEGERS),
            "kv_cache_quant_algo 'FP8' .* that of kv_cache_scheme",
        ),
        (with_changes("fp8 block", fmt="e5m2"), "fp8 with fmt 'e5m2' .* supported: e4m3"),
        (with_changes("fp8 block", activation_scheme="static"), "dynamic with weight_block_size"),
        (with_changes("fp8 block", weight_block_size=[128]), "weight_block_size .* two integers"),
        (with_changes("fp8 block", expert_dtype="fp4"), "expert_dtype 'fp4' .* fp8"),
        (with_changes("fp8 tensor", activation_scheme="none"), "activation_scheme 'none'"),
        (with_changes("fp8 tensor", kv_cache_scheme="other"), "kv_cache_scheme is 'other'"),
        (with_changes("fp8 tensor", ignored_layers=["("]), "ignored_layers .* no regular"),
        (groups_with("weights", actorder="other"), "actorder is 'other'"),
        (groups_with("input_activations", symmetric=False), "symmetric false"),
        (groups_with("input_activations", strategy="tensor"), "strategy 'tensor' and dynamic true"),
        (groups_with("input_activations", num_bits=4), "num_bits 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Json, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_status": "frozen"},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}},
        {"kv_cache_scheme": None, "transform_config": {}, "version": "0.9.0"},
    ],
)
def test_harmless_fields_of_older_versions_are_read(changes: Json) -> None:
    assert read(with_changes("w8a8", **changes)) == read(LAYOUTS["w8a8"].config)


@pytest.mark.parametrize(
    ("config", "kv_cache"),
    [
        (with_changes("w8a8", kv_cache_scheme=FLOATS), "fp8"),
        (with_changes("w8a8", kv_cache_scheme=INTEGERS), "int8"),
        (with_changes("w8a8", config_groups={}, kv_cache_scheme=FLOATS), "fp8"),
        (with_changes("modelopt fp8", kv_cache_quant_algo="FP8"), "fp8"),
        (with_changes("modelopt fp8", kv_cache_scheme=FLOATS, kv_cache_quant_algo="FP8"), "fp8"),
        (with_changes("fp8 tensor", kv_cache_scheme="static"), "fp8"),
        (with_changes("fp8 tensor", kv_cache_scheme=None), "auto"),
    ],
)
def test_kv_for_which_a_checkpoint_is_made(config: Json, kv_cache: str) -> None:
    assert read(config).kv_cache == kv_cache


FILE_BESIDE: Json = {
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": {
        **{"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "exclude_modules": ["lm_head", "model.layers.0*", "*.v_proj"],
    },
}


def test_modelopts_file_beside_config_json_is_read(tmp_path: Path) -> None:
    plain = json.loads((make_tiny_model("llama-gqa1") / "config.json").read_text())

    def config_with(beside: Json, **more: Any) -> QuantizationConfig | None:
        (tmp_path / "config.json").write_text(json.dumps({**plain, **more}))
        (tmp_path / BESIDE).write_text(json.dumps(beside))
        return read_config(tmp_path).quantization

    assert config_with(FILE_BESIDE) == read(with_changes("modelopt fp8", kv_cache_quant_algo="FP8"))
    assert config_with({}) is None
    for wrong, message in (
        ({"quantization": []}, "hf_quant_config.json: quantization is .*expected an object"),
        ({"quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo 'W4A8_AWQ' .* FP8"),
        ({"producer": {"name": "other"}}, "producer 'other' .* modelopt"),
    ):
        with pytest.raises(ModelError, match=message):
            config_with({**FILE_BESIDE, **wrong})
    inside = LAYOUTS["w8a8"].config
    assert config_with(FILE_BESIDE, **{KEY: inside}) == read(inside)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (
            "gptq",
            {
                **{"modules_in_block_to_quantize": None, "block_name_to_quantize": None},
                **{"dynamic": None, "adapter": None, "is_marlin_format": False, "lm_head": False},
                **{"checkpoint_format": "gptq", "format": "GPTQ", "pack_dtype": "int32"},
                **{"exllama_config": {"version": 1}, "use_exllama": True, "tokenizer": None},
                "meta": {"quantizer": ["gptqmodel:5.0.0"]},
            },
        ),
        (
            "awq",
            {
                **{"backend": "autoawq", "do_fuse": False, "modules_to_fuse": None},
                **{"version": "GEMM", "format": "gemm"},
            },
        ),
        ("awq", {"modules_to_not_convert": ["lm_head"], "w_bit": 4, "q_group_size": 32}),
    ],
)
def test_fields_that_say_nothing_about_weights_change_nothing(layout: str, changes: Json) -> None:
    assert read(with_changes(layout, **changes)) == read(LAYOUTS[layout].config)


def test_autoawqs_own_names_of_fields_are_read() -> None:
    config = with_changes("awq", w_bit=4, q_group_size=32)
    del config["bits"], config["group_size"]
    assert read(config) == read(LAYOUTS["awq"].config)


def schemes(config: Json, *names: str) -> list[WeightScheme | None]:
    found = read(config)
    return [found.scheme_of(name) for name in names]


def test_exact_names_go_before_expressions_and_expressions_before_classes() -> None:
    config: Any = LAYOUTS["w8a16"].config
    [group] = config["config_groups"].values()

    def of_bits(bits: int, target: str) -> Json:
        weights = {**group["weights"], "num_bits": bits}
        return {**group, "targets": [target], "weights": weights, "format": "pack-quantized"}

    groups = {
        "a": of_bits(8, "Linear"),
        "b": of_bits(4, "re:.*down_proj"),
        "c": of_bits(8, "model.layers.1.mlp.down_proj"),
    }
    found = schemes(
        {**config, "config_groups": groups},
        *(f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("up", "down")),
    )
    assert [scheme and scheme.numbers for scheme in found] == ["int8", "int4", "int8", "int8"]


def test_ignored_layers_are_plain_whatever_else_names_them() -> None:
    config: Any = LAYOUTS["w8a16"].config
    [group] = config["config_groups"].values()
    groups = {"a": {**group, "targets": ["Linear", *LAYERS]}}
    ignore = ["lm_head", "re:.*gate$", "re:.*q_proj"]
    found = schemes({**config, "config_groups": groups, "ignore": ignore}, *LAYERS)
    assert [scheme is None for scheme in found] == [True, False, False, True, True]


@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name.startswith(("gptq", "awq", "auto-round"))]
)
def test_routers_are_plain_unless_the_config_names_them(layout: str) -> None:
    routers = [f"model.layers.0.{name}" for name in ("mlp.gate", "block_sparse_moe.gate")]
    if "mixed" not in layout:
        assert schemes(dict(LAYOUTS[layout].config), *routers) == [None, None]


def test_first_versions_of_auto_round_have_a_backend_in_place_of_the_packing_format() -> None:
    config = with_changes("auto-round gptq", quant_method="intel/auto-round")
    del config["packing_format"]
    for backend in ("auto_round:gptq:exllamav2", "auto"):
        assert read({**config, "backend": backend}).schemes == read(config).schemes
    [awq] = schemes({**config, "backend": "auto_round:awq:gemm"}, LAYERS[0])
    assert awq is not None
    assert awq.layout == "awq gemm"


def test_the_config_of_a_model_has_that_of_its_weights() -> None:
    config = json.loads((Path(make_tiny_model("llama-gqa1")) / "config.json").read_text())
    read_config = config_of({**config, KEY: LAYOUTS["gptq"].config}, {}, impl="baton")
    assert read_config.quantization == read(LAYOUTS["gptq"].config)
