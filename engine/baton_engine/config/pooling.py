"""Whether a model folder holds a pooling model: one that answers with a vector, not with tokens.

In: a folder, its config.json and --runner. Out: what the model answers with. A folder of
sentence-transformers lists its modules in modules.json, and has their settings in folders beside
it. A classifier is named by its architecture. An encoder is a pooling model in any case. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton_engine.config.config_json import ConfigFields, read_json, shown
from baton_engine.config.model_config import ModelConfig, Pooled
from baton_engine.errors import ModelError, UnsupportedModel
from baton_protocol.policies import RunnerType
from baton_protocol.pooling import Pooling

MODULES = "modules.json"
# The class names at the end of a module's type, of sentence-transformers.
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
# Of a Pooling module's config: the modes here, in their spellings.
MODES = "pooling_mode_"
POOLED: Mapping[str, Pooled] = {
    "lasttoken": "last",
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
}
# The mode of an encoder whose folder names none, as in vLLM.
DEFAULT_POOLED: Pooled = "cls"
# The most tokens of a text, by sentence-transformers.
LENGTH, LENGTH_FILE = "max_seq_length", "sentence_bert_config.json"
# The endings of architectures: decoders with a head of tokens, with one of classes, without one;
# encoders with a head that fills masks.
CAUSAL, CLASSIFIER, HEADLESS = "ForCausalLM", "ForSequenceClassification", "Model"
MASKED = "ForMaskedLM"
# The end of the names of causal models that does not say so.
OLD_CAUSAL = "LMHeadModel"
# What transformers takes for num_labels if a config does not say it.
DEFAULT_CLASSES = 2


def causal_name(architecture: str) -> str:
    """The architecture of the same decoder with a head of tokens; "" if there is none."""
    for ending in (CLASSIFIER, HEADLESS):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + CAUSAL
    return ""


def has_no_causal_head(architecture: str) -> bool:
    """Whether no model of this name generates."""
    if architecture.endswith(OLD_CAUSAL):
        return False
    return architecture.endswith((CLASSIFIER, HEADLESS, MASKED))


def with_pooling(
    config: ModelConfig, values: Mapping[str, Any], folder: Path, runner: RunnerType
) -> ModelConfig:
    """The config with what the model answers with. `values` are those of config.json. Raises
    ModelError, or UnsupportedModel for a pooling model that is not supported."""
    pooling = _pooling(config, values, folder, runner)
    if not pooling:
        return config
    if pooling == "classify":
        return replace(config, pooling=pooling, classes=_classes(values))
    config = replace(config, pooling=pooling, pooled=_pooled(folder, encodes=config.encodes))
    if not config.encodes:
        return config
    # Longer texts than the model was trained for are what sentence-transformers cuts.
    settings = ConfigFields(read_json(folder / LENGTH_FILE), LENGTH_FILE)
    longest = settings.integer(LENGTH, config.max_positions)
    return replace(config, max_positions=min(config.max_positions, longest))


def _pooling(
    config: ModelConfig, values: Mapping[str, Any], folder: Path, runner: RunnerType
) -> Pooling:
    name = values["architectures"][0]
    if config.encodes or name.endswith(CLASSIFIER) or config.architecture == causal_name(name):
        if runner == "generate":
            raise UnsupportedModel(
                f"--runner generate: architecture {name} has no head of tokens; use --runner auto"
            )
        return "classify" if name.endswith(CLASSIFIER) else "embed"
    if runner == "generate" or not (runner == "pooling" or (folder / MODULES).is_file()):
        return ""
    return "embed"


def _pooled(folder: Path, *, encodes: bool) -> Pooled:
    """Raises UnsupportedModel for modules of sentence-transformers that are not supported."""
    pooled: Pooled = DEFAULT_POOLED if encodes else "last"
    for kind, place in _modules(folder):
        if kind == POOLING:
            pooled = _mode(folder / place / "config.json", encodes=encodes)
        elif kind not in (TRANSFORMER, NORMALIZE):
            raise UnsupportedModel(
                f"{folder / MODULES}: a module of type {shown(kind)} is not supported; supported:"
                f" {TRANSFORMER}, {POOLING} and {NORMALIZE}"
            )
    return pooled


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module; [] without the file."""
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is no list of modules: {error!r}") from error


def _mode(path: Path, *, encodes: bool) -> Pooled:
    settings = read_json(path)
    fields = ConfigFields(settings, str(path))
    mode = fields.text("pooling_mode")
    modes = [] if mode is None else [mode]
    modes += [
        key.removeprefix(MODES)
        for key, value in settings.items()
        if key.startswith(MODES) and value is True
    ]
    # A decoder's prompt is computed in pieces, after which only the last token's state is there.
    supported = {name: pooled for name, pooled in POOLED.items() if encodes or pooled == "last"}
    found = {supported.get(name) for name in modes}
    pooled = found.pop() if len(found) == 1 else None
    if pooled is None:
        raise UnsupportedModel(
            f"{path}: pooling {', '.join(modes) or '(none named)'} is not supported; only"
            f" {' or '.join(MODES + name for name in supported)}"
        )
    return pooled


def _classes(values: Mapping[str, Any]) -> int:
    """Number of labels: num_labels, or as many as id2label names."""
    named = ConfigFields(values).part("id2label")
    return ConfigFields(values).integer("num_labels", len(named) or DEFAULT_CLASSES)
