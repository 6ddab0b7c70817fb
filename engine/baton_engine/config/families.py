"""Model families: which parser reads a config.json, and which class is the model. No torch.

In: an architecture, an entry of `architectures` in config.json. Out: its Family. A family is one
module or folder with a FAMILY, and one line in BUILT_IN. Other packages add families through entry
points of the group `baton.model_families`, whose name is the architecture and whose value is the
place of a Family. A family's module is imported when a model of it is read, and its model class,
which needs torch, when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from baton_engine.config.config_json import (
    CONFIG,
    DTYPE_KEYS,
    GENERATION,
    ConfigFields,
    read_json,
    shown,
)
from baton_engine.config.engine_config import ModelImpl
from baton_engine.config.entry_points import installed_points
from baton_engine.config.gguf_config import read_gguf_config
from baton_engine.config.layer_counts import DECODER, LayerCounts
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.pooling import causal_name, has_no_causal_head, with_pooling
from baton_engine.config.quantization.online import online_config
from baton_engine.config.quantization.read import BESIDE, read_quantization, with_file_beside
from baton_engine.config.quantization.read import KEY as QUANTIZATION
from baton_engine.errors import ModelError, UnsupportedModel
from baton_protocol.policies import Quantization, RunnerType
from baton_text.gguf.header import is_gguf

GROUP = "baton.model_families"
# Architecture -> the place of its Family.
BUILT_IN: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "baton_engine.models.deepseek.config:V2_FAMILY",
    "DeepseekV3ForCausalLM": "baton_engine.models.deepseek.config:V3_FAMILY",
    "Gemma2ForCausalLM": "baton_engine.models.gemma2.config:FAMILY",
    "Glm4MoeForCausalLM": "baton_engine.models.glm4_moe.config:FAMILY",
    "GptOssForCausalLM": "baton_engine.models.gpt_oss.config:FAMILY",
    "LlamaForCausalLM": "baton_engine.models.llama:FAMILY",
    "MistralForCausalLM": "baton_engine.models.mistral:FAMILY",
    "MixtralForCausalLM": "baton_engine.models.mixtral.config:FAMILY",
    "OlmoeForCausalLM": "baton_engine.models.olmoe.config:FAMILY",
    "Phi3ForCausalLM": "baton_engine.models.phi3.config:FAMILY",
    "Qwen2ForCausalLM": "baton_engine.models.qwen2:FAMILY",
    "Qwen2MoeForCausalLM": "baton_engine.models.qwen2_moe:FAMILY",
    "Qwen3ForCausalLM": "baton_engine.models.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": "baton_engine.models.qwen3_moe:FAMILY",
}

# The Families of all other architectures that transformers knows: those that generate, and the
# rest.
BRIDGE = "baton_engine.models.bridge.config:FAMILY"
ENCODERS = "baton_engine.models.bridge.encoders.config:FAMILY"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`read` makes a ModelConfig from config.json and generation_config.json. It raises ModelError
    or UnsupportedModel. `model` is the place of the model class, "module:class", which is imported
    when a model is built. `examples` and `windows` describe the family in the documentation: some
    well-known models, and which layers have sliding windows. `counts` counts the weights of its
    layers and what a step holds in them, for the memory estimate."""

    read: Callable[[Json, Json], ModelConfig]
    model: str
    examples: str
    windows: str
    counts: LayerCounts = DECODER

    def model_class(self) -> Any:
        """Import the model class, and torch with it. Raises ModelError."""
        try:
            return EntryPoint(name="model", value=self.model, group=GROUP).load()
        except Exception as error:
            raise ModelError(f"model class {self.model} cannot be imported: {error!r}") from error


