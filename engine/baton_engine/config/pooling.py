"""Whether a model folder holds a pooling model: one that answers with a vector, not with tokens.

In: a folder, its config.json and --runner. Out: what the model answers with. A folder of
sentence-transformers lists its modules in modules.json, and has their settings in folders beside
it. A classifier is named by its architecture. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton_engine.config.config_json import ConfigFields, read_json, shown
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, UnsupportedModel
from baton_protocol.policies import RunnerType
from baton_protocol.pooling import Pooling

MODULES = "modules.json"
# The class names at the end of a module's type, of sentence-transformers.
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
# Of a Pooling module's config: the only mode here, in its two spellings.
LAST_TOKEN = "pooling_mode_lasttoken"
MODES = "pooling_mode_"
# The endings of architectures: decoders with a head of tokens, with one of classes, without one.
CAUSAL, CLASSIFIER, HEADLESS = "ForCausalLM", "ForSequenceClassification", "Model"
# What transformers takes for num_labels if a config does not say it.
DEFAULT_CLASSES = 2


def causal_name(architecture: str) -> str:
    """The architecture of the same decoder with a head of tokens; "" if there is none."""
    for ending in (CLASSIFIER, HEADLESS):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + CAUSAL
    return ""


def with_pooling(
    config: ModelConfig, values: Mapping[str, Any], folder: Path, runner: RunnerType
) -> ModelConfig:
    """The config with what the model answers with. `values` are those of config.json. Raises
    ModelError, or UnsupportedModel for a pooling model that is not supported."""
    pooling = _pooling(config, values, folder, runner)
    if not pooling:
        return config
    classes = _classes(values) if pooling == "classify" else 0
    return replace(config, pooling=pooling, classes=classes)


def _pooling(
    config: ModelConfig, values: Mapping[str, Any], folder: Path, runner: RunnerType
) -> Pooling:
    name = values["architectures"][0]
    if name.endswith(CLASSIFIER) or config.architecture == causal_name(name):
        if runner == "generate":
            raise UnsupportedModel(
                f"--runner generate: architecture {name} has no head of tokens; use --runner auto"
            )
        return "classify" if name.endswith(CLASSIFIER) else _embed(folder)
    if runner == "generate" or not (runner == "pooling" or (folder / MODULES).is_file()):
        return ""
    return _embed(folder)


def _embed(folder: Path) -> Pooling:
    """Raises UnsupportedModel for modules of sentence-transformers that are not supported."""
    for kind, place in _modules(folder):
        if kind == POOLING:
            _check_last_token(folder / place / "config.json")
        elif kind not in (TRANSFORMER, NORMALIZE):
            raise UnsupportedModel(
                f"{folder / MODULES}: a module of type {shown(kind)} is not supported; supported:"
                f" {TRANSFORMER}, {POOLING} and {NORMALIZE}"
            )
    return "embed"


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


def _check_last_token(path: Path) -> None:
    settings = read_json(path)
    fields = ConfigFields(settings, str(path))
    mode = fields.text("pooling_mode")
    modes = [] if mode is None else [mode]
    modes += [
        key.removeprefix(MODES)
        for key, value in settings.items()
        if key.startswith(MODES) and value is True
    ]
    if set(modes) != {"lasttoken"}:
        raise UnsupportedModel(
            f"{path}: pooling {', '.join(modes) or '(none named)'} is not supported; only"
            f" {LAST_TOKEN}"
        )


def _classes(values: Mapping[str, Any]) -> int:
    """Number of labels: num_labels, or as many as id2label names."""
    named = ConfigFields(values).part("id2label")
    return ConfigFields(values).integer("num_labels", len(named) or DEFAULT_CLASSES)
