"""HeadConfig: a head that drafts tokens from the target's hidden states. No torch.

In: the method, the head's folder and the target's config. Out: checked sizes, or an error that
names the key. A head of the method "mtp" is a layer of the target's own checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton_engine.config.config_json import CONFIG, ConfigFields, read_json, shown
from baton_engine.config.families import BUILT_IN, find_family
from baton_engine.config.layer_counts import DECODER, LayerCounts
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.speculative import HeadMethod
from baton_engine.errors import ModelError, SettingsError, UnsupportedModel
from baton_text.gguf.header import is_gguf

# The model class of the families whose layers heads of EAGLE have.
DECODER_CLASS = "baton_engine.models.decoder:Decoder"
# What heads of EAGLE add to the name of their target's architecture.
EAGLE_NAMES = ("Eagle3", "Eagle")
MOST_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """`layer` is the config of a model whose one layer is the head's, or of the target for Medusa.
    `name` is that layer's in the checkpoint, and all names of the head's tensors begin with
    `prefix`.

    `vocab_size` is the number of ids that the head drafts; with `draft_ids`, a tensor maps them to
    those of the target. `kept_layers` are the target's layers before which it takes hidden states,
    besides those after the last. With `norm_before_residual`, EAGLE-3 adds the layer's output to
    the norm of its input. Medusa has `heads`, each of `blocks` and a product with the vocabulary.
    """

    method: HeadMethod
    folder: Path
    layer: ModelConfig
    target_size: int  # the target's hidden size
    vocab_size: int
    name: str = ""
    prefix: str = ""
    kept_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    draft_ids: bool = False
    heads: int = 0
    blocks: int = 0

    @property
    def keeps_kv(self) -> bool:
        return self.method != "medusa"

    @property
    def state_size(self) -> int:
        """Numbers that are kept of a position until the token after it is known."""
        return self.layer.hidden_size

    def counts(self) -> LayerCounts:
        family = find_family(self.layer.architecture)
        return DECODER if family is None else family.counts


def read_head(
    method: HeadMethod, model: str | None, target: ModelConfig, target_folder: Path, drafts: int
) -> HeadConfig:
    """`model` is the head's folder, and `drafts` the value of num_speculative_tokens. Raises
    SettingsError, ModelError or UnsupportedModel."""
    if target.bridge is not None:
        raise UnsupportedModel(
            f"{method}: {target.architecture} is computed by transformers' code, which does not"
            " give its hidden states to a head"
        )
    if method == "mtp":
        return _read_mtp(target, target_folder)
    assert model is not None, "the config was checked"
    folder = Path(model)
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{method}: the head's folder {folder} has no config.json")
    values = read_json(folder / CONFIG)
    if method == "medusa":
        return _read_medusa(folder, values, target, drafts)
    return _read_eagle(method, folder, values, target)


def _read_mtp(target: ModelConfig, folder: Path) -> HeadConfig:
    prefix = f"model.layers.{target.num_layers}."
    if prefix not in target.unused_tensors:
        raise UnsupportedModel(
            f"mtp: {target.architecture} has no layers that draft tokens; those of DeepSeek V3"
            " (DeepseekV3ForCausalLM) and GLM-4.5 (Glm4MoeForCausalLM) are supported"
        )
    if is_gguf(folder):
        raise UnsupportedModel("mtp: GGUF files are not supported; give a folder of safetensors")
    experts = target.experts
    layer = replace(
        target,
        num_layers=1,
        windows=(),
        experts=None if experts is None else replace(experts, layers=(True,)),
        tied=False,
        # Copies of the target's own, which the head shares.
        unused_tensors=(f"{prefix}embed_tokens.", f"{prefix}shared_head.head."),
    )
    return HeadConfig(
        method="mtp",
        folder=folder,
        layer=layer,
        target_size=target.hidden_size,
        vocab_size=target.vocab_size,
        name=prefix.removesuffix("."),
        prefix=prefix,
    )


def _read_medusa(
    folder: Path, values: Mapping[str, Any], target: ModelConfig, drafts: int
) -> HeadConfig:
    fields = _fields(values, folder)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        _check_size(fields, folder, key, size)
    heads = fields.integer("medusa_num_heads", most=MOST_HEADS)
    if drafts > heads:
        raise SettingsError(
            f"medusa: num_speculative_tokens {drafts} is more than the medusa_num_heads {heads} of"
            f" {folder}"
        )
    return HeadConfig(
        method="medusa",
        folder=folder,
        layer=replace(target, tied=False, unused_tensors=()),
        target_size=target.hidden_size,
        vocab_size=target.vocab_size,
        heads=heads,
        blocks=fields.integer("medusa_num_layers", 1, most=MOST_HEADS),
    )


def _read_eagle(
    method: HeadMethod, folder: Path, values: Mapping[str, Any], target: ModelConfig
) -> HeadConfig:
    fields, three = _fields(values, folder), method == "eagle3"
    layer = _layer_of(method, values, target)
    if layer.num_layers != 1:
        raise UnsupportedModel(
            f"{method}: {folder} has num_hidden_layers {layer.num_layers}; heads of 1 layer are"
            " supported"
        )
    if layer.vocab_size != target.vocab_size:
        raise _other_size(folder, "vocab_size", layer.vocab_size, target.vocab_size)
    if layer.hidden_size != target.hidden_size and not three:
        raise _other_size(folder, "hidden_size", layer.hidden_size, target.hidden_size)
    if three:
        _check_size(fields, folder, "target_hidden_size", target.hidden_size, optional=True)
    draft_vocab = fields.integer("draft_vocab_size", layer.vocab_size) if three else None
    return HeadConfig(
        method=method,
        folder=folder,
        # The head of "eagle" shares the target's embedding; t2d says the same as d2t.
        layer=replace(layer, unused_tensors=("t2d",) if three else ("embed_tokens.",)),
        target_size=target.hidden_size,
        vocab_size=draft_vocab or layer.vocab_size,
        name="midlayer" if three else "layers.0",
        kept_layers=_kept_layers(values, folder, target) if three else (),
        norm_before_residual=fields.flag("norm_before_residual", False),
        draft_ids=three,
    )


def _layer_of(method: str, values: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    named = ConfigFields(values).texts("architectures") or ["LlamaForCausalLM"]
    plain = str(named[0])
    for part in EAGLE_NAMES:
        plain = plain.replace(part, "")
    family = find_family(plain)
    if family is None or family.model != DECODER_CLASS:
        supported = [
            name
            for name in BUILT_IN
            if (known := find_family(name)) is not None and known.model == DECODER_CLASS
        ]
        raise UnsupportedModel(
            f"{method}: architectures {shown(named)} of the head is not supported; supported:"
            f" {', '.join(supported)}"
        )
    given = {"max_position_embeddings": target.max_positions, **values, "architectures": [plain]}
    return replace(family.read(given, {}), windows=(), tied=False)


def _kept_layers(values: Mapping[str, Any], folder: Path, target: ModelConfig) -> tuple[int, ...]:
    """The layers before which EAGLE-3 takes hidden states: those that the config names, or one near
    the first, the middle one and one near the last."""
    part = _fields(values, folder).part("eagle_config")
    key, count = "eagle_aux_hidden_state_layer_ids", target.num_layers
    named = _fields(part, folder).integers(key, least=0)
    layers = named or (min(2, count - 1), count // 2, max(0, count - 3))
    if len(layers) != 3 or max(layers) >= count:
        raise ModelError(
            f"{folder / CONFIG}: {key} is {list(layers)}; expected 3 layers of the target's {count}"
        )
    return layers


def _fields(values: Mapping[str, Any], folder: Path) -> ConfigFields:
    return ConfigFields(values, str(folder / CONFIG))


def _check_size(
    fields: ConfigFields, folder: Path, key: str, size: int, *, optional: bool = True
) -> None:
    """Heads of Medusa need not say the sizes of their target."""
    found = fields.integer(key, size if optional else None)
    if found != size:
        raise _other_size(folder, key, found, size)


def _other_size(folder: Path, key: str, found: int, wanted: int) -> ModelError:
    return ModelError(
        f"{folder / CONFIG}: {key} is {found}, and the target's is {wanted}: the head was trained"
        " for another model"
    )
