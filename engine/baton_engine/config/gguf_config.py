"""The config of a model in a GGUF file. No torch.

In: the file. Out: the values of config.json and generation_config.json, and from the list of
tensors what these do not say.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton_engine.config.gguf_names import checkpoint_names
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.quantization.gguf import quantization_of
from baton_engine.errors import ModelError, UnsupportedModel
from baton_text.gguf.config import config_of, generation_of
from baton_text.gguf.header import GgufError, Header, read_header

# Factors that divide the frequencies of rope, as Llama 3 has them.
ROPE_FACTORS = "rope_freqs.weight"
WEIGHT = ".weight"

ReadConfig = Callable[[Mapping[str, Any], Mapping[str, Any]], ModelConfig]


def read_gguf_config(path: Path, read: ReadConfig) -> ModelConfig:
    """`read` makes a config of the values of config.json and of generation_config.json. Raises
    ModelError or UnsupportedModel."""
    try:
        header = read_header(path)
        config = read(config_of(header), generation_of(header))
    except GgufError as error:
        raise ModelError(str(error)) from error
    if config.bridge is not None:
        raise UnsupportedModel(
            f"{path}: GGUF files cannot be computed by transformers' code; use --model-impl baton"
        )
    types = [
        (name.removesuffix(WEIGHT), tensor.type.name)
        for tensor in header.tensors.values()
        if tensor.name.endswith(WEIGHT)
        for name in checkpoint_names(tensor, config.architecture)
    ]
    config = replace(config, quantization=quantization_of(types))
    factors = _rope_factors(header, config)
    if not factors:
        return config
    rope = replace(config.rope, type="longrope", short_factors=factors, long_factors=factors)
    return replace(config, rope=rope)


def _rope_factors(header: Header, config: ModelConfig) -> tuple[float, ...]:
    """() if there are none. Raises ModelError."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    count = config.head_dim // 2
    if tensor.type.name != "F32" or tensor.shape != (count,) or config.rope.type != "default":
        raise ModelError(
            f"{header.path}: {ROPE_FACTORS} has type {tensor.type.name} and shape "
            f"{list(tensor.shape)} beside rope scaling {config.rope.type}; expected F32 [{count}] "
            "beside none"
        )
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.begin)
            factors = struct.unpack(f"<{count}f", file.read(4 * count))
    except (OSError, struct.error) as error:
        raise ModelError(f"{tensor.path} cannot be read: {error}") from error
    if not all(0 < factor < float("inf") for factor in factors):
        raise ModelError(f"{header.path}: {ROPE_FACTORS} has numbers that are not positive")
    return factors
