"""Write a model folder in which some tensors have other values.

In: a folder with safetensors files, and tensors by their names there. Out: another folder. Files
without such a tensor are links, so the folder costs the disk only the files that change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton_engine.errors import WeightsError
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_engine.weights.safetensors_files import Entry
from baton_text.gguf.header import is_gguf


def write_version(folder: Path, tensors: Mapping[str, torch.Tensor], into: Path) -> None:
    """Fill the empty folder `into`. Raises WeightsError for a name or a shape that the model in
    `folder` does not have."""
    if is_gguf(folder):
        raise WeightsError(f"{folder} is a GGUF file; give the path of another one, not tensors")
    files = {path: read_entries(path) for path in weight_files(folder)}
    _check({entry.name: entry for entries in files.values() for entry in entries}, tensors, folder)
    for path in folder.iterdir():
        changed = {entry.name for entry in files.get(path, ())} & tensors.keys()
        if changed:
            _rewrite(path, tensors, into / path.name)
        elif not path.name.startswith("."):  # digests of the old files
            (into / path.name).symlink_to(path.resolve())


def _check(entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if name not in entries:
            raise WeightsError(f"{folder} has no tensor {name}; use the names of its files")
        if tuple(tensor.shape) != tuple(entries[name].shape):
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)}; in {folder} it has"
                f" {list(entries[name].shape)}"
            )


def _rewrite(path: Path, tensors: Mapping[str, torch.Tensor], into: Path) -> None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        values = {name: tensors.get(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        whole = {name: value.detach().cpu().contiguous() for name, value in values.items()}
        save_file(whole, into, file.metadata())
