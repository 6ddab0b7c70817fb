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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from baton_engine.config.config_json import shown
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.model_folder import FETCH_AGAIN
from baton_engine.config.quantization.kv_cache import SCALES
from baton_engine.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# How a file begins that stands for one outside the repository.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
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
# The dtypes of weights. Integers and 8-bit floats are quantized: without their scales they are
# other numbers.
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its bytes are file[begin:end]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def weight_map(index: bytes, place: str) -> dict[str, str]:
    """The file of each tensor, by an index file's content. `place` names the index in errors.
    Raises WeightsError."""
    try:
        named = json.loads(index)["weight_map"]
        files = {str(tensor): file for tensor, file in named.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{place} is not a safetensors index: {error!r}") from error
    for tensor, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
            raise WeightsError(
                f"{place}: {shown(tensor)} is in {shown(file)}; expected the name of a file in "
                "the same folder"
            )
    if not files:
        raise WeightsError(f"{place} names no tensor")
    return files


def weight_names(index: bytes | None, place: str) -> list[str]:
    """Sorted names of a checkpoint's files: the files in its `index` (the index file's content), or
    the single file if there is none. `place` names the index in errors. Raises WeightsError."""
    return [SINGLE_NAME] if index is None else sorted(set(weight_map(index, place).values()))


def read_index(folder: Path) -> bytes | None:
    """The content of the index file; None if there is none."""
    path = folder / INDEX_NAME
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files, ordered by name. Raises WeightsError if one is missing."""
    index = read_index(folder)
    files = [folder / name for name in weight_names(index, str(folder / INDEX_NAME))]
    for path in files:
        if not os.path.isfile(path):
            if index is not None:
                raise WeightsError(
                    f"{path} does not exist, and {INDEX_NAME} names it; {FETCH_AGAIN}"
                )
            raise WeightsError(f"{path} does not exist; only safetensors checkpoints can be loaded")
    return files


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a file, from its header. Raises WeightsError for a file that is truncated or
    not a safetensors file, and for a header that does not describe the file's bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise WeightsError(
                    f"{path} is a pointer of Git LFS, not the weights; run git lfs pull in"
                    f" {path.parent}"
                )
            file.seek(0)
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise WeightsError(f"{path} is no safetensors file (header of {length} bytes)")
            header = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors.pop("__metadata__", None)
        entries = [_entry(name, value, 8 + length) for name, value in tensors.items()]
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{path} has an unreadable header: {error}") from error
    _check_bytes(path, entries, 8 + length, size)
    return entries


def _entry(name: str, value: msgspec.Raw, base: int) -> Entry:
    """Raises ValueError."""
    if not name.isprintable():
        raise ValueError(f"{shown(name)} is no name of a tensor")
    try:
        tensor = msgspec.json.decode(value, type=_Tensor)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{name}: {error}") from error
    begin, end = tensor.data_offsets
    if tensor.dtype not in ITEM_BITS:
        raise ValueError(
            f"{name} has dtype {shown(tensor.dtype)}; supported: {', '.join(WEIGHT_DTYPES)}"
        )
    if (end - begin) * 8 != math.prod(tensor.shape) * ITEM_BITS[tensor.dtype]:
        raise ValueError(f"{name} of {tensor.dtype}{list(tensor.shape)} has {end - begin} bytes")
    return Entry(name, tensor.dtype, tensor.shape, base + begin, base + end)


def _check_bytes(path: Path, entries: Sequence[Entry], begin: int, size: int) -> None:
    """The tensors follow each other from the byte `begin` to the end of the file."""
    before = "the header"
    for entry in sorted(entries, key=lambda each: (each.begin, each.end)):
        if entry.begin != begin:
            raise WeightsError(
                f"{path}: {entry.name} begins at byte {entry.begin}, and {before} ends at {begin}"
            )
        begin, before = entry.end, entry.name
        if begin > size:
            raise WeightsError(
                f"{path} is truncated: it has {size} bytes, and {entry.name} ends at byte {begin};"
                f" {FETCH_AGAIN}"
            )
    if begin < size:
        raise WeightsError(f"{path} has {size} bytes, and {before}, the last part, ends at {begin}")


def ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is optional and does not affect the model: a rotary buffer (computed from
    the config), a head that the model does not have or shares with the embedding, a scale of KV, or
    a part that is not used."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith(config.unused_tensors):
        return True
    quantization = config.quantization
    if quantization is not None and quantization.kv_cache != "auto" and name.endswith(SCALES):
        return True
    return not config.has_own_head and name == "lm_head.weight"