def _architectures() -> list[str]:
    """All known architectures, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in installed_points(GROUP))})


def find_family(architecture: str) -> Family | None:
    """The family of an architecture; None if it is unknown. Raises ModelError if two packages
    provide it, or if its module cannot be imported or has no Family."""
    points = _points(architecture)
    if not points:
        return None
    if len(points) > 1:
        packages = ", ".join(sorted(map(_package, points)))
        raise ModelError(
            f"architecture {architecture} is provided by several packages: {packages}; "
            "uninstall all but one"
        )
    [point] = points
    where = f"{point.value} of {_package(point)}, the family of architecture {architecture},"
    try:
        family = point.load()
    except Exception as error:
        raise ModelError(f"{where} cannot be imported: {error!r}") from error
    if not isinstance(family, Family):
        raise ModelError(f"{where} is of type {type(family).__name__}; expected a Family")
    return family


def read_config(
    folder: Path,
    impl: ModelImpl = "auto",
    quantization: Quantization = "none",
    runner: RunnerType = "auto",
) -> ModelConfig:
    """Read the config of a model folder, or of a GGUF file. `impl`, `quantization` and `runner` are
    the values of --model-impl, --quantization and --runner. Raises ModelError if the folder or its
    config.json is missing or invalid, and UnsupportedModel for an unsupported architecture or
    value."""
    if is_gguf(folder):
        if runner == "pooling":
            raise UnsupportedModel(f"--runner pooling: {folder} is a GGUF file; give a folder")
        config = read_gguf_config(folder, partial(config_of, impl=impl))
        return quantized_online(config, quantization)
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; give a Hugging Face folder or a GGUF file"
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model folder {folder} has no config.json; give a Hugging Face folder")
    values = with_file_beside(read_json(folder / CONFIG), read_json(folder / BESIDE))
    config = config_of(values, read_json(folder / GENERATION), impl)
    config = with_pooling(config, values, folder, runner)
    return quantized_online(config, quantization)


def config_of(values: Json, generation: Json, impl: ModelImpl = "auto") -> ModelConfig:
    """The config in the content of a config.json and a generation_config.json; raises as
    read_config() does."""
    architecture, family = _family_of(values, impl)
    config = _read(family, {**values, "architectures": [architecture]}, generation)
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim {config.head_dim} is odd; rope needs an even one")
    return config.limited_to(None)


def quantized_online(
    config: ModelConfig, quantization: Quantization, *, drafts: bool = False
) -> ModelConfig:
    """The config with the value of --quantization, or of the same key of --speculative-config for a
    model that drafts. Raises UnsupportedModel for a model whose
    weights cannot be quantized while they are loaded."""
    if quantization == "none":
        return config
    if why := not_plain(config):
        raise UnsupportedModel(f"--quantization {quantization}: {why}; use --quantization none")
    experts = config.experts
    transposed = experts is not None and experts.bias
    return replace(
        config,
        quantization=online_config(quantization, transposed_experts=transposed, drafts=drafts),
    )


def not_plain(config: ModelConfig) -> str:
    """Why --quantization does not apply to a model; empty if it does."""
    if config.bridge is not None:
        return f"{config.architecture} is computed by transformers' code, with plain weights"
    if config.quantization is not None:
        return f"the checkpoint's weights are quantized already, by {config.quantization.method}"
    return ""


def _read(family: Family, values: Json, generation: Json) -> ModelConfig:
    """Families do not see how weights are quantized: their layers have the same shapes."""
    plain = {key: value for key, value in values.items() if key != QUANTIZATION}
    config = family.read(plain, generation)
    if config.bridge is None:
        quantization = read_quantization(values)
        if quantization is not None and not any(key in values for key in DTYPE_KEYS):
            # gpt-oss' configs do not say the dtype of the weights that are not quantized.
            config = replace(config, dtype="bfloat16")
        return replace(config, quantization=quantization)
    if values.get(QUANTIZATION):
        raise UnsupportedModel(
            f"{config.architecture}, which transformers' code computes: {QUANTIZATION} is not "
            "supported"
        )
    return config


def _family_of(values: Json, impl: ModelImpl) -> tuple[str, Family]:
    """The first supported architecture of a config.json, and its family. That of a decoder without
    a head of tokens is named as with one. The bridge has the families of those that have none of
    their own."""
    named = ConfigFields(values).texts("architectures") or []
    for given in () if impl == "transformers" else named:
        for name in filter(None, (given, causal_name(given))):
            family = find_family(name)
            if family is not None:
                return name, family
    if named and impl != "baton":
        name = str(named[0])
        place = ENCODERS if has_no_causal_head(name) else BRIDGE
        return name, EntryPoint(name="bridge", value=place, group=GROUP).load()
    raise UnsupportedModel(
        f"architectures {shown(named) if named else '(none named)'} is not supported; "
        f"supported: {', '.join(_architectures())}"
    )


def _points(architecture: str) -> list[EntryPoint]:
    """The entry points of this name. A package that is found twice on the path counts once."""
    points = {}
    for point in installed_points(GROUP).select(name=architecture):
        points[_package(point), point.value] = point
    if architecture in BUILT_IN:
        value = BUILT_IN[architecture]
        points["baton-serve", value] = EntryPoint(name=architecture, value=value, group=GROUP)
    return list(points.values())


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "baton-serve"
