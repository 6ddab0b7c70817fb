"""List the tensors of a GGUF file under the names of Hugging Face checkpoints. No torch."""

from __future__ import annotations

import math
from pathlib import Path

from baton_engine.config.gguf_names import UNUSED, VECTORS, checkpoint_names
from baton_engine.errors import WeightsError
from baton_engine.weights.safetensors_files import Entry
from baton_text.gguf.config import config_of
from baton_text.gguf.header import GgufError, Tensor, part_files, read_header


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a file, which may be one part of a model. Raises WeightsError."""
    try:
        header = read_header(part_files(path)[0])
        [architecture] = config_of(header)["architectures"]
    except GgufError as error:
        raise WeightsError(str(error)) from error
    return [
        entry
        for tensor in header.tensors.values()
        if tensor.name not in UNUSED and tensor.path == path
        for entry in _entries(tensor, checkpoint_names(tensor, architecture))
    ]


def _entries(tensor: Tensor, names: list[str]) -> list[Entry]:
    shape = tensor.shape
    if len(names) > 1:
        shape = shape[1:]  # of one expert
    elif names[0].endswith(VECTORS) and len(shape) == 1:
        shape = (1, *shape)
    size = math.prod(shape) // tensor.type.block * tensor.type.size
    return [
        Entry(name, tensor.type.name, shape, tensor.begin + at, tensor.begin + at + size)
        for name, at in zip(names, range(0, size * len(names), size), strict=True)
    ]
