"""The module of transformers with its weights: from a checkpoint, or random.

In: a Source and a folder. Out: a module, whose attention is ours unless it is an encoder.
transformers itself loads the
checkpoint, because only it knows which tensors it has renamed or fused. It reads safetensors files
of the folder alone: no pickle, no code, no network. Tensors that are missing, left over or of
another shape are errors, as they are for the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from baton_engine.errors import WeightsError
from baton_engine.models.bridge.attention import NAME
from baton_engine.models.bridge.source import Source

ADAPTER = "adapter_config.json"
NAMES_SHOWN = 5
SEED = 0
STD = 0.02  # of random weights, as in transformers' initialisation
OUR_ATTENTION: Mapping[str, Any] = {"attn_implementation": NAME}


def nothing_spare(name: str) -> bool:
    """The model needs all tensors of its checkpoint."""
    return False


def load_module(
    source: Source,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    arguments: Mapping[str, Any] = OUR_ATTENTION,
    spare: Callable[[str], bool] = nothing_spare,
) -> torch.nn.Module:
    """`arguments` are for the model's class. `spare` says which tensors the checkpoint may have
    that the model does not use. Raises WeightsError."""
    if (folder / ADAPTER).exists():
        raise WeightsError(f"{folder} holds an adapter ({ADAPTER}), which is not supported")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # ours is enough
    verbosity = transformers_logging.get_verbosity()
    # What it would report of the tensors is checked below.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        load: Any = source.model_class.from_pretrained
        module, found = load(
            folder,
            config=source.config,
            dtype=dtype,
            generation_config=GenerationConfig(),  # type: ignore[no-untyped-call]
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise WeightsError(f"{folder}: {' '.join(str(error).split())}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check(found, folder, source, spare)
    placed: torch.nn.Module = module.eval().to(device)
    return placed


def random_module(
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    *,
    arguments: Mapping[str, Any] = OUR_ATTENTION,
) -> torch.nn.Module:
    """Norms of 1, biases of 0, and all other weights from N(0, STD^2)."""
    make: Any = source.model_class._from_config
    module: torch.nn.Module = make(source.config, dtype=dtype, **arguments)
    module.eval().to(device)
    noise = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.normal_(0.0, STD, generator=noise)
    return module


def _check(found: Any, folder: Path, source: Source, spare: Callable[[str], bool]) -> None:
    for name, ours, theirs in sorted(found["mismatched_keys"]):
        raise WeightsError(f"{name} has shape {list(ours)}; the config asks for {list(theirs)}")
    _refuse(found["missing_keys"], f"{folder} lacks")
    complaint = f"{folder} holds tensors that {source.architecture} has no use for:"
    _refuse((name for name in found["unexpected_keys"] if not spare(name)), complaint)
    if found["error_msgs"]:
        raise WeightsError(f"{folder}: {' '.join(found['error_msgs'])}")


def _refuse(names: Iterable[str], complaint: str) -> None:
    ordered = sorted(names)
    if ordered:
        more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
        raise WeightsError(f"{complaint} {', '.join(ordered[:NAMES_SHOWN])}{more}")
