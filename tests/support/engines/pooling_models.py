"""Folders of tiny pooling models, made from those of `tiny_models`.

In: the folder of a generating model. Out: the folder of one that embeds, as sentence-transformers
saves Qwen3-Embedding, or of a classifier.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.engines.tiny_models import FIRST_SPECIAL, SPECIALS

WEIGHTS = "model.safetensors"
EOS = FIRST_SPECIAL + 1
MODULES = ("Transformer", "Pooling", "Normalize")
LAST_TOKEN = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


def embedding_model(source: Path, folder: Path, pooling: dict[str, Any] | None = None) -> Path:
    """A model that embeds: its tensors are named as the decoder alone names them, and its tokenizer
    adds EOS after a text. `pooling` is the config of the Pooling module."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*"))
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    modules = [
        {
            "idx": place,
            "name": str(place),
            "path": "" if place == 0 else f"{place}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, kind in enumerate(MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = LAST_TOKEN if pooling is None else pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    _add_eos(folder)
    return folder


def classifier(source: Path, folder: Path, classes: int) -> Path:
    """A classifier with random weights of its scores."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*"))
    config = json.loads((folder / "config.json").read_text())
    [architecture] = config["architectures"]
    config["architectures"] = [architecture.replace("ForCausalLM", "ForSequenceClassification")]
    config["id2label"] = {str(place): f"LABEL_{place}" for place in range(classes)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("lm_head.weight", None)
    noise = torch.Generator().manual_seed(classes)
    scores = torch.empty(classes, config["hidden_size"]).normal_(0.0, 0.1, generator=noise)
    save_file(tensors | {"score.weight": scores}, folder / WEIGHTS, {"format": "pt"})
    return folder


def changed(source: Path, folder: Path, change: dict[str, Any]) -> Path:
    """A copy of a folder with other files: None removes one, config.json is updated."""
    shutil.copytree(source, folder)
    for name, content in change.items():
        if content is None:
            (folder / name).unlink()
            continue
        if name == "config.json":
            content = json.loads((folder / name).read_text()) | content
        (folder / name).write_text(json.dumps(content))
    return folder


def _add_eos(folder: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {SPECIALS[1]}",
        pair=f"$A $B {SPECIALS[1]}",
        special_tokens=[(SPECIALS[1], EOS)],
    )
    tokenizer.save(path)
