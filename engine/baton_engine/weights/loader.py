"""Load a model's weights from safetensors files or a GGUF file. Every parameter needs a tensor, and
every tensor a parameter.

In: the folder, or the GGUF file, and the parameters that a model declared. Out: loaded parameters,
or a WeightsError that names the tensors that are missing, left over, or of the wrong shape or
dtype. Rotary buffers, a tied model's copy of the embedding and zero biases of quantized layers are
optional. A tied head that differs from the embedding is an error. The numbers themselves are not
checked: NaN or infinity is loaded as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import Parameter, WeightSlots
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_engine.weights.gguf_loading import load_tensors
from baton_engine.weights.safetensors_files import (
    INDEX_NAME,
    WEIGHT_DTYPES,
    Entry,
    ignorable,
    read_index,
    weight_map,
)
from baton_text.gguf.header import is_gguf

HEAD_NAME = "lm_head.weight"
EMBED_NAME = "model.embed_tokens.weight"
BIAS = ".bias"
NAMES_SHOWN = 5
# A file is opened again after this many bytes.
MAPPED_BYTES = 64 << 20
# The dtypes in the file for parameters that are no plain weights: they are never converted.
STORED_DTYPES: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int64: ("I64",),
    torch.int32: ("I32",),
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
}


def load_weights(
    folder: Path,
    config: ModelConfig,
    slots: WeightSlots,
    progress: Callable[[int], None] = lambda size: None,
    *,
    prefix: str = "",
) -> None:
    """Load every tensor of the checkpoint whose name begins with `prefix` into its parameter. Calls
    `progress` with the size in bytes of each loaded tensor in its file. Raises WeightsError."""
    parameters = slots.parameters
    owner: dict[str, Path] = {}
    entries: dict[str, Entry] = {}
    for path in weight_files(folder):
        for entry in read_entries(path):
            if not entry.name.startswith(prefix):
                continue
            if entry.name in owner:
                raise WeightsError(f"{entry.name} is in {owner[entry.name].name} and {path.name}")
            owner[entry.name], entries[entry.name] = path, entry
    slots.use_spelling(owner)
    for name in parameters.keys() & entries.keys():
        _check(entries[name], parameters[name], owner[name])
    needed = {name for name, parameter in parameters.items() if not parameter.optional}
    missing = needed - owner.keys()
    _refuse(missing, f"{folder} lacks", _indexed(folder) if missing else {})
    left_over = {
        name
        for name in owner.keys() - parameters.keys()
        if not ignorable(name, config) and not _is_zero_bias(owner[name], name, config)
    }
    _refuse(left_over, f"{folder} holds tensors that {config.architecture} has no use for:", {})
    for path in sorted(set(owner.values())):
        used = [
            entry for name, entry in entries.items() if owner[name] == path and name in parameters
        ]
        if is_gguf(path):
            load_tensors(path, used, config, parameters, progress)
            continue
        for part in _parts(used):
            _load(path, parameters, part, progress)
    if config.tied and HEAD_NAME in owner and not config.pooling:
        _check_tie(owner, parameters[EMBED_NAME].dtype)


def _check(entry: Entry, parameter: Parameter, path: Path) -> None:
    where = f"{entry.name} in {path.name}"
    dtypes = parameter.stored or STORED_DTYPES.get(parameter.dtype, WEIGHT_DTYPES)
    if entry.dtype not in dtypes:
        raise WeightsError(f"{where} has dtype {entry.dtype}; supported: {', '.join(dtypes)}")
    if not parameter.fits(entry.shape):
        raise WeightsError(
            f"{where} has shape {list(entry.shape)}; the config asks for {list(parameter.shape)}"
        )


def _indexed(folder: Path) -> Mapping[str, str]:
    """The file in which each tensor should be, by the index."""
    index = read_index(folder)
    return {} if index is None else weight_map(index, INDEX_NAME)


def _parts(entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    """The names of a file's tensors in the order of their bytes, MAPPED_BYTES at a time. A file's
    pages stay in this process while it is open: all at once they would be the model a second
    time."""
    part: list[str] = []
    size = 0
    for entry in sorted(entries, key=lambda each: each.begin):
        part.append(entry.name)
        size += entry.end - entry.begin
        if size >= MAPPED_BYTES:
            yield part
            part, size = [], 0
    yield part


def _load(
    path: Path,
    parameters: Mapping[str, Parameter],
    names: Sequence[str],
    progress: Callable[[int], None],
) -> None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        for name in names:
            tensor = file.get_tensor(name)
            parameters[name].load(tensor)
            progress(tensor.nbytes)


def _check_tie(owner: Mapping[str, Path], dtype: torch.dtype) -> None:
    head_VD, embed_VD = (_read(owner[name], name).to(dtype) for name in (HEAD_NAME, EMBED_NAME))
    if not torch.equal(head_VD, embed_VD):
        raise WeightsError(
            f"{HEAD_NAME} differs from {EMBED_NAME} although tie_word_embeddings is true"
        )


def _is_zero_bias(path: Path, name: str, config: ModelConfig) -> bool:
    """The first versions of AutoGPTQ give a bias of zeros to each quantized layer."""
    layer = name.removesuffix(BIAS)
    if (
        layer == name
        or is_gguf(path)
        or config.quantization is None
        or not config.quantization.scheme_of(layer)
    ):
        return False
    return not _read(path, name).any()


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _refuse(names: Collection[str], complaint: str, places: Mapping[str, str]) -> None:
    """`places` are the files that should have the tensors."""
    if names:
        some = sorted(names)[:NAMES_SHOWN]
        shown = ", ".join(
            f"{name} (by the index it is in {places[name]})" if name in places else name
            for name in some
        )
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        raise WeightsError(f"{complaint} {shown}{more}")
