"""The files of a checkpoint and their tensors: safetensors files in a folder, or the parts of a
GGUF file. No torch."""

from __future__ import annotations

from pathlib import Path

from baton_engine.weights import gguf_entries, safetensors_files
from baton_engine.weights.safetensors_files import Entry
from baton_text.gguf.header import is_gguf, part_files


def weight_files(model: Path) -> list[Path]:
    """The checkpoint's files, ordered by name. Raises WeightsError if one is missing."""
    return part_files(model) if is_gguf(model) else safetensors_files.weight_files(model)


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a file, from its header. Raises WeightsError for a file that is truncated or
    damaged."""
    return (
        gguf_entries.read_entries(path) if is_gguf(path) else safetensors_files.read_entries(path)
    )
