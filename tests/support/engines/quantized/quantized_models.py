"""Quantize a tiny model's folder, and write the same numbers as a plain model for transformers.

In: a folder and the name of a layout. Out: two folders in the test cache, built on first use. The
weights of the plain one are those that the quantized one stands for, so its greedy ids are the
reference.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.quantized import (
    bitsandbytes,
    compressed_tensors,
    floats,
    integer_groups,
    online,
)
from tests.support.engines.quantized.layout import Layout
from tests.support.engines.tiny_models import CACHE, make_tiny_model

RECIPE = 4  # increase it when this folder writes different files from the same layouts
WEIGHTS = "model.safetensors"
LAYOUTS: Mapping[str, Layout] = {
    **bitsandbytes.LAYOUTS,
    **compressed_tensors.LAYOUTS,
    **floats.LAYOUTS,
    **integer_groups.LAYOUTS,
    **online.LAYOUTS,
}
# Only experts are quantized, and only of gpt-oss.
ALL_LAYOUTS: Mapping[str, Layout] = {**LAYOUTS, "mxfp4": floats.MXFP4}
# One model for each kind of numbers and of rounding, for suites that take long.
EACH_KIND: Mapping[str, str] = {
    "llama-gqa4 in w4a16 g32 zeros": "4 bits by groups of inputs, with zero points",
    "qwen3-gqa2 in w8a8": "8 bits, and inputs rounded to 8 bits by token",
    "deepseek-v2-lite in fp8 block": "FP8 by blocks, inputs too; experts and latent projections",
    "llama-gqa1 in bitsandbytes nf4": "a table of 16 numbers",
    "gpt-oss in mxfp4": "experts in 4-bit floats, scales that are powers of 2",
    "mixtral in nvfp4": "experts and attention in 4-bit floats, scales in 8 bits",
}


@dataclass(frozen=True)
class QuantizedModel:
    """`plain` has the numbers of `folder` as float32 weights."""

    folder: Path
    plain: Path


def model_folders(name: str) -> QuantizedModel:
    """The folders of "MODEL in LAYOUT". The folder of "MODEL" is also the plain one."""
    model, _, layout = name.partition(" in ")
    if layout:
        return make_quantized(model, layout)
    folder = make_tiny_model(model)
    return QuantizedModel(folder, folder)


def make_quantized(model: str, layout: str, root: Path = CACHE) -> QuantizedModel:
    """The folders of the tiny model `model` in `layout`. Safe in parallel processes."""
    source = make_tiny_model(model, root)
    key = hashlib.sha256(f"{RECIPE} {source} {ALL_LAYOUTS[layout].config}".encode()).hexdigest()[
        :12
    ]
    place = root / f"{key}-{layout.replace(' ', '-')}"
    if not place.is_dir():
        draft = Path(tempfile.mkdtemp(dir=root, prefix=".draft-"))
        plain = write_quantized(source, draft / "quantized", ALL_LAYOUTS[layout])
        copy_with(source, draft / "plain", plain)
        try:
            os.rename(draft, place)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not place.is_dir():  # otherwise another process was faster
                raise
    return QuantizedModel(place / "quantized", place / "plain")


def write_quantized(source: Path, folder: Path, layout: Layout) -> Mapping[str, torch.Tensor]:
    """Write the model of `source` in `layout` to the new `folder`. Returns the numbers that it
    stands for, by the source's names."""
    quantized: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        module, _, part = name.rpartition(".")
        quantize = layout.quantize_of(module) if part == "weight" else None
        if layout.fused is not None and name.endswith(
            ("experts.gate_up_proj", "experts.down_proj")
        ):
            parts, plain[name] = layout.fused(tensor.float())
            quantized |= {f"{name}_{suffix}": each for suffix, each in parts.items()}
        elif quantize is not None:
            parts, plain[name] = quantize(tensor.float())
            quantized |= {f"{module}.{suffix}": each for suffix, each in parts.items()}
        else:
            quantized[name] = plain[name] = tensor
    copy_with(source, folder, quantized)
    config = json.loads((source / "config.json").read_text())
    if layout.config:
        config["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return plain


def copy_with(source: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a model's folder with other tensors. References of the source are not those of the
    copy."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*", WEIGHTS))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS)
