"""List the tensors of a folder's safetensors files. Reads only the headers. No torch.

A safetensors file has an 8-byte little-endian header length, a JSON header with each tensor's
dtype, shape and byte range, and then the bytes. A sharded checkpoint has an index that names its
files.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
ITEM_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its bytes are file[begin:end]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_names(index: bytes | None, place: str) -> list[str]:
    """Sorted names of a checkpoint's files: the files in its `index` (the index file's content), or
    the single file if there is none. `place` names the index in errors. Raises WeightsError."""
    if index is None:
        return [SINGLE_NAME]
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
        return [os.fspath(name) for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{place} is not a safetensors index: {error!r}") from error


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files, ordered by name. Raises WeightsError if one is missing."""
    index = folder / INDEX_NAME
    data = index.read_bytes() if index.is_file() else None
    files = [folder / name for name in weight_names(data, str(index))]
    for path in files:
        if not path.is_file():
            raise WeightsError(f"{path} does not exist; only safetensors checkpoints can be loaded")
    return files


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a file, from its header. Raises WeightsError for a file that is truncated or
    not a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise WeightsError(f"{path} is no safetensors file (header of {length} bytes)")
        header = file.read(length)
    try:
        fields = json.loads(header)
        entries = [
            _entry(name, value, 8 + length)
            for name, value in fields.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} has an unreadable header: {error!r}") from error
    for entry in entries:
        if entry.end > size:
            raise WeightsError(f"{path} is truncated: {entry.name} ends at byte {entry.end}")
    return entries


def _entry(name: str, value: Mapping[str, list[int]], base: int) -> Entry:
    begin, end = value["data_offsets"]
    dtype, shape = str(value["dtype"]), tuple(value["shape"])
    bits = ITEM_BITS[dtype]
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{name} of {dtype}{list(shape)} has {end - begin} bytes")
    return Entry(name, dtype, shape, base + begin, base + end)


def ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is optional and does not affect the model: a rotary buffer (computed from
    the config), a tied model's copy of the embedding, or a part that is not used."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith(config.unused_tensors):
        return True
    return config.tied and name == "lm_head.weight"
