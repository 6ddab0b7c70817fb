"""Loads tensors of a GGUF file into parameters.

Blocks of codes go from the file to their places some rows at a time, so that nothing is in memory
twice.

Shapes: R rows of a tensor.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from baton_engine.config.gguf_names import rotary_heads
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import Parameter
from baton_engine.layers.quantization.gguf import BlockParameter
from baton_engine.weights.safetensors_files import Entry

PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
BYTES_AT_ONCE = 8 << 20


def load_tensors(
    path: Path,
    entries: Sequence[Entry],
    config: ModelConfig,
    parameters: Mapping[str, Parameter],
    progress: Callable[[int], None],
) -> None:
    """Load each of `entries` into its parameter. Raises WeightsError."""
    try:
        with path.open("rb", buffering=0) as file:
            for entry in sorted(entries, key=lambda each: each.begin):
                _load(file, entry, config, parameters[entry.name])
                progress(entry.end - entry.begin)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def _load(file: io.FileIO, entry: Entry, config: ModelConfig, parameter: Parameter) -> None:
    heads = rotary_heads(entry.name, config)
    order_R = None if heads is None else in_halves(entry.shape[0], heads)
    if not isinstance(parameter, BlockParameter):
        tensor = _octets(file, entry.begin, entry.end).view(PLAIN[entry.dtype]).view(entry.shape)
        parameter.load(tensor if order_R is None else tensor[order_R])
    elif order_R is None:
        for begin, octets_RY in _rows(file, entry):
            parameter.load_rows(begin, octets_RY)
    else:
        octets = _octets(file, entry.begin, entry.end)
        parameter.load(octets.view(entry.shape[0], -1)[order_R])


def in_halves(rows: int, heads: int) -> torch.Tensor:
    """The order that puts the first members of all pairs of a head before all second ones. Some
    GGUF files have the two that rope rotates together side by side."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _rows(file: io.FileIO, entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
    """Some rows at a time, with the number of the first."""
    count = entry.shape[0]
    size = (entry.end - entry.begin) // count
    step = max(1, BYTES_AT_ONCE // size)
    for first in range(0, count, step):
        last = min(first + step, count)
        octets = _octets(file, entry.begin + first * size, entry.begin + last * size)
        yield first, octets.view(last - first, size)


def _octets(file: io.FileIO, begin: int, end: int) -> torch.Tensor:
    """Raises OSError if the file has become shorter."""
    file.seek(begin)
    octets = np.fromfile(file, np.uint8, end - begin)
    if len(octets) < end - begin:
        raise OSError(f"it ends before byte {end}")
    return torch.from_numpy(octets)
